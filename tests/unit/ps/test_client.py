"""Clients and servers over real gRPC in one process: the same bits as NumPy, and named errors on every side."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from common import __version__
from common.errors import (
    GradSyncError,
    LayoutMismatch,
    PeerError,
    PeerLost,
    PeerStalled,
    PeerUnreachable,
    PortInUse,
    ProtocolError,
    RendezvousError,
    UsageError,
    VersionMismatch,
)
from common.network import rpc
from common.network.gradsync_pb2 import (
    Chunk,
    Failure,
    Gather,
    Hello,
    JoinReply,
    JoinRequest,
    Memory,
    Place,
    Plane,
    Served,
    ServerMessage,
    TrainerMessage,
)
from common.system.memory import Segment, aligned_empty
from common.tensors.arena import Arena, FloatArray, Layout
from common.tensors.buckets import Bucket, plan_buckets
from common.tensors.optimizers import SGD, Adam
from ps.client.session import Client
from ps.coordinator.servicer import JOIN, SERVICE, SESSION, ParameterServer
from ps.coordinator.training_group import TrainingGroup
from ps.planes.lanes import NOTE_BYTES
from ps.planes.shared_memory import OthersMemory, Unreachable, probe_of
from tests.support.groups import assert_same_bits, on_threads, outcomes_of, reduced, sample
from tests.support.numpy_updater import numpy_piece_updater

DEADLINE_S = 20.0
SHAPES = [("a.weight", (7, 9)), ("a.bias", (9,)), ("b.weight", (9, 33)), ("b.bias", (1,))]
RATE = 0.05


@pytest.fixture(autouse=True)
def _without_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.coordinator.training_group.make_piece_updater", numpy_piece_updater)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Every thread of ours, and every sender of gRPC's, ends with its client or server."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + DEADLINE_S
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("gradsync-") or "consume_request_iterator" in thread.name:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"{thread.name} is left"


@contextmanager
def serving(nranks: int, servers: int = 1, *, timeout: float = 30.0) -> Iterator[list[ParameterServer]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                ParameterServer("127.0.0.1:0", nranks, shard=(index, servers), timeout=timeout),
            )
            for index in range(servers)
        ]


def addresses(servers: Sequence[ParameterServer]) -> list[str]:
    return [server.address for server in servers]


def make_arena(
    rank: int,
    shapes: Sequence[tuple[str, tuple[int, ...]]] = SHAPES,
    *,
    bucket_bytes: int = 512,
    empty: Callable[[int], Any] = aligned_empty,
) -> Arena:
    """Parameters differ by rank, so that it shows whose win."""
    layout = Layout.of(shapes)
    starts = [slot.start for slot in layout.slots]
    buckets = plan_buckets(starts, layout.length, first_bytes=64, bucket_bytes=bucket_bytes)
    arena = Arena(layout, buckets=buckets, empty=empty)
    arena.parameters[...] = sample(rank, layout.length, "float32", seed=99)
    return arena


def take_step(client: Client, arena: Arena, *, rate: float = RATE, pushed: int = 0) -> None:
    """Args: pushed: how many buckets have been, of the same gradients."""
    arena.gradients[...] = sample(client.rank, arena.layout.length, "float32", seed=client.step)
    for bucket in range(pushed, len(arena.buckets)):
        client.push(bucket)
    client.commit(rate)


def expected_after(steps: int, nranks: int, arena: Arena) -> FloatArray:
    length = arena.layout.length
    parameters = sample(0, length, "float32", seed=99)
    for step in range(steps):
        gradients = [sample(rank, length, "float32", seed=step) for rank in range(nranks)]
        for b in arena.buckets:
            mean = reduced([g[b.start : b.stop] for g in gradients], "mean")
            parameters[b.start : b.stop] -= np.float32(RATE) * mean
    return parameters


def as_trainer(
    servers: Sequence[str],
    rank: int,
    nranks: int,
    body: Callable[[Client, Arena], Any],
    **options: Any,
) -> Any:
    """Join, register, call `body`, and leave; after an error with the reason, as training does."""
    client, arena = Client(servers, rank, nranks, **options), make_arena(rank)
    try:
        client.register(arena, SGD())
        result = body(client, arena)
    except BaseException as exc:
        client.close(f"{type(exc).__name__}: {exc}")
        raise
    client.close()
    return result


def errors_of(nranks: int, body: Callable[[int], object]) -> list[BaseException | None]:
    return [outcome.error for outcome in outcomes_of(nranks, body)]


def failure_of(server: ParameterServer) -> GradSyncError:
    with pytest.raises(GradSyncError) as caught:
        server.wait()
    return caught.value


def assert_all(errors: Sequence[BaseException | None], kind: type[GradSyncError], text: str) -> None:
    assert [type(error) for error in errors] == [kind] * len(errors), errors
    assert all(text in str(error) for error in errors), errors


# ---- the same bits ----------------------------------------------------------------------------------------------


PLANES: dict[str, list[tuple[str, bool]]] = {  # each rank's data plane, and whether its arrays are from `empty`
    "grpc": [("grpc", False)] * 3,
    "shm": [("shm", True)] * 3,
    "shm, ordinary arrays": [("shm", False)] * 3,
    "shm, rank 0's arrays ordinary": [("auto", False), ("auto", True), ("auto", True)],
    "rank 0 over grpc": [("grpc", False), ("shm", True), ("shm", False)],
    "rank 1 over grpc": [("auto", True), ("grpc", True), ("auto", True)],
}
planes = pytest.mark.parametrize("planes", PLANES.values(), ids=PLANES)


@planes
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_training_gives_numpys_bits(nranks: int, servers: int, planes: Sequence[tuple[str, bool]]) -> None:
    def body(rank: int) -> list[FloatArray]:
        plane, shared = planes[rank]
        with Client(addresses(group), rank, nranks, data_plane=plane) as client:
            arena = make_arena(rank, empty=client.empty if shared else aligned_empty)
            client.register(arena, SGD())
            assert client.data_plane == ("grpc" if plane == "grpc" else "shm")
            seen = [arena.parameters.copy()]
            for _ in range(3):
                take_step(client, arena)
                seen.append(arena.parameters.copy())
        return seen

    with serving(nranks, servers) as group:
        seen = on_threads(nranks, body)
        for server in group:
            server.wait()
            assert server.steps == 3
    assert len(make_arena(0).buckets) == 3
    for step in range(4):
        expected = expected_after(step, nranks, make_arena(0))
        for rank in range(nranks):
            assert seen[rank][step].tobytes() == expected.tobytes()


@planes
def test_averages_arrive_whatever_the_data_plane(planes: Sequence[tuple[str, bool]]) -> None:
    def body(rank: int) -> list[FloatArray]:
        plane, shared = planes[rank]
        with Client(addresses(group), rank, 3, data_plane=plane) as client:
            arena = make_arena(rank, empty=client.empty if shared else aligned_empty)
            client.register(arena, None)
            means = [arena.parameters.copy()]
            for step in range(3):
                arena.gradients[...] = sample(rank, arena.layout.length, "float32", seed=step)
                for bucket in range(len(arena.buckets)):
                    client.push(bucket)
                client.average()
                means.append(arena.gradients.copy())
            arena.parameters.fill(rank)  # without an optimizer they are each rank's own
            client.all_gather(np.zeros(1))
            assert np.all(arena.parameters == rank)
        return means

    with serving(3, 2) as group:
        results = on_threads(3, body)
    arena = make_arena(0)
    expected = [sample(0, arena.layout.length, "float32", seed=99)]
    for step in range(3):
        gradients = [sample(rank, arena.layout.length, "float32", seed=step) for rank in range(3)]
        expected.append(np.zeros(arena.layout.length, np.float32))
        for b in arena.buckets:
            expected[-1][b.start : b.stop] = reduced([g[b.start : b.stop] for g in gradients], "mean")
    for result in results:
        for got, wanted in zip(result, expected, strict=True):
            assert_same_bits(got, wanted)


def test_parameters_from_empty_are_one_memory_until_a_trainer_leaves() -> None:
    """What one writes, all see: the server writes once for all. After `close` each has its own."""

    def body(rank: int) -> tuple[float, float, float]:
        with Client(addresses(group), rank, 3, data_plane="shm") as client:
            arena = make_arena(rank, empty=client.empty)
            client.register(arena, SGD())
            if rank == 1:
                arena.parameters[5] = 42.0
            client.all_gather(np.zeros(1))
            common = float(arena.parameters[5])
            client.all_gather(np.zeros(1))
        arena.parameters[5] = rank
        return common, float(arena.parameters[5]), float(arena.parameters[6])

    with serving(3) as group:
        results = on_threads(3, body)
    assert results == [(42.0, rank, results[0][2]) for rank in range(3)]


@pytest.mark.parametrize("servers", [1, 2])
def test_rank_0_may_leave_before_a_slow_rank_has_mapped_its_parameters(
    servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, share_memory = threading.Event(), Client._share_memory

    def slow(client: Client) -> None:
        if client.rank:
            assert left.wait(DEADLINE_S)
        share_memory(client)

    monkeypatch.setattr(Client, "_share_memory", slow)

    def body(rank: int) -> bytes:
        with Client(addresses(group), rank, 2, data_plane="shm") as client:
            arena = make_arena(rank, empty=client.empty)
            client.register(arena, SGD())
        left.set()
        return arena.parameters.tobytes()

    with serving(2, servers) as group:
        results = on_threads(2, body)
    assert results == [make_arena(0).parameters.tobytes()] * 2


def test_a_trainer_out_of_reach_goes_over_grpc_unless_it_must_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between hosts, and between containers: what is offered is not what is found."""
    for host, text in (
        ("elsewhere", "they are on different hosts"),
        (None, "is in another container or of another user"),
    ):

        def elsewhere(segment: Segment, host: str | None = host) -> Memory:
            found = probe_of(segment)
            return Memory(host=host, size=64) if host else Memory(host=found.host, pid=found.pid, descriptor=99_999)

        monkeypatch.setattr("ps.client.session.probe_of", elsewhere)
        with serving(1) as group, Client(addresses(group), 0, 1) as client:
            arena = make_arena(0, empty=client.empty)
            client.register(arena, SGD())
            assert client.data_plane == "grpc"
            take_step(client, arena)
            assert arena.parameters.tobytes() == expected_after(1, 1, arena).tobytes()
        with serving(1) as group, Client(addresses(group), 0, 1, data_plane="shm") as client:
            with pytest.raises(UsageError) as caught:
                client.register(make_arena(0), SGD())
            message = str(caught.value)
            assert message.startswith(f"server 0 at {group[0].address} and rank 0 cannot share memory: "), message
            assert text in message
            assert message.endswith("; use --data-plane auto or grpc")


