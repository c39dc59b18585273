"""Traces: one clock for all processes, moments in causal order, stragglers as NumPy finds them, and a bound on size."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("paddle")

from collective.synchronizer import RingSynchronizer
from common.errors import PeerLost, UsageError
from common.launch.hosts import Node
from common.launch.trace_file import save_trace, to_chrome
from common.launch.tracing import (
    TRACE_VARIABLE,
    check_one_host,
    collecting,
    parts_folder,
    read_parts,
    recorder_for,
    tracing,
)
from common.sync import trace as trace_module
from common.sync.clocks import compare_clocks, reading_of, reading_of_server
from common.sync.local import LocalSynchronizer
from common.sync.synchronizer import Synchronizer
from common.sync.trace import FINISH, NO_TRACE, Part, Recorder, ServerAnswer, Trace
from common.system.process import RESTARTS_VARIABLE
from common.tensors.optimizers import SGD
from ps.client.client import Client
from ps.coordinator.servicer import ParameterServer
from ps.store.modes import SYNC, Mode
from ps.synchronizer import synchronizer_for
from tests.support.groups import DEADLINE_S, mesh_groups, on_threads
from tests.support.synchronizer_steps import BUCKETS, gradients, new_arena
from tests.support.traces import check_causes, check_trace, moments, read_trace, spans

STEPS = range(4)
SKEW_NS = 3_600_000_000_000  # between two hosts' clocks
CLOSE_US = 1e6  # an hour apart would be 3.6e9


def one_training(synchronizer: Synchronizer, clock: Callable[[], int] = time.monotonic_ns) -> None:
    arena = new_arena(synchronizer)
    synchronizer.attach(arena, SGD())
    trace = synchronizer.trace
    compare_clocks(synchronizer)
    for step in STEPS:
        begin = clock()
        arena.gradients[:] = gradients(arena.layout, synchronizer.rank, step)
        order = np.random.default_rng([synchronizer.rank, step]).permutation(BUCKETS)
        for bucket in order[: BUCKETS - step % 2].tolist():  # in odd steps one is not told of
            synchronizer.mark_ready(bucket)
        trace.add("backward", begin / 1e9, clock() / 1e9)
        synchronizer.finish(0.5)
    synchronizer.settle()


def ring_trace(file: Path, backend: str, nranks: int, **options: Any) -> dict[str, Any]:
    groups = mesh_groups(backend, nranks)

    def body(rank: int) -> None:
        with RingSynchronizer(groups[rank], **options) as synchronizer, tracing(synchronizer, file):
            one_training(synchronizer)

    on_threads(nranks, body)
    return read_trace(file)


def ps_trace(file: Path, plane: str, nranks: int, servers: int, *, mode: Mode = SYNC) -> dict[str, Any]:
    with ExitStack() as stack:
        serving = [
            stack.enter_context(ParameterServer("127.0.0.1:0", nranks, shard=(i, servers))) for i in range(servers)
        ]

        def body(rank: int) -> None:
            client = Client([s.address for s in serving], rank, nranks, data_plane=plane, mode=mode)
            with synchronizer_for(client) as synchronizer, tracing(synchronizer, file):
                one_training(synchronizer)

        on_threads(nranks, body)
    return read_trace(file)


# Every scheme


@pytest.mark.parametrize(
    ("backend", "nranks", "options"),
    [
        ("memory", 3, {}),
        ("shm", 2, {"overlap": False}),
        ("tcp", 3, {"shard_optimizer": True}),
        ("memory", 1, {}),
    ],
)
def test_a_ring_s_buckets_are_ready_started_and_reduced(
    backend: str, nranks: int, options: dict[str, bool], tmp_path: Path
) -> None:
    trace = ring_trace(tmp_path / "t.json", backend, nranks, **options)
    more = {"gather"} if "shard_optimizer" in options else set()
    check_trace(trace, nranks=nranks, steps=STEPS, buckets=BUCKETS, phases=frozenset({"backward", "update"} | more))
    check_causes(trace, nranks=nranks, steps=STEPS, buckets=BUCKETS)
    assert len(trace["otherData"]["stragglers"]) == (nranks if nranks > 1 else 0)


@pytest.mark.parametrize(("plane", "servers"), [("grpc", 2), ("tcp", 2), ("shm", 1)])
def test_a_server_reduces_and_applies_after_all_have_sent_and_before_anybody_receives(
    plane: str, servers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = ps_trace(tmp_path / "t.json", plane, 2, servers)
    check_trace(trace, nranks=2, servers=servers, steps=STEPS, buckets=BUCKETS, phases=frozenset({"backward"}))
    check_causes(trace, nranks=2, steps=STEPS, buckets=BUCKETS)
    about = trace["otherData"]
    assert (about["scheme"], about["mode"], about["first_step"]) == ("ps", "sync", 0)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"trace: {tmp_path / 't.json'} (open it at ui.perfetto.dev)"
    assert printed[1:3] == ["when buckets were ready, after the first rank's:", "rank  last in  lag ms  max ms"]
    assert [line.split()[0] for line in printed[3:]] == ["0", "1"]


@pytest.mark.parametrize(("mode", "sent"), [(Mode("ssp", 1), 4), (Mode("async"), 4), (Mode("geo", 2), 2)])
def test_ranks_that_run_apart_are_traced_too(mode: Mode, sent: int, tmp_path: Path) -> None:
    """Where nobody waits for others there is no straggler."""
    trace = ps_trace(tmp_path / "t.json", "grpc", 2, 1, mode=mode)
    assert trace["otherData"]["missing"] == []
    assert bool(trace["otherData"]["stragglers"]) == (mode.name == "ssp")
    for rank in range(2):
        assert len(spans(trace, pid=rank, cat="step")) == len(STEPS)
        assert len(spans(trace, pid=rank, name="sent → received", bucket=0)) == sent
    assert len(spans(trace, pid=2, name="commit")) == 2 * sent


def test_without_a_file_nothing_is_recorded(tmp_path: Path) -> None:
    with LocalSynchronizer() as synchronizer, tracing(synchronizer, None):
        one_training(synchronizer)
        assert synchronizer.trace is NO_TRACE
    assert list(tmp_path.iterdir()) == []


def test_what_records_nothing_can_do_all_that_a_recorder_can() -> None:
    for name in ("span", "moment", "add", "sending", "name_buckets", "packed", "leave"):
        assert getattr(Trace, name) is not getattr(Recorder, name)
    messages = [1, 2]
    assert NO_TRACE.sending(messages, 0) is messages


# Failures


def test_after_a_failure_rank_0_writes_what_it_has(tmp_path: Path) -> None:
    file, groups = tmp_path / "t.json", mesh_groups("memory", 2)
    third_begun = threading.Event()

    def body(rank: int) -> None:
        with RingSynchronizer(groups[rank]) as synchronizer, tracing(synchronizer, file):
            synchronizer.attach(new_arena(synchronizer), SGD())
            for step in range(3):
                if (rank, step) == (1, 2):
                    assert third_begun.wait(DEADLINE_S)
                    raise ValueError("boom")
                for bucket in range(BUCKETS):
                    synchronizer.mark_ready(bucket)
                if step == 2:
                    third_begun.set()
                synchronizer.finish(0.5)

    with pytest.raises((ValueError, PeerLost), match="boom"):
        on_threads(2, body)
    trace = read_trace(file)
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["args"].get("step") != 2 or e["cat"] != "bucket"]
    check_trace(trace, nranks=2, steps=range(3), buckets=0, missing=("rank 1",))
    assert [list(moments(trace, 0, step, 1)) for step in range(2)] == [["ready", "started", "reduced"]] * 2
    assert trace["otherData"]["stragglers"] == []


def test_a_launcher_merges_what_its_processes_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts_folder() is None
    file, groups = tmp_path / "t.json", mesh_groups("memory", 2)

    def body(rank: int) -> None:
        with RingSynchronizer(groups[rank]) as synchronizer, tracing(synchronizer, file, folder=parts_folder()):
            one_training(synchronizer)

    def launch() -> None:
        with collecting(file) as environment:
            monkeypatch.setenv(TRACE_VARIABLE, environment[TRACE_VARIABLE])
            on_threads(2, body)
            assert not file.exists()
            assert [part["index"] for part in read_parts(Path(environment[TRACE_VARIABLE]))] == [0, 1]
            raise PeerLost("a process of the job failed")

    with pytest.raises(PeerLost):
        launch()
    folder = parts_folder()
    assert folder
    assert not folder.exists()
    check_trace(read_trace(file), nranks=2, steps=STEPS, buckets=BUCKETS)
    check_causes(read_trace(file), nranks=2, steps=STEPS, buckets=BUCKETS)


def test_a_file_that_cannot_be_written_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"^cannot write to --trace \S+: File exists$"):
        collecting(tmp_path / "file/t.json").__enter__()


def test_a_script_on_several_hosts_is_refused() -> None:
    node = Node(0, 2, "10.0.0.1:8600", ("a", "b"))
    with pytest.raises(UsageError, match=r"--trace of train.py works on one host so far \(got 2\); leave --trace out"):
        check_one_host(Path("t.json"), ["train.py"], node)
    check_one_host(None, ["train.py"], node)
    check_one_host(Path("t.json"), [], node)


def test_a_long_training_keeps_its_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MOST_EVENTS", 2 * (2 * BUCKETS + 4))
    trace = ring_trace(tmp_path / "t.json", "memory", 2)
    first = trace["otherData"]["first_step"]
    assert 0 < first < len(STEPS)
    check_trace(trace, nranks=2, steps=range(first, len(STEPS)), buckets=BUCKETS)


# Clocks


def test_clocks_of_several_hosts_become_one(tmp_path: Path) -> None:
    """That of ranks 2 and 3 is an hour ahead of that of ranks 0 and 1."""
    file, groups = tmp_path / "t.json", mesh_groups("memory", 4)

    def body(rank: int) -> None:
        def clock() -> int:
            return time.monotonic_ns() + rank // 2 * SKEW_NS

        with RingSynchronizer(groups[rank]) as synchronizer, tracing(synchronizer, file):
            synchronizer.trace.clock = clock  # type: ignore[attr-defined]
            synchronizer.trace.host = f"host {rank // 2}"  # type: ignore[attr-defined]
            one_training(synchronizer, clock)

    on_threads(4, body)
    trace = read_trace(file)
    check_trace(trace, nranks=4, steps=STEPS, buckets=BUCKETS)
    check_causes(trace, nranks=4, steps=STEPS, buckets=BUCKETS, slack_us=CLOSE_US)
    for rank, clock in enumerate(trace["otherData"]["clocks"]):
        assert len(clock["offset_ms"]) == len(clock["uncertainty_ms"]) == 2  # at the beginning and at the end
        for offset, uncertainty in zip(clock["offset_ms"], clock["uncertainty_ms"], strict=True):
            assert abs(offset - rank // 2 * SKEW_NS / 1e6) <= uncertainty + 1e-3
            assert (uncertainty > 0) == (rank > 1)


@given(st.integers(-(10**15), 10**15), st.lists(st.tuples(*[st.integers(0, 10**6)] * 4), min_size=1, max_size=4))
def test_a_server_s_clock_lies_within_the_bounds(offset: int, delays: list[tuple[int, ...]]) -> None:
    answers, now = [], 10**12
    for there, at_it, back, pause in delays:
        theirs = now + there + at_it + offset
        answers.append(ServerAnswer(now, theirs, now + there + at_it + back, "another host"))
        now += there + at_it + back + pause
    at, estimate, uncertainty = reading_of_server(answers, "this host")
    assert at == answers[-1].theirs
    assert abs(estimate - offset) <= uncertainty
    assert uncertainty <= min(sum(d[:3]) for d in delays) // 2 + 1


def test_a_server_of_this_host_has_this_clock() -> None:
    assert reading_of_server([ServerAnswer(1, 2, 3, "this host")], "this host") == (2, 0, 0)


def test_a_single_rank_s_clock_is_the_clock() -> None:
    assert reading_of(LocalSynchronizer(), lambda: 7) == (7, 0, 0)


# The file


def part(rank: int, events: list[tuple[int, int, str, int, int]], *, nranks: int = 2, **more: Any) -> Part:
    of = {"nranks": nranks, "servers": 0, "staleness": 0, "scheme": "ring", "mode": "sync"}
    usual = {"host": "h", "readings": [], "buckets": [], "first_step": 0}
    return {"kind": "rank", "index": rank, "of": of, "events": events, **usual, **more}


def test_waiting_ends_and_synchronising_begins_when_the_last_rank_is_ready() -> None:
    events = [
        [(1000, 3000, "backward", 0, -1), (3000, 9000, FINISH, 0, -1), (8000, 8500, "update", 0, -1)],
        [(1000, 5000, "backward", 0, -1), (5000, 9000, FINISH, 0, -1), (8000, 8500, "update", 0, -1)],
    ]
    trace = to_chrome([part(rank, each) for rank, each in enumerate(events)])
    found = {
        (e["pid"], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in spans(trace) if e["name"] in ("wait", "sync")
    }
    assert found == {(0, "wait"): (2, 4), (0, "sync"): (4, 8), (1, "wait"): (4, 4), (1, "sync"): (4, 8)}
    check_trace(trace, nranks=2, steps=range(1), buckets=0, phases=frozenset({"update"}))


def test_a_rank_that_never_was_ready_was_waited_for_all_the_time() -> None:
    trace = to_chrome([part(0, [(0, 5000, FINISH, 0, -1)]), part(1, [(0, 9000, "backward", 0, -1)])])
    (wait,), (sync,) = spans(trace, name="wait"), spans(trace, name="sync")
    assert (wait["dur"], sync["dur"]) == (5, 0)


def test_between_two_readings_clocks_drift_evenly() -> None:
    mine = [(at, at, "ready", 0, 0) for at in (1000, 2000, 3000)]
    events = [(1100, 1100, "ready", 0, 0), (2150, 2150, "started", 0, 0), (3200, 3200, "reduced", 0, 0)]
    readings = [[1100, 100, 1], [3200, 200, 1]]
    trace = to_chrome([part(0, mine), part(1, events, readings=readings)])
    assert moments(trace, 1, 0, 0) == {"ready": 0.0, "started": 1.0, "reduced": 2.0}


@given(st.lists(st.permutations(range(3)), min_size=1, max_size=8), st.integers(1, 10**9))
def test_stragglers_are_those_whose_buckets_are_ready_last(orders: list[list[int]], gap: int) -> None:
    times = np.array(
        [[10**12 * step + gap * order.index(rank) for rank in range(3)] for step, order in enumerate(orders)]
    )
    parts = [
        part(rank, [(at, at, "ready", step, 0) for step, at in enumerate(times[:, rank].tolist())], nranks=3)
        for rank in range(3)
    ]
    found = to_chrome(parts)["otherData"]["stragglers"]
    late = (times - times.min(1, keepdims=True)) / 1e6
    assert [each["rank"] for each in found] == [0, 1, 2]
    np.testing.assert_allclose([each["last"] for each in found], (late.argmax(1)[:, None] == np.arange(3)).mean(0))
    np.testing.assert_allclose([each["median_ms"] for each in found], np.median(late, 0), atol=1e-3)
    np.testing.assert_allclose([each["max_ms"] for each in found], late.max(0), atol=1e-3)


def test_a_bucket_has_the_name_of_its_size(tmp_path: Path) -> None:
    save_trace(tmp_path / "t.json", [part(0, [(0, 0, "ready", 0, 0)], nranks=1, buckets=[1_234_567])])
    names = [e["args"].get("name") for e in read_trace(tmp_path / "t.json")["traceEvents"] if e["ph"] == "M"]
    assert "bucket 0 (1.23 MB)" in names
    json.loads((tmp_path / "t.json").read_text(), parse_constant=partial(pytest.fail))


@pytest.mark.parametrize(("life", "said"), [("0", "t.json (open"), ("2", "t.json, since restart 2 (open")])
def test_a_trace_says_which_of_the_job_s_lives_it_is_of(
    life: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RESTARTS_VARIABLE, life)
    save_trace(tmp_path / "t.json", [recorder_for(LocalSynchronizer()).part()])
    assert read_trace(tmp_path / "t.json")["otherData"]["restarts"] == int(life)
    assert said in capsys.readouterr().out
