"""TLS between members over a socket: who gets through, and who does not, by what he shows."""

from __future__ import annotations

import socket
import ssl
import threading

import pytest

from common.credentials.contexts import client_context, server_context
from common.credentials.credentials import Credentials
from common.credentials.derived import derive, identity_from
from common.credentials.identity import MEMBER_NAME, Identity
from tests.support.certificates import Authority

LIMIT_S = 20.0
SECRET, OTHER = bytes(range(32)), bytes(range(1, 33))


def handshake(server: Identity, client: ssl.SSLContext, name: str = MEMBER_NAME) -> tuple[str, str]:
    """What server and client have at the end of a handshake: the protocol's version, or the error's class."""
    ends = socket.socketpair()
    found = ["", ""]

    def shake(index: int) -> None:
        try:
            context = client if index else server_context(server)
            with (
                ends[index],
                context.wrap_socket(
                    ends[index], server_side=not index, server_hostname=name if index else None
                ) as secured,
            ):
                secured.sendall(b"x")
                found[index] = str(secured.version()) if secured.recv(1) else "left"
        except OSError as error:
            found[index] = type(error).__name__

    for each in ends:
        each.settimeout(LIMIT_S)
    threads = [threading.Thread(target=shake, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0], found[1]


def fresh(secret: bytes) -> Identity:
    """As in another process."""
    return identity_from.__wrapped__(secret)


def test_who_knows_the_secret_is_let_in() -> None:
    first, second = fresh(SECRET), fresh(SECRET)
    assert first.key != second.key
    assert handshake(first, client_context(second)) == ("TLSv1.3", "TLSv1.3")


def test_who_knows_another_secret_is_not() -> None:
    assert handshake(fresh(SECRET), client_context(fresh(OTHER))) == ("SSLError", "SSLCertVerificationError")


def test_who_only_copies_the_authoritys_certificate_is_not() -> None:
    other, right = fresh(OTHER), fresh(SECRET)
    thief = Identity(other.certificate, other.key, right.authority)
    assert handshake(right, client_context(thief))[0] == "SSLCertVerificationError"
    assert handshake(thief, client_context(right))[1] == "SSLCertVerificationError"


@pytest.mark.parametrize("who", ["another authority", "expired", "not yet valid", "another name"])
def test_certificates_that_are_no_members_end_the_handshake_at_either_end(who: str) -> None:
    authority = Authority()
    member, stranger = authority.identity(), authority.strangers()[who]
    assert handshake(member, client_context(authority.identity())) == ("TLSv1.3", "TLSv1.3")
    assert handshake(member, client_context(stranger))[0] == "SSLCertVerificationError"
    assert handshake(stranger, client_context(member))[1] == "SSLCertVerificationError"


def test_a_client_without_a_certificate_is_not_let_in() -> None:
    client = ssl.create_default_context(cadata=fresh(SECRET).authority.decode())
    assert handshake(fresh(SECRET), client)[0] == "SSLError"


def test_tls_1_2_is_not_spoken() -> None:
    client = client_context(fresh(SECRET))
    client.minimum_version = ssl.TLSVersion.TLSv1_2
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert handshake(fresh(SECRET), client) == ("SSLError", "SSLError")


def test_a_client_must_ask_for_the_members_name() -> None:
    assert handshake(fresh(SECRET), client_context(fresh(SECRET)), "localhost")[1] == "SSLCertVerificationError"
    with socket.socket() as connection, pytest.raises(ValueError, match="server_hostname"):
        client_context(fresh(SECRET)).wrap_socket(connection)


def test_keys_for_different_purposes_or_secrets_differ_and_tell_nothing_of_each_other() -> None:
    token = Credentials("token", "", SECRET)
    keys = [token.proof_key(b"a"), token.proof_key(b"b"), Credentials("token", "", OTHER).proof_key(b"a")]
    keys += [derive(SECRET, b"authority"), SECRET, Credentials("none", "").proof_key(b"a")]
    assert len(set(keys)) == 6
    assert token.proof_key(b"a") == Credentials("job", "", SECRET).proof_key(b"a")
    assert {len(key) for key in keys} == {32}


def test_derived_bytes_are_those_of_rfc_5869() -> None:
    """HMAC by hand: extract with the salt, then the first block of expand."""
    import hmac

    extracted = hmac.digest(b"gradsync 1", SECRET, "sha256")
    assert derive(SECRET, b"proof x") == hmac.digest(extracted, b"proof x\x01", "sha256")
    with pytest.raises(ValueError, match="a secret has 32 bytes"):
        derive(SECRET[:16], b"proof x")