def test_another_file_under_the_same_number_is_not_taken(tmp_path: Path) -> None:
    """Process and descriptor of another container may exist here too; device and inode tell."""
    with Segment(64) as segment, OthersMemory() as others, (tmp_path / "other").open("wb+") as other:
        assert others.segment(probe_of(segment)).nbytes == 64
        os.truncate(other.fileno(), 64)
        memory = probe_of(segment)
        memory.descriptor = other.fileno()
        with pytest.raises(Unreachable, match="they are in different containers"):
            others.segment(memory)
        beyond = Place(memory=probe_of(segment), offset=32)
        with pytest.raises(Unreachable, match="bytes at 32 of a memory of 64"):
            others.array(beyond, 9)


def test_data_planes_are_named() -> None:
    with pytest.raises(UsageError, match=r"unknown data plane 'rdma' \(known: auto, shm, grpc\)"):
        Client(["127.0.0.1:1"], 0, 1, data_plane="rdma")


@pytest.mark.parametrize("servers", [1, 2])
def test_an_arena_of_several_messages(servers: int) -> None:
    shapes = [("w", (300_000,)), ("v", (333, 1000)), ("b", (5,))]

    def body(rank: int) -> Arena:
        arena = make_arena(rank, shapes, bucket_bytes=1_000_000)
        with closing(Client(addresses(group), rank, 2)) as client:
            client.register(arena, SGD())
            for _ in range(2):
                take_step(client, arena)
        return arena

    with serving(2, servers) as group:
        arenas = on_threads(2, body)
    assert arenas[0].parameters.nbytes > 2 << 20
    expected = expected_after(2, 2, arenas[0])
    for arena in arenas:
        assert arena.parameters.tobytes() == expected.tobytes()


