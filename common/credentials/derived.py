"""Certificates without a file: what everyone who knows a secret of 256 bits makes of it by himself.

The key of the job's authority is derived from the secret (HKDF, RFC 5869), so that all members have the same authority.
Each process issues itself a certificate by it, for a key of its own. That proves that its holder is a member, not which
one.
"""

from __future__ import annotations

import datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from common.credentials.identity import MEMBER_NAME, Identity

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate

__all__ = ["SECRET_BYTES", "authority_from", "derive", "identity_from"]

SECRET_BYTES = 32
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # FIPS 186-4, D.1.2.3
KEY_BYTES = 48  # more than the order has, so that each key is as likely as any other (FIPS 186-4, B.4.1)
ALWAYS = (datetime.datetime(1970, 1, 1), datetime.datetime(2999, 12, 31))  # clocks may differ, and secrets end first
AUTHORITY = "GradSync job"


def derive(secret: bytes, purpose: bytes, length: int = SECRET_BYTES) -> bytes:
    """Bytes for one purpose, which tell nothing of the secret or of those for another purpose.

    Raises:
        ValueError: the secret is not of SECRET_BYTES.
    """
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes (got {len(secret)})")
    return HKDF(SHA256(), length, salt=b"gradsync 1", info=purpose).derive(secret)


def authority_from(secret: bytes) -> tuple[Certificate, EllipticCurvePrivateKey]:
    """The job's authority: the same for all who know the secret."""
    from cryptography.hazmat.primitives.asymmetric import ec

    from common.credentials.issuing import authority_for

    number = int.from_bytes(derive(secret, b"authority", KEY_BYTES), "big") % (P256_ORDER - 1) + 1
    key: EllipticCurvePrivateKey = ec.derive_private_key(number, ec.SECP256R1())
    return authority_for(key, AUTHORITY, ALWAYS, serial=1), key


@lru_cache(maxsize=8)
def identity_from(secret: bytes) -> Identity:
    """This process's identity among all who know the secret."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    from common.credentials.issuing import issue, private_pem

    authority, authority_key = authority_from(secret)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = issue(authority, authority_key, key.public_key(), ALWAYS, [x509.DNSName(MEMBER_NAME)])
    return Identity(certificate.public_bytes(Encoding.PEM), private_pem(key), authority.public_bytes(Encoding.PEM))
