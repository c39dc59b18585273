"""Certificates in files: the user's own, or those that `python -m common.credentials new DIR` makes."""

from __future__ import annotations

import datetime
from pathlib import Path

from common.credentials.identity import MEMBER_NAME, Identity
from common.errors import UsageError
from common.system.private_files import make_private, read_private

__all__ = ["VALID_DAYS", "identity_in", "new_certificates"]

VALID_DAYS = 365
CLOCKS_DIFFER = datetime.timedelta(days=1)


def identity_in(certificate: Path, key: Path, authority: Path) -> Identity:
    """
    Raises:
        UsageError: a file cannot be read, does not hold what it should, or others can read the key.
    """
    import ssl

    from common.credentials.contexts import client_context

    identity = Identity(
        _public(certificate, "--tls-cert"), read_private(key, "the key file"), _public(authority, "--tls-ca")
    )
    try:
        client_context(identity)
    except (ssl.SSLError, ValueError) as exc:
        raise UsageError(
            f"{certificate}, {key} and {authority} are not a certificate, its key without a password, and an "
            f"authority's certificate, in PEM ({exc})"
        ) from exc
    return identity


def _public(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise UsageError(f"cannot read {flag} {path}: {exc.strerror}") from exc


def new_certificates(folder: Path, hosts: int = 1) -> list[Path]:
    """Make an authority and a certificate for each of so many hosts; each has ca.pem, cert.pem and key.pem.

    The authority's key is kept nowhere: for another host all are made anew.

    Returns:
        the folders: `folder` itself for one host, else host-0, host-1 and so on in it.

    Raises:
        UsageError: a file is there already, or cannot be written.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    from common.credentials.issuing import authority_for, issue, private_pem

    places = [folder] if hosts == 1 else [folder / f"host-{number}" for number in range(hosts)]
    for place in places:
        for name in ("ca.pem", "cert.pem", "key.pem"):
            if (place / name).exists():
                raise UsageError(f"{place / name} is there already, and is never overwritten; choose another folder")
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    dates = now - CLOCKS_DIFFER, now + datetime.timedelta(days=VALID_DAYS)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = authority_for(authority_key, "GradSync", dates)
    for place in places:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = issue(authority, authority_key, key.public_key(), dates, [x509.DNSName(MEMBER_NAME)])
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise UsageError(f"cannot make the folder {place}: {exc.strerror}") from exc
        make_private(place / "key.pem", private_pem(key))
        make_private(place / "cert.pem", certificate.public_bytes(Encoding.PEM))
        make_private(place / "ca.pem", authority.public_bytes(Encoding.PEM))
    return places