def test_more_servers_than_cache_lines() -> None:
    def body(rank: int) -> Arena:
        arena = make_arena(rank, [("b", (3,))])
        with closing(Client(addresses(group), rank, 2)) as client:
            client.register(arena, SGD())
            take_step(client, arena)
        return arena

    with serving(2, 3) as group:
        arenas = on_threads(2, body)
    for arena in arenas:
        assert arena.parameters.tobytes() == expected_after(1, 2, arena).tobytes()


def test_buckets_may_be_pushed_in_any_order() -> None:
    def body(client: Client, arena: Arena) -> FloatArray:
        arena.gradients[...] = sample(client.rank, arena.layout.length, "float32", seed=0)
        order = range(len(arena.buckets))
        for bucket in order if client.rank else reversed(order):
            client.push(bucket)
        client.commit(RATE)
        return arena.parameters.copy()

    with serving(2, 2) as group:
        results = on_threads(2, lambda rank: as_trainer(addresses(group), rank, 2, body))
    for result in results:
        assert result.tobytes() == expected_after(1, 2, make_arena(0)).tobytes()


@pytest.mark.parametrize("values", [np.array([1.5, -2.0]), np.zeros((0, 3)), np.arange(6).reshape(3, 2).T])
def test_all_gather_stacks_in_rank_order(values: Any) -> None:
    def body(client: Client, arena: Arena) -> Any:
        first = client.all_gather(np.asarray(values) + client.rank)
        take_step(client, arena)
        return first, client.all_gather(np.array([client.rank], np.int8))

    with serving(3, 2) as group:
        results = on_threads(3, lambda rank: as_trainer(addresses(group), rank, 3, body))
    expected = np.stack([np.asarray(values) + rank for rank in range(3)])
    for first, second in results:
        assert first.dtype == expected.dtype
        np.testing.assert_array_equal(first, expected, strict=True)
        np.testing.assert_array_equal(second, np.array([[0], [1], [2]], np.int8), strict=True)


def test_all_gather_of_scalars_gives_a_vector() -> None:
    def body(client: Client, arena: Arena) -> Any:
        return client.all_gather(np.array(client.rank))

    with serving(2) as (server,):
        results = on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body))
    np.testing.assert_array_equal(results[0], np.array([0, 1]), strict=True)


def test_all_gather_of_more_than_one_message() -> None:
    """As long trainings have it: their timelines are 48 bytes a step and rank."""

    def body(client: Client, arena: Arena) -> Any:
        return client.all_gather(sample(client.rank, 600_000, "float32"))

    with serving(2) as (server,):
        results = on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body))
    for result in results:
        np.testing.assert_array_equal(result, [sample(rank, 600_000, "float32") for rank in range(2)])


def test_all_gather_of_unequal_sizes_is_refused() -> None:
    def body(client: Client, arena: Arena) -> Any:
        return client.all_gather(np.zeros(1 + client.rank, np.int8))

    with serving(2) as group:
        errors = errors_of(2, lambda rank: as_trainer(addresses(group), rank, 2, body))
    assert {type(error) for error in errors} <= {ProtocolError, PeerLost}
    assert any("ranks gave 3 bytes together" in str(error) for error in errors)


# ---- the group does not come together ---------------------------------------------------------------------------


def join_raw(address: str, **fields: Any) -> JoinReply:
    """A join such as another version of this program might send."""
    settings = {"version": __version__, "rank": 0, "nranks": 2, "backend": "grpc", **fields}
    with rpc.connect(address, timeout=DEADLINE_S) as channel:
        call = channel.unary_unary(
            JOIN, request_serializer=JoinRequest.SerializeToString, response_deserializer=JoinReply.FromString
        )
        try:
            return call(JoinRequest(**settings), timeout=DEADLINE_S)
        except grpc.RpcError as exc:
            raise rpc.translate(exc, address, "joining") from exc


def test_servers_in_another_order_are_refused() -> None:
    with serving(1, 2) as group, pytest.raises(UsageError) as caught:
        Client(addresses(group)[::-1], 0, 1)
    assert f"server 0 at {group[1].address} is shard 1/2, but number 0 of 2 listed" in str(caught.value)


def test_a_server_left_out_is_noticed() -> None:
    with serving(1, 2) as group, pytest.raises(UsageError, match="is shard 0/2, but number 0 of 1 listed"):
        Client(addresses(group)[:1], 0, 1)


def test_disagreement_about_nranks_fails_all() -> None:
    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: Client([server.address], rank, 2 + rank))
        text = "rank 1 was started with nranks 3, the group with 2"
        assert_all([*errors, failure_of(server)], RendezvousError, text)


