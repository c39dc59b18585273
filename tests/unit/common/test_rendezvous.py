"""How ranks meet: complete groups over real gRPC, and every way in which a group cannot come together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest

from common import __version__
from common.errors import GradSyncError, PeerUnreachable, RendezvousError, StaleEpoch, UsageError, VersionMismatch
from common.launch.ranks import abstract_address
from common.network import rpc
from common.network.gradsync_pb2 import JoinReply, JoinRequest
from common.network.rendezvous import GRACE, METHOD, Membership, RendezvousServer, Roster, join
from tests.support.groups import outcomes_of

LIMIT_S = 20.0  # of groups that are expected to be complete, or to fail at once
Wait = Callable[[Callable[[], object]], None]


def request(rank: int, nranks: int, *, version: str = __version__, backend: str = "shm") -> JoinRequest:
    return JoinRequest(version=version, rank=rank, nranks=nranks, backend=backend, address=f"host{rank}:{rank}")


def hello(address: str, message: JoinRequest) -> JoinReply:
    """Join with a message of the test's making."""
    with rpc.connect(address, timeout=LIMIT_S) as channel:
        method = channel.unary_unary(
            METHOD, request_serializer=JoinRequest.SerializeToString, response_deserializer=JoinReply.FromString
        )
        try:
            return method(message, timeout=LIMIT_S)
        except grpc.RpcError as exc:
            raise rpc.translate(exc, "rank 0", "joining") from exc


def join_as(address: str, rank: int, nranks: int, *, timeout: float = LIMIT_S) -> Membership:
    return join(address, rank=rank, nranks=nranks, backend="shm", address=f"host{rank}:{rank}", timeout=timeout)


def outcome(future: Future[Membership]) -> tuple[type, str]:
    error = future.exception()
    return type(error), str(error)


@pytest.mark.parametrize("nranks", [1, 2, 3, 5])
def test_a_complete_group_knows_all_addresses_in_rank_order(nranks: int) -> None:
    with (
        RendezvousServer("127.0.0.1:0", nranks, timeout=LIMIT_S) as server,
        ThreadPoolExecutor(nranks) as pool,
    ):
        late_first = [pool.submit(join_as, server.address, rank, nranks) for rank in reversed(range(nranks))]
        members = [future.result() for future in late_first]
    assert {m.addresses for m in members} == {tuple(f"host{rank}:{rank}" for rank in range(nranks))}
    assert len({m.token for m in members}) == 1
    assert len(members[0].token) == 16


def test_every_group_has_a_token_of_its_own() -> None:
    tokens = set()
    for _ in range(2):
        address = abstract_address("test")
        with RendezvousServer(address, 1, timeout=LIMIT_S):
            tokens.add(join_as(address, 0, 1).token)
    assert len(tokens) == 2


def test_a_rank_may_come_before_the_server() -> None:
    address = abstract_address("test")
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(join_as, address, 0, 1)
        with RendezvousServer(address, 1, timeout=LIMIT_S):
            assert early.result().addresses == ("host0:0",)


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (request(3, 3), RendezvousError, "rank 3 is outside 0..2"),
        (request(7, 3), RendezvousError, "rank 7 is outside 0..2"),
        (request(1, 3), RendezvousError, "rank 1 joined twice; give every rank its own --rank"),
        (
            request(2, 4),
            RendezvousError,
            "rank 2 was started with nranks 4, the group with 3; give all the same --nranks",
        ),
        (
            request(2, 3, version="0.0.0"),
            VersionMismatch,
            f"rank 2 runs GradSync 0.0.0, this group {__version__}; install one version",
        ),
        (
            request(2, 3, backend="tcp"),
            RendezvousError,
            "ranks disagree on the backend: shm, tcp; give all the same --backend",
        ),
    ],
    ids=["outside", "far outside", "twice", "nranks", "version", "backend"],
)
def test_a_contradiction_fails_the_group_at_once_for_all(
    wrong: JoinRequest, kind: type[GradSyncError], text: str, wait_until: Wait
) -> None:
    address = abstract_address("test")
    with RendezvousServer(address, 3, timeout=LIMIT_S) as server, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(join_as, address, rank, 3) for rank in (0, 1)]
        wait_until(lambda: len(server._roster.members) == 2)
        begin = time.monotonic()
        with pytest.raises(GradSyncError) as caught:
            hello(address, wrong)
        assert (type(caught.value), str(caught.value)) == (kind, text)
        assert [outcome(future) for future in waiting] == [(kind, text)] * 2
        with pytest.raises(kind) as late:
            join_as(address, 2, 3)
        assert str(late.value) == text
    assert time.monotonic() - begin < LIMIT_S / 2


