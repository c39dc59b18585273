"""Channels that are closed at once."""

from __future__ import annotations

import grpc
import pytest

from common.network import rpc


@pytest.fixture(autouse=True)
def _quick_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers listen already; a channel that has waited for that takes gRPC 0.2 s to close."""
    monkeypatch.setattr(rpc, "connect", lambda address, timeout: grpc.insecure_channel(address, rpc.CHANNEL_OPTIONS))