def test_a_rank_given_twice_fails_all() -> None:
    with serving(3) as (server,):
        errors = errors_of(2, lambda _: Client([server.address], 1, 3))
        assert_all([*errors, failure_of(server)], RendezvousError, "rank 1 joined twice")


def test_a_missing_rank_is_named_to_all() -> None:
    with serving(3, timeout=2.0) as (server,):
        errors = errors_of(2, lambda rank: Client([server.address], rank, 3))
        text = "2 of 3 ranks joined within 2 s; missing: rank 2"
        assert_all([*errors, failure_of(server)], RendezvousError, text)


def test_two_versions_fail_all_naming_both() -> None:
    def join(rank: int) -> object:
        address = server.address
        return join_raw(address, rank=1, version="9.9.9") if rank else Client([address], 0, 2)

    with serving(2) as (server,):
        errors = [*errors_of(2, join), failure_of(server)]
        assert_all(errors, VersionMismatch, f"rank 1 runs GradSync 9.9.9, this group {__version__}")


def test_a_rank_outside_is_a_usage_error_before_any_call() -> None:
    with pytest.raises(UsageError, match=r"rank 2 is outside 0\.\.1"):
        Client(["127.0.0.1:1"], 2, 2)


def test_nobody_at_the_address_is_named_within_the_limit() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(PeerUnreachable, match=rf"nobody answered at {address} within 0\.3 s"):
            Client([address], 0, 1, timeout=0.3)
        assert 0.25 < time.monotonic() - begin < 5.0


def test_a_port_in_use_is_named() -> None:
    with serving(1) as (server,), pytest.raises(PortInUse, match=server.address):
        rpc.serve(server.address, SERVICE, {}, threads=1)


def test_a_port_in_use_leaves_no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[TrainingGroup] = []

    def recorded(*args: Any, **options: Any) -> TrainingGroup:
        groups.append(TrainingGroup(*args, **options))
        return groups[-1]

    with serving(1) as (server,):
        monkeypatch.setattr("ps.coordinator.servicer.TrainingGroup", recorded)
        with pytest.raises(PortInUse):
            ParameterServer(server.address, 1)
    try:
        assert not any(group._watchdog.is_alive() and not group._over for group in groups)
    finally:
        for group in groups:
            group.fail(PeerLost("end of test"))


# ---- trainers disagree ------------------------------------------------------------------------------------------


def register_other_model(servers: Sequence[str], rank: int) -> None:
    arena = make_arena(rank, [("w", (4 + rank,))])
    client = Client(servers, rank, 2)
    try:
        client.register(arena, SGD())
    except GradSyncError as exc:
        client.close(f"{type(exc).__name__}: {exc}")
        raise


def test_another_model_fails_all() -> None:
    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: register_other_model([server.address], rank))
        assert_all([*errors, failure_of(server)], LayoutMismatch, "disagree: parameter w [")


def test_another_model_fails_all_servers() -> None:
    with serving(2, 2) as group:
        errors = errors_of(2, lambda rank: register_other_model(addresses(group), rank))
        everyone = [*errors, *map(failure_of, group)]
    assert any(isinstance(error, LayoutMismatch) for error in errors)
    assert all(isinstance(error, LayoutMismatch | PeerLost) for error in everyone)  # or that one left for it
    assert all("disagree: parameter w [" in str(error) for error in everyone)


def test_another_optimizer_fails_all() -> None:
    def body(rank: int) -> None:
        with closing(Client([server.address], rank, 2)) as client:
            client.register(make_arena(rank), [SGD(), Adam()][rank])

    with serving(2) as (server,):
        assert_all([*errors_of(2, body), failure_of(server)], LayoutMismatch, "Adam(")


def test_another_learning_rate_fails_all() -> None:
    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena, rate=[0.1, 0.2][client.rank])

    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body))
        assert_all([*errors, failure_of(server)], LayoutMismatch, "learning rate 0.")


# ---- notes through shared memory --------------------------------------------------------------------------------


def overhear(client: Client) -> list[str]:
    """What is sent to the first server from now on, in order: its kind, "note " before it if through shared memory."""
    session, said = client._sessions[0], []
    send, lanes = session.send, session.lanes
    assert lanes

    class ToServer:
        def put(self, note: bytes) -> bool:
            said.append(f"note {TrainerMessage.FromString(note).WhichOneof('kind')}")
            return lanes[0].put(note)

    def overheard(messages: Iterable[Any]) -> None:
        whole = list(messages)
        said.extend(message.WhichOneof("kind") for message in whole)
        send(whole)

    session.lanes, session.send = (ToServer(), lanes[1]), overheard  # type: ignore[assignment, method-assign]
    return said


def test_steps_are_told_through_shared_memory_but_nothing_overtakes_what_went_over_grpc() -> None:
    step = ["gradients"] * 3 + ["commit"]

    def body(client: Client, arena: Arena) -> None:
        said = overhear(client)
        take_step(client, arena)
        take_step(client, arena)
        noted = ["note gradients_at", *(f"note {kind}" for kind in step * 2)]
        assert said == noted
        client._sessions[0].send([])  # not answered
        take_step(client, arena)
        assert said[len(noted) :] == step
        client.all_gather(np.zeros(1))  # answered
        take_step(client, arena)
        assert said[len(noted) + len(step) :] == ["gather", *(f"note {kind}" for kind in step)]

    with serving(2) as (server,):
        assert errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body)) == [None, None]


