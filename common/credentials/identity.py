"""How a process shows that it belongs: its certificate and key, and the authority that all members have theirs from."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["MEMBER_NAME", "Identity"]

MEMBER_NAME = "gradsync"  # in every member's certificate, so that other certificates of an authority are of no use


@dataclass(frozen=True)
class Identity:
    """In PEM."""

    certificate: bytes  # with those between it and the authority's
    key: bytes = field(repr=False)
    authority: bytes

    def server_context(self) -> ssl.SSLContext:
        """Of a server that answers to members only. A handshake fails with ssl.SSLError, also at other names."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sslsocket_class = MemberSocket
        context.num_tickets = 0  # nothing is resumed
        return self._prepared(context)

    def client_context(self) -> ssl.SSLContext:
        """Of a client; `wrap_socket` must be given server_hostname=MEMBER_NAME."""
        return self._prepared(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _prepared(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode())
        with _in_memory(self.certificate + self.key) as path:
            context.load_cert_chain(path)
        return context


class MemberSocket(ssl.SSLSocket):
    """The server's end of a connection, whose handshake fails where the client's certificate does not name a member;
    a client's end checks that by itself."""

    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        names = dict(self.getpeercert() or {}).get("subjectAltName", ())
        if ("DNS", MEMBER_NAME) not in names:
            raise ssl.SSLCertVerificationError(f"the client's certificate is not for {MEMBER_NAME}")


@contextmanager
def _in_memory(contents: bytes) -> Iterator[str]:
    """A path by which this process can read these bytes, which are in no file."""
    descriptor = os.memfd_create("gradsync-identity")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(contents)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
