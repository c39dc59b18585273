"""TLS for sockets: version 1.3 only, and both ends show that they are members."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from common.credentials.identity import MEMBER_NAME, Identity

__all__ = ["client_context", "server_context"]


def server_context(identity: Identity) -> ssl.SSLContext:
    """Of a server that answers to members only: with others the handshake fails with ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslsocket_class = MemberSocket
    context.num_tickets = 0  # nothing is resumed
    return _prepared(context, identity)


def client_context(identity: Identity) -> ssl.SSLContext:
    """Of a client; `wrap_socket` must be given server_hostname=MEMBER_NAME."""
    return _prepared(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), identity)


def _prepared(context: ssl.SSLContext, identity: Identity) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.authority.decode())
    with _in_memory(identity.certificate + identity.key) as path:
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