def test_notes_that_find_no_room_go_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane has one place here; and a mask of used parameters may be too long for any."""
    monkeypatch.setattr("ps.planes.lanes.SLOTS", 1)
    seen = []

    def body(client: Client, arena: Arena) -> None:
        for step in range(20):
            arena.gradients[...] = sample(client.rank, arena.layout.length, "float32", seed=client.step)
            for bucket in range(len(arena.buckets)):
                client.push(bucket)
            client.commit(RATE, used=bytes(NOTE_BYTES if step % 2 else 3))
        seen.append(arena.parameters.copy())

    with serving(2) as (server,):
        assert errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body)) == [None, None]
    for parameters_seen in seen:
        assert_same_bits(parameters_seen, expected_after(20, 2, make_arena(0)))


# ---- committed ahead --------------------------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.coordinator.training_group.PIECE", 32)


@planes
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.usefixtures("_small_pieces")
def test_steps_committed_ahead_give_numpys_bits(servers: int, planes: Sequence[tuple[str, bool]]) -> None:
    """By all, by some, or by nobody, whatever their data planes."""

    def body(rank: int) -> list[FloatArray]:
        plane, shared = planes[rank]
        with Client(addresses(group), rank, 3, data_plane=plane) as client:
            arena = make_arena(rank, empty=client.empty if shared else aligned_empty)
            client.register(arena, SGD())
            seen = []
            for step in range(4):
                if step != rank:
                    client.commit_ahead(RATE)
                take_step(client, arena)
                seen.append(arena.parameters.copy())
        return seen

    with serving(3, servers) as group:
        seen = on_threads(3, body)
    for step in range(4):
        for rank in range(3):
            assert_same_bits(seen[rank][step], expected_after(step + 1, 3, make_arena(0)))


@pytest.mark.usefixtures("_small_pieces")
def test_parameters_come_back_before_the_rest_is_pushed_unless_they_are_held() -> None:
    hold = {0: False, 1: True}
    looked = threading.Barrier(2, timeout=DEADLINE_S)

    def body(client: Client, arena: Arena) -> tuple[FloatArray, FloatArray]:
        before = arena.parameters.copy()
        arena.gradients[...] = sample(client.rank, arena.layout.length, "float32", seed=0)
        client.commit_ahead(RATE, hold=hold[client.rank])
        client.push(0)
        where = arena.buckets[0]
        if client.rank == 0:
            new = expected_after(1, 2, make_arena(0))[where.start : where.stop]
            until(lambda: bool((arena.parameters[where.start : where.stop] == new).all()))
        looked.wait()
        seen = arena.parameters.copy()
        changed = seen != before
        assert changed.any() != hold[client.rank]
        assert not changed[: where.start].any()
        for bucket in range(1, len(arena.buckets)):
            client.push(bucket)
        client.commit(RATE)
        return seen, arena.parameters.copy()

    with serving(2) as (server,):
        results = on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body, data_plane="grpc"))
    for _, after in results:
        assert_same_bits(after, expected_after(1, 2, make_arena(0)))


@pytest.mark.parametrize("end", [lambda client: client.commit(2 * RATE), lambda client: client.average()])
def test_a_step_committed_ahead_cannot_end_in_another_way(end: Callable[[Client], None]) -> None:
    def body(client: Client, arena: Arena) -> None:
        client.commit_ahead(RATE)
        for bucket in range(len(arena.buckets)):
            client.push(bucket)
        text = "^step 0 was committed ahead as an update at learning rate 0.05; it cannot end in another way$"
        with pytest.raises(ValueError, match=text):
            end(client)
        client.commit(RATE)

    with serving(1) as (server,):
        as_trainer([server.address], 0, 1, body, data_plane="grpc")


def test_nothing_is_committed_ahead_through_shared_memory_where_parameters_are_to_be_held() -> None:
    """They may be the server's own, which it writes to."""

    def body(client: Client, arena: Arena) -> None:
        client.commit_ahead(2 * RATE, hold=True)
        take_step(client, arena)
        assert_same_bits(arena.parameters, expected_after(1, 1, make_arena(0)))

    with serving(1) as (server,):
        as_trainer([server.address], 0, 1, body, data_plane="shm")


def test_who_vanishes_after_committing_ahead_is_named_within_a_second() -> None:
    """While the others still push, or hold what is served."""
    vanished: list[float] = []

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        client.commit_ahead(RATE, hold=client.rank == 0)
        client.push(0)
        if client.rank == 1:
            vanished.append(time.monotonic())
            for session in client._sessions:
                session._call.cancel()  # what the kernel does to a dead process's connections
            return
        try:
            take_step(client, arena, pushed=1)
        finally:
            assert time.monotonic() - vanished[0] < 1.0

    with serving(3, 2) as group:
        errors = errors_of(3, lambda rank: as_trainer(addresses(group), rank, 3, body, data_plane="grpc"))
        survivors = [errors[0], errors[2], *map(failure_of, group)]
        assert_all(survivors, PeerLost, "rank 1 died at step 1: its connection closed without a goodbye")


def test_who_falls_silent_after_committing_ahead_is_named_within_the_limit() -> None:
    stop = threading.Event()

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        client.commit_ahead(RATE, hold=True)
        client.push(0)
        if client.rank == 0:
            assert stop.wait(DEADLINE_S)
        try:
            take_step(client, arena, pushed=1)
        finally:
            stop.set()

    with serving(2, timeout=0.5) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body, data_plane="grpc"))
        text = "rank 0 did not take part in step 1 for 0.5 s"
        assert_all([*errors, failure_of(server)], PeerStalled, text)


@pytest.mark.usefixtures("_small_pieces")
def test_leaving_while_parameters_are_held_takes_no_time_and_changes_none() -> None:
    def body(rank: int) -> bool:
        client, arena = Client([server.address], rank, 2, data_plane="grpc"), make_arena(rank)
        client.register(arena, SGD())
        before, heard_at = arena.parameters.copy(), client._sessions[0].heard_at
        arena.gradients.fill(1)
        client.commit_ahead(RATE, hold=True)
        for bucket in range(len(arena.buckets) - 1):
            client.push(bucket)
        until(lambda: client._sessions[0].heard_at > heard_at)  # what has come is held
        begin = time.monotonic()
        client.close("ValueError: boom")
        assert time.monotonic() - begin < 1.0
        return bool((arena.parameters == before).all())

    with serving(2) as (server,):
        assert on_threads(2, body) == [True, True]


