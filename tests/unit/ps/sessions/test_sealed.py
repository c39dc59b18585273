"""Without TLS what goes over gRPC between hosts has a checksum; within a host it has none."""

from __future__ import annotations

import pytest

from common.credentials.credentials import using
from common.errors import ChunkCorrupt
from common.tensors.arena import Arena, FloatArray
from ps.client.client import Client
from ps.planes.sealing import Sealing
from tests.support.channels import INSECURE
from tests.support.groups import on_threads
from tests.support.sessions import addresses, as_trainer, errors_of, expected_after, make_arena, serving, take_step


def steps(client: Client, arena: Arena) -> FloatArray:
    take_step(client, arena)
    take_step(client, arena)
    return arena.parameters.copy()


@pytest.fixture
def between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.planes.sealing.is_loopback", lambda host: False)


def senders_of_sealed(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, bool]]:
    """Are added whenever a message comes: who sent it, and whether it has a checksum."""
    found, unseal = set[tuple[str, bool]](), Sealing.unseal

    def noted(self: Sealing, data: bytes, sender: str) -> bytes | memoryview:
        found.add((sender.partition(" at ")[0], self._on))
        return unseal(self, data, sender)

    monkeypatch.setattr(Sealing, "unseal", noted)
    return found


def train() -> None:
    with using(INSECURE, warn=False), serving(2) as servers:
        both = on_threads(2, lambda rank: as_trainer(addresses(servers), rank, 2, steps, data_plane="grpc"))
    assert [each.tobytes() for each in both] == [expected_after(2, 2, make_arena(0)).tobytes()] * 2


SENDERS = {"a caller", "rank 0", "rank 1", "server 0"}


def test_between_hosts_all_messages_have_one(monkeypatch: pytest.MonkeyPatch, between_hosts: None) -> None:
    found = senders_of_sealed(monkeypatch)
    train()
    assert found == {(sender, True) for sender in SENDERS}


def test_within_a_host_none_has(monkeypatch: pytest.MonkeyPatch) -> None:
    found = senders_of_sealed(monkeypatch)
    train()
    assert found == {(sender, False) for sender in SENDERS}


def test_damage_between_hosts_is_told_by_all(monkeypatch: pytest.MonkeyPatch, between_hosts: None) -> None:
    seal = Sealing.seal

    def damaged(self: Sealing, *parts: bytes | memoryview) -> bytes:
        data = seal(self, *parts)
        return data if len(parts) == 1 else data[:40] + bytes([data[40] ^ 1]) + data[41:]

    monkeypatch.setattr(Sealing, "seal", damaged)
    with using(INSECURE, warn=False), serving(2) as servers:
        errors = errors_of(2, lambda rank: as_trainer(addresses(servers), rank, 2, steps, data_plane="grpc"))
    assert {type(error) for error in errors} == {ChunkCorrupt}
    assert all("were damaged on their way" in str(error) for error in errors)