def test_members_of_a_job_that_disagree_are_all_told(wait_until: Wait) -> None:
    address = abstract_address("test")
    with RendezvousServer(address, 2, timeout=LIMIT_S) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(join_as, address, 0, 2)
        wait_until(lambda: server._roster.members)
        with pytest.raises(RendezvousError, match="rank 1 was started with nranks 3, the group with 2"):
            join_as(address, 1, 3)
        assert outcome(waiting)[1].startswith("rank 1 was started with nranks 3, the group with 2")


def test_who_is_of_another_epoch_is_sent_away_and_the_group_comes_together() -> None:
    def come(address: str, rank: int, epoch: int) -> Membership:
        return join(address, rank=rank, nranks=2, backend="shm", address="", timeout=LIMIT_S, epoch=epoch)

    with RendezvousServer("127.0.0.1:0", 2, timeout=LIMIT_S, epoch=2) as server, ThreadPoolExecutor(2) as pool:
        with pytest.raises(StaleEpoch, match=r"^rank 1 is of epoch 1, this is epoch 2 of the group$"):
            come(server.address, 1, 1)
        members = [pool.submit(come, server.address, rank, 2) for rank in range(2)]
        assert all(len(member.result().addresses) == 2 for member in members)


def test_a_missing_rank_is_named_to_every_waiting_one_within_the_deadline() -> None:
    address = abstract_address("test")
    begin = time.monotonic()
    with RendezvousServer(address, 4, timeout=0.3), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(join_as, address, rank, 4, timeout=0.3) for rank in (0, 2)]
        found = [outcome(future) for future in waiting]
    text = "2 of 4 ranks joined within 0.3 s; missing: rank 1, 3"
    text += ": not started, refused for its credentials (it says so), ended without joining, or too slow"
    assert found == [(RendezvousError, f"{text} (then raise --timeout)")] * 2
    assert 0.3 <= time.monotonic() - begin < 5


def test_a_rank_with_a_shorter_limit_still_learns_who_is_missing() -> None:
    address = abstract_address("test")
    with (
        RendezvousServer(address, 2, timeout=2 + 2 * GRACE),
        pytest.raises(RendezvousError, match="missing: rank 1"),
    ):
        join_as(address, 0, 2, timeout=0.2)


def test_nobody_at_the_address() -> None:
    address = abstract_address("test")
    with pytest.raises(PeerUnreachable, match=f"nobody answered at {address} within 0.2 s"):
        join_as(address, 0, 2, timeout=0.2)


def test_closing_tells_the_waiting_ranks_at_once(wait_until: Wait) -> None:
    address = abstract_address("test")
    server = RendezvousServer(address, 3, timeout=LIMIT_S)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(join_as, address, rank, 3) for rank in (1, 2)]
        wait_until(lambda: len(server._roster.members) == 2)
        begin = time.monotonic()
        server.close()
        found = [outcome(future) for future in waiting]
    assert all(issubclass(kind, GradSyncError) for kind, _ in found)
    assert time.monotonic() - begin < LIMIT_S / 2  # and no thread of the server waits on: see conftest.py