# ---- the front first --------------------------------------------------------------------------------------------


def without_waiting(client: Client, arena: Arena) -> None:
    """A step whose parameters are on their way."""
    arena.gradients.fill(1)
    for bucket in range(len(arena.buckets)):
        client.push(bucket)
    client.commit(RATE, wait=False)


def test_who_waits_for_the_front_waits_for_no_more() -> None:
    """And whoever goes on waits for the rest first."""
    size, front_is_there = make_arena(0).layout.length, threading.Event()

    def answers(said: Iterator[TrainerMessage]) -> Iterator[ServerMessage]:
        def heard(kind: str) -> bool:
            return any(message.WhichOneof("kind") == kind for message in said)

        yield from (ServerMessage(plane=Plane(refusal="no")), parameters(0, size), served(0))
        assert heard("commit")
        yield parameters(48, size - 48, step=1)
        yield parameters(0, 16, step=1)
        assert front_is_there.wait(DEADLINE_S)
        yield parameters(16, 32, step=1)
        yield from (served(1), ServerMessage(gathered=Gather(size=1, data=b"x")))
        assert heard("commit")
        yield from (parameters(0, size, step=2), served(2))
        assert heard("goodbye")

    with lying(answers) as address, Client([address], 0, 1, data_plane="grpc", priority=True) as client:
        arena = make_arena(0)
        client.register(arena, SGD())
        arena.parameters.fill(7)
        without_waiting(client, arena)
        client.wait_for(0, 16)
        client.wait_for(64, 80)
        assert (client.step, np.flatnonzero(arena.parameters).tolist()) == (0, list(range(16, 48)))
        front_is_there.set()
        assert client.all_gather(np.zeros(1, np.uint8)).size == 1
        assert (client.step, arena.parameters.any()) == (1, False)
        without_waiting(client, arena)
    assert client.step == 2


def test_without_priority_or_over_shared_memory_a_commit_waits_for_all() -> None:
    def body(client: Client, arena: Arena) -> int:
        without_waiting(client, arena)
        return client.step

    for options in ({"data_plane": "grpc"}, {"data_plane": "shm", "priority": True}):
        with serving(1) as (server,):
            assert as_trainer([server.address], 0, 1, body, **options) == 1


# ---- somebody is lost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2])
def test_a_trainer_that_vanishes_is_named_to_the_others(servers: int) -> None:
    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 1:
            for session in client._sessions:
                session._call.cancel()  # what the kernel does to a dead process's connections
            return
        take_step(client, arena)

    with serving(3, servers) as group:
        errors = errors_of(3, lambda rank: as_trainer(addresses(group), rank, 3, body))
        survivors = [errors[0], errors[2], *map(failure_of, group)]
        assert_all(survivors, PeerLost, "rank 1 died at step 1: its connection closed without a goodbye")


def test_a_trainer_that_raises_is_named_with_its_reason() -> None:
    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 2:
            raise ValueError("bad pixel")
        take_step(client, arena)

    with serving(3, 2) as group:
        errors = errors_of(3, lambda rank: as_trainer(addresses(group), rank, 3, body))
        assert isinstance(errors[2], ValueError)
        survivors = [errors[0], errors[1], *map(failure_of, group)]
        assert_all(survivors, PeerLost, "rank 2 left at step 1 with ValueError: bad pixel")


def test_a_trainer_that_has_fewer_steps_is_named() -> None:
    def body(client: Client, arena: Arena) -> None:
        for _ in range(3 - client.rank):
            take_step(client, arena)

    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body))
        assert errors[1] is None
        assert_all([errors[0], failure_of(server)], PeerLost, "rank 1 finished at step 2 while others go on")


@pytest.mark.parametrize(("servers", "trainers"), [(0.5, 30.0), (30.0, 0.5)])
def test_a_silent_trainer_is_named_to_all_within_the_limit(servers: float, trainers: float) -> None:
    """The shorter one of those that were given, wherever."""
    stop = threading.Event()

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 0:
            assert stop.wait(DEADLINE_S)
        begin = time.monotonic()
        try:
            take_step(client, arena)
        finally:
            stop.set()
        assert time.monotonic() - begin < 5.0

    with serving(2, timeout=servers) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body, timeout=trainers))
        text = "rank 0 did not take part in step 1 for 0.5 s"
        assert_all([*errors, failure_of(server)], PeerStalled, text)


def test_the_other_servers_hear_from_trainers_who_is_frozen() -> None:
    """Server 1 itself would have waited for half a minute."""
    told = threading.Event()

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 0:
            assert told.wait(DEADLINE_S)
        take_step(client, arena)

    def trainer_or_server(which: int) -> None:
        if which < 2:
            as_trainer(addresses(group), which, 2, body)
        try:
            group[1].wait()
        finally:
            told.set()

    with (
        ParameterServer("127.0.0.1:0", 2, shard=(0, 2), timeout=2.0) as first,
        ParameterServer("127.0.0.1:0", 2, shard=(1, 2), timeout=30.0) as second,
    ):
        group = [first, second]
        errors = errors_of(3, trainer_or_server)
        text = "rank 0 did not take part in step 1 for 2 s"
        assert_all([*errors[1:], failure_of(first)], PeerStalled, text)


def wait_for_a_slice(client: Client, arena: Arena) -> None:
    """Of server 1, where there are two."""
    without_waiting(client, arena)
    client.wait_for(arena.layout.length - 16, arena.layout.length)


whichever_wait = pytest.mark.parametrize(
    ("step", "options"), [(take_step, {}), (wait_for_a_slice, {"data_plane": "grpc", "priority": True})]
)


