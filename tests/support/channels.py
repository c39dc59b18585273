"""Channels of a member that is not one of our clients, and credentials for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from common.credentials.credentials import Credentials, current

__all__ = ["ENDS", "INSECURE", "OTHERS", "member_channel"]

ENDS = ("grpc.enable_retries", 0)  # an option without which a call may never end if the server closes as it comes

INSECURE = Credentials("none", "--insecure")
OTHERS = Credentials("token", "another token", b"another job's secret, 32 bytes  ")


def member_channel(address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
    """To a server that has this process's credentials; without our limits and our retries."""
    mine = current()
    options = [*options, ENDS, *mine.grpc_channel_options()]
    return grpc.secure_channel(address, mine.grpc_channel_credentials(), options=options)
