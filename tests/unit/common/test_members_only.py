"""gRPC between members: who does not belong is refused before a method runs, and told why at once."""

from __future__ import annotations

import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from common.credentials.credentials import Credentials, find
from common.credentials.identity import MEMBER_NAME, Identity
from common.errors import CredentialsRefused, PeerUnreachable, UsageError
from common.launch.ranks import abstract_address
from common.network import rpc
from common.network.why_refused import HTTP2
from tests.support.certificates import Authority, credentials_of
from tests.support.channels import INSECURE, OTHERS

LIMIT_S = 20.0
TOKEN = Credentials("token", "--token-file t", bytes(range(32)))
METHODS = {
    "unary_unary": lambda seen: grpc.unary_unary_rpc_method_handler(lambda r, c: seen.append(r) or b"yes"),
    "unary_stream": lambda seen: grpc.unary_stream_rpc_method_handler(lambda r, c: seen.append(r) or iter([b"yes"])),
    "stream_unary": lambda seen: grpc.stream_unary_rpc_method_handler(lambda r, c: seen.append(r) or b"yes"),
    "stream_stream": lambda seen: grpc.stream_stream_rpc_method_handler(lambda r, c: seen.append(r) or iter([b"yes"])),
}


@contextmanager
def serving(credentials: Credentials, address: str = "127.0.0.1:0") -> Iterator[tuple[str, list[Any]]]:
    """A server with a method of each kind: its address, and what its methods were called with."""
    seen: list[Any] = []
    handlers = {kind: make(seen) for kind, make in METHODS.items()}
    server, where = rpc.serve(address, "test.Service", handlers, threads=4, credentials=credentials)
    try:
        yield where, seen
    finally:
        server.stop(0).wait()


def ask(channel: grpc.Channel, kind: str = "unary_unary") -> bytes:
    request = iter([b"?"]) if kind.startswith("stream") else b"?"
    answer = getattr(channel, kind)(f"/test.Service/{kind}")(request, timeout=LIMIT_S)
    return next(answer) if kind.endswith("stream") else answer


@pytest.mark.parametrize("kind", METHODS)
def test_members_are_answered(kind: str) -> None:
    with serving(TOKEN) as (address, seen), rpc.connect(address, timeout=LIMIT_S, credentials=TOKEN) as channel:
        assert ask(channel, kind) == b"yes"
        assert len(seen) == 1


def test_what_is_negotiated() -> None:
    """gRPC's oldest versions that we take do not tell the version."""
    seen: list[Any] = []

    def tell(_: bytes, context: grpc.ServicerContext) -> bytes:
        seen.append(context.auth_context())
        return b"yes"

    handlers = {"unary_unary": grpc.unary_unary_rpc_method_handler(tell)}
    server, address = rpc.serve("127.0.0.1:0", "test.Service", handlers, threads=1, credentials=TOKEN)
    try:
        with rpc.connect(address, timeout=LIMIT_S, credentials=TOKEN) as channel:
            ask(channel)
    finally:
        server.stop(0).wait()
    (shown,) = seen
    assert shown["x509_subject_alternative_name"] == [b"gradsync"]
    assert shown["security_level"] == [b"TSI_PRIVACY_AND_INTEGRITY"]
    assert shown.get("ssl_tls_version", [b"TLSv1.3"]) == [b"TLSv1.3"]
    assert shown["ssl_session_reused"] == [b"false"]


