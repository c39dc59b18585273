"""A gRPC server's look at who calls: the certificate of a client is checked before any method runs.

gRPC has checked by then that it is of the job's authority. It cannot be told to ask for a name, or for TLS 1.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from common.credentials.identity import MEMBER_NAME
from common.network.refusal_log import Refusals

__all__ = ["MembersOnly"]

NAMES, VERSION = "x509_subject_alternative_name", "ssl_tls_version"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class MembersOnly(grpc.ServerInterceptor):
    """Of a server with credentials, at this address."""

    def __init__(self, address: str) -> None:
        self._refusals = Refusals(address)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        return handler._replace(**{kind: self._checked(method) for kind in KINDS if (method := getattr(handler, kind))})

    def _checked(
        self, method: Callable[[Any, grpc.ServicerContext], Any]
    ) -> Callable[[Any, grpc.ServicerContext], Any]:
        """The same method for members only."""

        def only_for_members(request: Any, context: grpc.ServicerContext) -> Any:
            if why := objection(context.auth_context()):
                self._refusals.note(context.peer(), why)
                context.abort(grpc.StatusCode.UNAUTHENTICATED, why)
            return method(request, context)

        return only_for_members


def objection(shown: Any) -> str:
    """Why a client that has shown this is no member; "": it is one.

    Args:
        shown: what gRPC says of the connection; its older versions do not tell TLS's.
    """
    if MEMBER_NAME.encode() not in shown.get(NAMES, ()):
        return f"the certificate is not for {MEMBER_NAME}"
    if any(version != b"TLSv1.3" for version in shown.get(VERSION, ())):
        return "TLS 1.3 is needed"
    return ""
