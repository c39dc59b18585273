"""Why who listens at an address does not take us, or we not him: gRPC tries again for ever and does not say."""

from __future__ import annotations

import socket
import ssl

from common.credentials.credentials import Credentials
from common.credentials.identity import MEMBER_NAME

__all__ = ["why_refused"]

MOST_S = 2.0  # for each step of a handshake
HTTP2 = ["h2"]  # what gRPC asks for


def why_refused(address: str, credentials: Credentials, seconds: float) -> str:
    """What is wrong with the credentials, for people; "" if nothing is, or nobody is there to tell.

    Args:
        seconds: the longest to wait for each step of a handshake; MOST_S, if that is less.
    """
    try:
        with _dial(address, min(seconds, MOST_S)) as connection:
            if credentials.secure:
                return _with_credentials(connection, address, credentials)
            return _without(connection, address)
    except OSError:  # nobody, or one who is just leaving
        return ""


def _dial(address: str, seconds: float) -> socket.socket:
    if address.startswith("unix"):
        kind, _, name = address.partition(":")
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(seconds)
        try:
            connection.connect("\0" + name if kind == "unix-abstract" else name.removeprefix("//"))
        except BaseException:
            connection.close()
            raise
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), seconds)


def _with_credentials(connection: socket.socket, address: str, credentials: Credentials) -> str:
    ours = f"this process has {credentials.source}; give all processes of a job the same"
    if credentials.kind == "user":
        ours += ", by --token-file: each user has his own, and another one where XDG_RUNTIME_DIR differs"
    context = credentials.client_context()
    context.set_alpn_protocols(HTTP2)
    try:
        with context.wrap_socket(connection, server_hostname=MEMBER_NAME) as secured:
            if not secured.recv(1):  # gRPC says nothing to a client whose certificate it does not take
                return f"who listens at {address} does not take this process's certificate; {ours}"
    except ssl.SSLCertVerificationError as exc:
        return f"who listens at {address} does not belong to this job: other credentials ({exc.verify_message}); {ours}"
    except ssl.SSLEOFError:  # ends without a word
        return ""
    except ssl.SSLError as exc:
        reason = (exc.reason or "").lower().replace("_", " ")
        if "alert" in reason:
            return f"who listens at {address} does not take this process's credentials ({reason}); {ours}"
        return f"who listens at {address} does not speak TLS, as with --insecure, or is none of ours; {ours}"
    return ""


def _without(connection: socket.socket, address: str) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is told to it, or believed of it
    context.set_alpn_protocols(HTTP2)
    try:
        context.wrap_socket(connection).close()
    except ssl.SSLError:
        return ""
    return f"who listens at {address} asks for credentials, and this process was started with --insecure"