PAIRS = {
    "another token": (TOKEN, OTHERS, "does not belong to this job: other credentials"),
    "insecure client": (TOKEN, INSECURE, "asks for credentials, and this process was started with --insecure"),
    "insecure server": (INSECURE, TOKEN, "does not speak TLS, as with --insecure"),
    "a user's own": (TOKEN, find(environment={}), "does not belong to this job: other credentials"),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("address", ["127.0.0.1:0", "unix"])
def test_other_credentials_are_told_at_once(pair: str, address: str) -> None:
    server, client, text = PAIRS[pair]
    with serving(server, abstract_address("test") if address == "unix" else address) as (where, seen):
        begin = time.monotonic()
        refused = pytest.raises(CredentialsRefused, match=f"who listens at {where} {text}")
        with refused, rpc.connect(where, timeout=LIMIT_S, credentials=client):
            pass
        assert time.monotonic() - begin < LIMIT_S / 2
        assert seen == []


@pytest.mark.parametrize("who", ["another authority", "expired", "not yet valid"])
def test_certificates_that_are_no_members_are_refused_by_the_handshake(who: str) -> None:
    authority = Authority()
    stranger = credentials_of(authority.strangers()[who])
    with serving(credentials_of(authority.identity())) as (address, seen):
        refused = pytest.raises(CredentialsRefused, match="does not take this process's c")
        with refused, rpc.connect(address, timeout=LIMIT_S, credentials=stranger):
            pass
        assert seen == []


@pytest.mark.parametrize("kind", METHODS)
def test_a_certificate_for_another_name_is_refused_before_a_method_runs(kind: str) -> None:
    """gRPC's servers do not look at names: one of the user's authority for his mail server would do."""
    authority = Authority()
    stranger = credentials_of(authority.strangers()["another name"])
    with (
        serving(credentials_of(authority.identity())) as (address, seen),
        rpc.connect(address, timeout=LIMIT_S, credentials=stranger) as channel,
    ):
        with pytest.raises(grpc.RpcError) as caught:
            ask(channel, kind)
        assert isinstance(rpc.translate(caught.value, "it", "asking"), UsageError)
        assert seen == []


def test_a_server_with_a_certificate_for_another_name_is_not_believed() -> None:
    authority = Authority()
    stranger = credentials_of(authority.strangers()["another name"])
    mine = credentials_of(authority.identity())
    refused = pytest.raises(CredentialsRefused, match="does not belong to this job")
    with serving(stranger) as (address, _), refused, rpc.connect(address, timeout=LIMIT_S, credentials=mine):
        pass


def over_tls(address: str, identity: Identity | None, version: ssl.TLSVersion) -> bytes:
    """What a server says first to Python's own TLS, which can be told to speak 1.2."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(HTTP2)
    context.load_verify_locations(cadata=TOKEN.identity.authority.decode())
    if identity is not None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(identity.certificate + identity.key)
            file.flush()
            context.load_cert_chain(file.name)
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), LIMIT_S)
    secured = context.wrap_socket(connection, server_hostname=MEMBER_NAME, do_handshake_on_connect=False)
    with secured:
        try:
            secured.do_handshake()
            return secured.recv(9)
        except (ssl.SSLError, ConnectionError):
            return b""


def test_a_client_without_a_certificate_gets_no_word() -> None:
    with serving(TOKEN) as (address, _):
        assert over_tls(address, None, ssl.TLSVersion.TLSv1_3) == b""
        assert over_tls(address, None, ssl.TLSVersion.TLSv1_2) == b""
        assert over_tls(address, OTHERS.identity, ssl.TLSVersion.TLSv1_3) == b""
        assert over_tls(address, TOKEN.identity, ssl.TLSVersion.TLSv1_3) != b""


def test_no_method_runs_over_tls_1_2() -> None:
    """gRPC itself lets a member speak 1.2; ours speak 1.3."""
    from common.network.members_only import objection

    mine = {"x509_subject_alternative_name": [b"gradsync"]}
    assert objection({**mine, "ssl_tls_version": [b"TLSv1.3"]}) == ""
    assert objection({**mine, "ssl_tls_version": [b"TLSv1.2"]}) == "TLS 1.3 is needed"
    assert objection({}) == "the certificate is not for gradsync"


def test_who_asks_for_credentials_but_never_answers_is_unreachable() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        unreachable = pytest.raises(PeerUnreachable, match=r"nobody answered at .* within 0\.2 s")
        with unreachable, rpc.connect(f"127.0.0.1:{mute.getsockname()[1]}", timeout=0.2, credentials=TOKEN):
            pass


def test_other_hosts_are_not_connected_to_without_credentials() -> None:
    refused = pytest.raises(UsageError, match=r"refusing to connect to 192\.0\.2\.1:8500 without credentials: make a")
    with refused, rpc.connect("192.0.2.1:8500", timeout=LIMIT_S, credentials=find(environment={})):
        pass