def close_server_1_in_mid_training(
    step: Callable[[Client, Arena], None] = take_step, **options: Any
) -> tuple[str, list[BaseException | None]]:
    """The closed server's name, and what its two trainers and server 0 raise."""

    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 1:
            group[1].close()
        step(client, arena)

    with serving(2, 2) as group:
        errors = errors_of(2, lambda rank: as_trainer(addresses(group), rank, 2, body, **options))
        return f"server 1 at {group[1].address}", [*errors, failure_of(group[0])]


def test_a_server_that_closes_in_mid_training_fails_all() -> None:
    _, errors = close_server_1_in_mid_training()
    assert all(isinstance(error, GradSyncError) for error in errors), errors
    assert isinstance(errors[-1], PeerLost)


@whichever_wait
def test_a_server_that_closes_in_mid_training_is_named(step: Any, options: dict[str, Any]) -> None:
    name, errors = close_server_1_in_mid_training(step, **options)
    assert all(isinstance(error, PeerError) for error in errors), errors
    assert all(name in str(error) for error in errors[:2]), errors


@whichever_wait
def test_a_server_that_does_not_answer_is_named(
    step: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps.client.session.GRACE", 0.0)
    stop = threading.Event()

    def body(client: Client, arena: Arena) -> None:
        if client.rank == 1:
            stop.wait(DEADLINE_S)
            return
        client.timeout = 0.3  # the server itself would wait much longer
        try:
            step(client, arena)
        finally:
            stop.set()

    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body, **options))
        what = "words 384..400 of the result" if options else "the result"
        text = f"server 0 at {server.address} did not answer within 0.3 s while waiting for {what} of step 0"
        assert_all(errors[:1], PeerStalled, text)


def test_closing_twice_is_no_error() -> None:
    with serving(1) as (server,):
        client = Client([server.address], 0, 1)
        client.register(make_arena(0), SGD())
        client.close()
        client.close("a reason that comes too late")
        server.wait()


def test_closing_without_registering_is_no_error() -> None:
    with serving(1) as (server,):
        client = Client([server.address], 0, 1)
        client.close()
        client.close()


def test_a_trainer_that_leaves_before_it_registers_is_noticed() -> None:
    """It may find no data, or that another server is listed wrongly."""
    with serving(1) as (server,):
        Client([server.address], 0, 1).close("DataError: no such file")
        (outcome,) = outcomes_within(1.0, server.wait)
        assert isinstance(outcome, PeerLost)