def test_who_leaves_before_the_group_is_complete_may_come_again(wait_until: Wait) -> None:
    with RendezvousServer(abstract_address("test"), 2, timeout=LIMIT_S) as server:
        with rpc.connect(server.address, timeout=LIMIT_S) as channel:
            method = channel.unary_unary(
                METHOD, request_serializer=JoinRequest.SerializeToString, response_deserializer=JoinReply.FromString
            )
            call = method.future(request(0, 2), timeout=LIMIT_S)
            wait_until(lambda: server._roster.members)
            call.cancel()
            wait_until(lambda: not server._roster.members)
        with ThreadPoolExecutor(2) as pool:
            again = [pool.submit(join_as, server.address, rank, 2) for rank in (0, 1)]
            assert {future.result().addresses for future in again} == {("host0:0", "host1:1")}


def test_a_port_can_be_used_again_after_close() -> None:
    with RendezvousServer("127.0.0.1:0", 1, timeout=LIMIT_S) as first:
        join_as(first.address, 0, 1)
    with RendezvousServer(first.address, 1, timeout=LIMIT_S) as second:
        assert second.address == first.address
        assert join_as(second.address, 0, 1).addresses == ("host0:0",)


def test_the_roster_completes_without_grpc() -> None:
    roster = Roster(2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(roster.wait_for_all, request(1, 2), LIMIT_S)
        mine = roster.wait_for_all(request(0, 2), LIMIT_S)
        assert [m.rank for m in mine] == [m.rank for m in other.result()] == [0, 1]
    assert roster.complete


def test_the_roster_keeps_the_first_failure() -> None:
    roster = Roster(2)
    roster.fail(RendezvousError("first"))
    roster.fail(RendezvousError("second"))
    with pytest.raises(RendezvousError, match="first"):
        roster.wait_for_all(request(0, 2), LIMIT_S)
    assert not roster.complete


def test_a_failure_wakes_who_waits_in_the_roster(wait_until: Wait) -> None:
    roster = Roster(2)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            roster.wait_for_all(request(0, 2), LIMIT_S)
        except RendezvousError as exc:
            errors.append(exc)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: roster.members)
    failure = RendezvousError("the server is going")
    roster.fail(failure)
    waiting.join()
    assert errors == [failure]


def test_who_comes_after_the_group_is_complete_does_not_disturb_it() -> None:
    roster = Roster(1)
    assert roster.wait_for_all(request(0, 1), LIMIT_S) == [request(0, 1)]
    with pytest.raises(RendezvousError, match="rank 0 joined twice"):
        roster.wait_for_all(request(0, 1), LIMIT_S)


@pytest.mark.parametrize("scheme", ["collective", "ps"])
def test_a_rank_beyond_the_group_is_told_to_the_others_at_once(scheme: str) -> None:
    """It took them the whole timeout."""
    import collective
    from ps.client.client import Client
    from tests.support.sessions import serving

    begin = time.monotonic()
    with ExitStack() as stack:
        address = stack.enter_context(serving(2))[0].address if scheme == "ps" else abstract_address("outside")

        def connect(rank: int) -> None:
            if scheme == "ps":
                Client([address], rank, 2)
            else:
                collective.connect(rank, 2, address, backend="shm")

        first, outside = [outcome.error for outcome in outcomes_of(2, lambda index: connect(3 * index))]
    assert isinstance(first, RendezvousError)
    assert "rank 3 is outside 0..1" in str(first)
    assert isinstance(outside, UsageError)
    assert str(outside) == "rank 3 is outside 0..1 (--nranks 2)"
    assert time.monotonic() - begin < 5.0


def test_two_first_ranks_are_told_so() -> None:
    import collective

    address = abstract_address("doubled")
    errors = [each.error for each in outcomes_of(2, lambda _: collective.connect(0, 2, address, backend="shm"))]
    assert [str(error) for error in errors] == ["rank 0 joined twice; give every rank its own --rank"] * 2
    assert {type(error) for error in errors} == {RendezvousError}
