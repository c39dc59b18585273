"""Identities that a stranger may come with: of another authority, out of date, for another name."""

from __future__ import annotations

import datetime
from dataclasses import replace

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from common.credentials.credentials import Credentials
from common.credentials.derived import authority_from
from common.credentials.identity import MEMBER_NAME, Identity
from common.credentials.issuing import authority_for, issue, private_pem

__all__ = ["Authority", "credentials_of"]

DAY = datetime.timedelta(days=1)


class Authority:
    """Of a user's own, in files; or that of a job whose token has this secret."""

    def __init__(self, secret: bytes = b"") -> None:
        self.now = datetime.datetime.now(datetime.timezone.utc)
        if secret:
            self.certificate, self.key = authority_from(secret)
            return
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = authority_for(self.key, "a user's", (self.now - 9 * DAY, self.now + 9 * DAY))

    def identity(self, name: str = MEMBER_NAME, *, begins: int = -1, ends: int = 1) -> Identity:
        """Dates in days from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        dates = self.now + begins * DAY, self.now + ends * DAY
        certificate = issue(self.certificate, self.key, key.public_key(), dates, [x509.DNSName(name)])
        return Identity(
            certificate.public_bytes(Encoding.PEM), private_pem(key), self.certificate.public_bytes(Encoding.PEM)
        )

    def strangers(self) -> dict[str, Identity]:
        """Who trusts this authority's servers and is not to be let in by them."""
        mine = self.identity().authority
        return {
            "another authority": replace(Authority().identity(), authority=mine),
            "expired": self.identity(begins=-3, ends=-1),
            "not yet valid": self.identity(begins=1, ends=3),
            "another name": self.identity("mail.example.org"),
        }


def credentials_of(identity: Identity) -> Credentials:
    return Credentials("files", "files", files=identity)