def outcomes_within(seconds: float, function: Callable[[], object]) -> list[BaseException]:
    """What `function` raised on a thread by then."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(seconds)
    return list(raised)


def test_who_registers_twice_hears_why() -> None:
    arena = make_arena(0)
    hello = TrainerMessage(hello=Hello(epoch=0, rank=0))
    with serving(1) as (server,), closing(Client([server.address], 0, 1)) as client:
        client.register(arena, SGD())
        with raw_session(server.address, iter([hello])) as call:
            heard = [message.failure for message in call]
    assert [failure.kind for failure in heard] == ["ProtocolError"]
    assert "rank 0 came twice" in heard[0].message


# ---- callers that do not keep to the protocol -------------------------------------------------------------------


@contextmanager
def raw_session(address: str, messages: Iterator[TrainerMessage]) -> Iterator[Any]:
    """A session of somebody who is not one of our clients."""
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address, options=options) as channel:
        call = channel.stream_stream(
            SESSION,
            request_serializer=TrainerMessage.SerializeToString,
            response_deserializer=ServerMessage.FromString,
        )(messages)
        yield call
        call.cancel()


def test_a_session_before_all_have_joined_is_refused() -> None:
    with serving(2) as (server,), raw_session(server.address, iter([])) as call:
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        error = rpc.translate(caught.value, server.address, "testing")
        assert isinstance(error, RendezvousError)
        assert "before all trainers had joined" in str(error)


def test_a_session_refused_does_not_harm_the_group() -> None:
    def body(client: Client, arena: Arena) -> FloatArray:
        take_step(client, arena)
        return arena.parameters.copy()

    with serving(2) as (server,):
        with raw_session(server.address, iter([])) as call, pytest.raises(grpc.RpcError):
            list(call)
        results = on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body))
    for result in results:
        assert result.tobytes() == expected_after(1, 2, make_arena(0)).tobytes()


def test_an_oversize_join_is_refused_and_training_goes_on() -> None:
    def body(client: Client, arena: Arena) -> FloatArray:
        take_step(client, arena)
        if client.rank == 0:
            with pytest.raises(ProtocolError, match="resource_exhausted"):
                send_oversize_join(server.address)
        take_step(client, arena)
        return arena.parameters.copy()

    with serving(2) as (server,):
        results = on_threads(2, lambda rank: as_trainer([server.address], rank, 2, body))
    for result in results:
        assert result.tobytes() == expected_after(2, 2, make_arena(0)).tobytes()


def send_oversize_join(address: str) -> None:
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        call = channel.unary_unary(JOIN)
        try:
            call(bytes(5 << 20), timeout=DEADLINE_S)
        except grpc.RpcError as exc:
            raise rpc.translate(exc, address, "testing") from exc


def test_an_oversize_message_of_a_trainer_ends_its_session_and_names_it() -> None:
    def body(client: Client, arena: Arena) -> None:
        take_step(client, arena)
        if client.rank == 1:
            chunk = Chunk(step=client.step, data=bytes(5 << 20))
            client._sessions[0].send([TrainerMessage(gradients=chunk)])
        take_step(client, arena)

    with serving(2) as (server,):
        errors = errors_of(2, lambda rank: as_trainer([server.address], rank, 2, body))
        assert isinstance(errors[1], ProtocolError), errors
        assert "resource_exhausted" in str(errors[1])
        assert_all([errors[0], failure_of(server)], PeerLost, "rank 1")


# ---- a server that does not keep to the protocol ----------------------------------------------------------------


@contextmanager
def lying(answers: Iterable[ServerMessage] | Callable[..., Iterable[ServerMessage]]) -> Iterator[str]:
    """The address of a server that says `answers`, or what they are to all else that it hears, once it has heard who is
    there and what it registers, whatever that is, then ends the stream."""

    def session(messages: Iterator[TrainerMessage], context: grpc.ServicerContext) -> Iterator[ServerMessage]:
        next(messages), next(messages)
        yield from answers(messages) if callable(answers) else answers

    handlers = {
        "Join": grpc.unary_unary_rpc_method_handler(
            lambda request, context: JoinReply(shard=0, shards=1),
            JoinRequest.FromString,
            JoinReply.SerializeToString,
        ),
        "Session": grpc.stream_stream_rpc_method_handler(
            session, TrainerMessage.FromString, ServerMessage.SerializeToString
        ),
    }
    server, address = rpc.serve("127.0.0.1:0", SERVICE, handlers, threads=4)
    try:
        yield address
    finally:
        server.stop(0).wait()


def served(step: int) -> ServerMessage:
    return ServerMessage(served=Served(step=step))


def parameters(start: int, size: int, *, step: int = 0) -> ServerMessage:
    return ServerMessage(parameters=Chunk(step=step, start=start, data=bytes(4 * size)))


LIES: dict[str, tuple[list[ServerMessage], str]] = {
    "parameters beyond the shard": ([parameters(8, 9)], r"elements 8\.\.17 outside Shard\(start=0, stop=16\)"),
    "parameters of a later step": ([parameters(0, 16, step=1)], "parameters of step 1, expected 0"),
    "ragged parameters": ([ServerMessage(parameters=Chunk(data=b"abc"))], "3 bytes"),
    "nothing": ([], "ended the session without a reason"),
}


def error_of_registering(address: str) -> GradSyncError:
    arena = make_arena(0, [("w", (9,))])
    with closing(Client([address], 0, 1)) as client, pytest.raises(GradSyncError) as caught:
        client.register(arena, SGD())
    return caught.value


@pytest.mark.parametrize("name", LIES)
def test_what_a_server_cannot_mean_is_an_error(name: str) -> None:
    answers, text = LIES[name]
    arena = make_arena(0, [("w", (9,))])
    with (
        lying(answers) as address,
        closing(Client([address], 0, 1)) as client,
        pytest.raises(ProtocolError, match=text),
    ):
        client.register(arena, SGD())


def test_an_error_of_the_server_keeps_its_name() -> None:
    answers = [ServerMessage(failure=Failure(kind="StaleEpoch", message="rank 0 sent epoch 1"))]
    with lying(answers) as address:
        error = error_of_registering(address)
    assert (type(error).__name__, str(error)) == ("StaleEpoch", "rank 0 sent epoch 1")


def test_the_plan_of_these_tests_has_buckets_across_shards() -> None:
    assert make_arena(0).buckets[-1] == Bucket(0, 80)


def test_servers_in_another_order_leave_no_server_waiting() -> None:
    with serving(1, 2) as group:
        with pytest.raises(UsageError, match="list all servers in the order"):
            Client(addresses(group)[::-1], 0, 1)
        with pytest.raises(UsageError, match="list all servers in the order"):
            Client([group[0].address], 0, 1)


def test_a_server_that_cannot_be_reached_frees_the_other() -> None:
    with serving(1, 2) as group:
        with pytest.raises(PeerUnreachable):
            Client([group[0].address, "127.0.0.1:9"], 0, 1, timeout=0.5)
        (outcome,) = outcomes_within(5.0, group[0].wait)
        assert isinstance(outcome, PeerLost)
        assert "rank 0 left at step 0 with PeerUnreachable: nobody answered at 127.0.0.1:9" in str(outcome)


def test_a_stray_caller_does_not_harm_a_running_training() -> None:
    with serving(1) as (server,), closing(Client([server.address], 0, 1)) as client:
        arena = make_arena(0)
        client.register(arena, SGD(learning_rate=RATE))
        with pytest.raises(RendezvousError, match="rank 0 joined twice"):
            Client([server.address], 0, 1)
        take_step(client, arena)
        np.testing.assert_array_equal(arena.parameters, expected_after(1, 1, arena))


@pytest.mark.parametrize(
    ("last", "kind", "text"),
    [
        ([ServerMessage(failure=Failure(kind="PeerLost", message="rank 1 died"))], PeerLost, "^rank 1 died$"),
        ([], UsageError, "rank 0 cannot share memory with the servers: it is gone; use --data-plane grpc"),
    ],
)
def test_of_memory_that_is_gone_the_server_says_why_if_it_has_failed(
    last: list[ServerMessage], kind: type[GradSyncError], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, ended = threading.Event(), threading.Event()

    def segment(self: OthersMemory, memory: Memory) -> Segment:
        tried.set()
        raise Unreachable("it is gone")

    def answers() -> Iterator[ServerMessage]:
        yield ServerMessage(plane=Plane(parameters=Place(memory=Memory(size=64))))
        yield ServerMessage(served=Served(step=0))
        assert tried.wait(5)
        yield from last
        ended.wait(5)

    monkeypatch.setattr(OthersMemory, "segment", segment)
    monkeypatch.setattr("ps.client.session.FAREWELL_S", 0.5)
    arena = make_arena(0, [("w", (9,))])
    with lying(answers()) as address, closing(Client([address], 0, 1)) as client:
        with pytest.raises(kind, match=text):
            client.register(arena, SGD())
        ended.set()
