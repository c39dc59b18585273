"""`python -m benchmarks crossover`: what is measured in which order, who wins, and that nothing is left behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.flags.crossover import CrossoverConfig
from benchmarks.netlab.cluster import why_no_cluster
from benchmarks.netlab.config import ClusterConfig
from benchmarks.operations import link_settings as settings
from benchmarks.operations.link_settings import RING, Scheme, Setting
from benchmarks.records.result_files import plain
from benchmarks.verbs.crossover import Contestants, Crossover, cost, run_crossover
from common.errors import CertificateFailed, UsageError
from common.system.process import Terminated
from tests.support.crossover_samples import MB, results_of
from tests.support.groups import LEAST_OF_LINK
from tests.support.reporting import verdict
from tests.support.typed_results import load, typed

needs_cluster = pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster() or "-")
ONE = Scheme(1)


def test_flags() -> None:
    config = CrossoverConfig(servers="1,N, 2+,2", links="1gbit,100mbit", sizes="25MB,1MB")
    two, two_apart = Scheme(2), Scheme(2, apart=True)
    assert [config.servers_of(nranks) for nranks in (2, 4)] == [[ONE, two, two_apart], [ONE, two, two_apart, Scheme(4)]]
    assert [config.hosts(nranks) for nranks in (2, 4)] == [4, 6]
    assert [cluster.link for cluster in config.clusters(4)] == ["100mbit", "1gbit"]
    assert {cluster.hosts for cluster in config.clusters(4)} == {4}
    assert config.bytes == [MB, 25 * MB]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"nranks": "1,2"}, "--nranks must be in 2..64, a host for each (got 1)"),
        ({"nranks": "2,65"}, "--nranks must be in 2..64, a host for each (got 65)"),
        ({"servers": "1,M+"}, "+ for hosts of their own, as in 1,N,N+ (got '1,M+')"),
        ({"servers": "0"}, "--servers must be numbers or N, separated by commas, with a + for hosts"),
        (
            {"nranks": "33", "servers": "N+"},
            "--servers N+ on hosts of their own beside 33 ranks need 66 hosts in all",
        ),
        ({"links": "1gbit,fast"}, "--link must be a number and kbit, mbit, gbit, as in 1gbit (got 'fast')"),
        ({"sizes": "1"}, "'1' is not a size such as 4KiB or 100MB"),
        ({"repetitions": 0}, "--repetitions must be at least 1, --seconds positive"),
        ({"repetitions": 50}, "--sizes times 1 + --repetitions must be at most 100 (got 102)"),
    ],
)
def test_flags_that_cannot_be(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        CrossoverConfig(**flags)
    assert text in str(caught.value)


def test_without_root_one_line_says_so_before_anything_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    with pytest.raises(UsageError, match=r"^emulated hosts need root, for network namespaces: run as root \(sudo\)$"):
        run_crossover(CrossoverConfig(out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_what_was_measured_before_ctrl_c_or_sigterm_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: type[BaseException], code: int
) -> None:
    def prepared(self: Crossover, on_run: Any) -> Any:
        for nranks in self._config.counts():
            self._pairs.append((Setting(nranks, self._config.clusters(nranks)[0], MB, fresh=True), Any))  # type: ignore[arg-type]
        if 2 in self._config.counts():
            self._pairs[0][0].restore({"rates": [1e8] * 3, "times": [[RING, [1.0] * 3], [[1, False], [2.0] * 3]]})
        raise end

    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(Crossover, "prepared", prepared)
    monkeypatch.setattr("benchmarks.records.environment.describe_environment", lambda: typed(results_of()).environment)
    folders = {"out": tmp_path / "out", "history": tmp_path / "history"}
    assert run_crossover(CrossoverConfig(**folders)) == code
    text = (tmp_path / "out" / "crossover.md").read_text()
    assert (
        "- Interrupted: only a part of what was asked for was measured.\n- N=2, 1 server: the ring is 2.00 times"
        in text
    )
    assert json.loads((tmp_path / "out" / "crossover.json").read_text())["repetitions"] == 3  # of the 5 asked for
    assert not list((tmp_path / "history").iterdir())
    with pytest.raises(end):
        run_crossover(CrossoverConfig(**folders, nranks="4"))


class GroupDouble:
    """Takes `seconds` a step; writes down what it was told."""

    def __init__(self, name: str, seconds: float, calls: list[tuple[Any, ...]], wrong: int = 0) -> None:
        self.name, self.seconds, self.calls, self.wrong, self.nranks = name, seconds, calls, wrong, 4

    def measure(self, nbytes: int, iterations: int, *, warmup: int = 2, check: bool = True) -> tuple[list[float], int]:
        self.calls.append((self.name, nbytes, iterations, warmup, check))
        return [self.seconds] * iterations, self.wrong if check else 0

    def rest(self) -> None:
        pass


def measured(config: CrossoverConfig, schemes: Any, link: Any, cells: list[Any], calls: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.verbs.crossover.head", lambda: head_of(results_of()))
        crossover = Crossover(config)
    crossover.limit = lambda at: calls.append(("limit", at))  # type: ignore[method-assign]
    crossover.add(Contestants(4, schemes, link))
    try:
        crossover.check(lambda *_: None)
        for number in range(config.repetitions):
            crossover.make_round(number, lambda *_: None)
    finally:
        cells += plain(crossover.results())["cells"]


def head_of(results: dict[str, Any]) -> dict[str, Any]:
    whole = typed(results)
    return {"created": whole.created, "command": whole.command, "environment": whole.environment}


def test_schemes_are_checked_then_measured_in_turn_there_and_back() -> None:
    calls: list[tuple[Any, ...]] = []
    cells: list[Any] = []
    schemes: Any = {RING: GroupDouble("ring", 0.09, calls), ONE: GroupDouble("one", 0.5, calls)}
    config = CrossoverConfig(links="10mbit,100mbit", sizes="1MB", servers="1", repetitions=2)
    measured(config, schemes, GroupDouble("link", 0.25, calls), cells, calls)
    fast, slow = ("limit", "100mbit"), ("limit", "10mbit")
    checks = [("ring", MB, 1, 0, True), ("one", MB, 1, 0, True)]
    streams = {fast: ("link", 2_500_000, 1, 1, True), slow: ("link", 250_000, 1, 1, True)}
    # 0.3 s of steps; warmed up are quick ones, and all on the first link, where the size is another than before
    ring, one, first_one = ("ring", MB, 3, 1, False), ("one", MB, 1, 0, False), ("one", MB, 1, 1, False)
    there = [fast, streams[fast], ring, first_one, slow, streams[slow], ring, one]
    back = [fast, streams[fast], first_one, ring, slow, streams[slow], one, ring]
    assert calls == [fast, *checks, slow, *checks, *there, *back]
    assert [(each["link"], each["servers"]) for each in cells] == [("10mbit", 1), ("100mbit", 1)]
    found = cells[1]
    assert found["stream_bytes_per_s"] == pytest.approx(10e6)
    assert found["ring"]["bound_ms"] == pytest.approx(1e3 * 1.5 * MB / 10e6)
    assert found["ps"]["bound_ms"] == pytest.approx(1e3 * 3 * MB / 10e6)  # the server is beside one of four ranks
    assert found["ratio"] == pytest.approx(0.18)


def test_every_round_is_over_all_sizes_and_links() -> None:
    calls: list[tuple[Any, ...]] = []
    cells: list[Any] = []
    schemes: Any = {RING: GroupDouble("ring", 0.3, calls), ONE: GroupDouble("one", 0.3, calls)}
    config = CrossoverConfig(links="10mbit,100mbit", sizes="1MB,2MB", servers="1", repetitions=2)
    measured(config, schemes, GroupDouble("link", 0.25, calls), cells, [])
    timed = [call[1] for call in calls if call[0] == "ring"]
    assert timed == [MB, MB, 2 * MB, 2 * MB] * 3
    at = [(each["link"], each["bytes"]) for each in cells]
    assert at == [(link, size * MB) for link in ("10mbit", "100mbit") for size in (1, 2)]


@pytest.mark.parametrize(
    ("scheme", "call", "kept"), [(RING, 4, ["100mbit"]), (ONE, 4, ["100mbit"]), (ONE, 5, ["10mbit", "100mbit"])]
)
def test_what_both_schemes_had_measured_when_it_was_interrupted_is_kept(
    scheme: Scheme, call: int, kept: list[str]
) -> None:
    class Interrupted(GroupDouble):
        def measure(self, *args: Any, **kwargs: Any) -> tuple[list[float], int]:
            if len(self.calls) == call - 1:
                raise KeyboardInterrupt
            return super().measure(*args, **kwargs)

    schemes: Any = {each: (Interrupted if each == scheme else GroupDouble)("-", 0.1, []) for each in (RING, ONE)}
    cells: list[Any] = []
    config = CrossoverConfig(links="10mbit,100mbit", sizes="1MB", servers="1", repetitions=3)
    with pytest.raises(KeyboardInterrupt):
        measured(config, schemes, GroupDouble("link", 0.25, []), cells, [])
    assert [each["link"] for each in cells] == kept  # each was called twice for checks, then once a link


def test_wrong_parameters_are_no_result() -> None:
    schemes: Any = {RING: GroupDouble("ring", 0.1, []), Scheme(4, True): GroupDouble("ps", 0.1, [], wrong=3)}
    cells: list[Any] = []
    with pytest.raises(CertificateFailed) as caught:
        measured(CrossoverConfig(links="1gbit"), schemes, GroupDouble("link", 0.1, []), cells, [])
    assert str(caught.value) == (
        "N=4, 1gbit, 1 MB: 3 parameters are wrong after a step of 4 servers on hosts of their own"
    )
    assert cells == []


def test_where_parameters_were_wrong_nothing_is_shown_or_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepared(self: Crossover, on_run: Any) -> Any:
        self._pairs.append((Setting(2, self._config.clusters(2)[0], MB, fresh=True), Any))  # type: ignore[arg-type]
        self._pairs[0][0].restore({"rates": [1e8], "times": [[RING, [1.0]], [[1, False], [2.0]]]})
        schemes: Any = {RING: GroupDouble("ring", 0.1, [], wrong=3)}
        one_link = CrossoverConfig(links="1gbit")
        measured(one_link, schemes, GroupDouble("link", 0.1, []), [], [])

    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(Crossover, "prepared", prepared)
    monkeypatch.setattr("benchmarks.records.environment.describe_environment", lambda: typed(results_of()).environment)
    monkeypatch.setattr("sys.argv", ["benchmarks", "crossover", "--out", str(tmp_path / "out")])
    assert main() == 3
    assert not any(path.read_text() for path in (tmp_path / "out").iterdir())
    told = capsys.readouterr()
    wrong = "CertificateFailed: N=4, 1gbit, 1 MB: 3 parameters are wrong after a step of ring"
    assert (told.out, told.err) == ("", f"benchmarks crossover: {wrong}\n")


def test_the_time_left_is_reckoned_from_the_links() -> None:
    whole = CrossoverConfig(links="100mbit", nranks="4", sizes="25MB", servers="1", repetitions=1)
    # starts: 3; ring: 3 steps of 3 s; one server: 3 of 12 s; and a second for each of four
    assert cost(whole) == 3 * 4 + 3 * 3 + 3 * 12 + 4


@pytest.mark.parametrize(
    ("scheme", "places", "bound"),
    [
        (RING, [], 0.63),  # 2(N-1)/N M/B
        (Scheme(4), [0, 1, 2, 3], 0.63),  # a quarter to and from each of three others, as rank and as server
        (Scheme(6), [0, 1, 2, 3, 0, 1], 0.70),  # hosts 0 and 1 have two servers each
        (Scheme(4, apart=True), [4, 5, 6, 7], 0.42),  # M/B: every byte goes and comes once
        (Scheme(1, apart=True), [4], 1.68),
    ],
)
def test_the_bound_is_of_the_busiest_link_wherever_the_servers_are(
    scheme: Scheme, places: list[int], bound: float
) -> None:
    assert scheme.placed(4) == places
    cluster = ClusterConfig(hosts=4, link="1gbit")
    assert settings.least_seconds(cluster, 50 * MB, 50 * MB / 0.42, 4, scheme) == pytest.approx(bound)


COMMAND = [sys.executable, "-m", "benchmarks", "crossover", "--nranks", "2"]


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=20).stdout
    return [name for name in listed.split() if name.startswith(f"gs{pid}")]


@needs_cluster
@pytest.mark.processes
@pytest.mark.long
def test_a_small_map(tmp_path: Path) -> None:
    pytest.importorskip("paddle")
    small = [
        "--links",
        "100mbit,400mbit",
        "--servers",
        "1,N+",
        "--sizes",
        "1MB",
        "--repetitions",
        "2",
        "--seconds",
        "0.01",
    ]
    folders = ["--out", str(tmp_path / "out"), "--history", str(tmp_path / "history")]
    command = [*COMMAND, *small, *folders, "--lang", "zh"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    (kept,) = (tmp_path / "history").iterdir()
    assert re.fullmatch(r"\d{8}T\d{6}Z-crossover-([0-9a-f]+\+?|unknown)\.json", kept.name)
    found = load(kept)
    assert found == json.loads((tmp_path / "out" / "crossover.json").read_text())
    assert [(c["link"], c["bytes"], c["servers"], c["apart"]) for c in found["cells"]] == [
        (link, MB, servers, servers == 2) for link in ("100mbit", "400mbit") for servers in (1, 2)
    ]
    for each in found["cells"]:
        assert LEAST_OF_LINK < each["stream_bytes_per_s"] / each["link_bytes_per_s"] < 1.05
    slow = found["cells"][0]
    assert slow["ring"]["time_ms"] > 0.8 * 80  # M/B
    assert slow["ps"]["time_ms"] > 0.8 * 120  # 1.5 times that: of two pieces one comes back while the other goes
    assert verdict(found)[0].split(",")[0] in " ".join(done.stdout.split())
    assert (tmp_path / "out" / "crossover.md").read_text().startswith("# GradSync：何处参数服务器更快")
    assert "crossover-map" in (tmp_path / "out" / "crossover.html").read_text()


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@needs_cluster
@pytest.mark.processes
def test_nothing_is_left_after_ctrl_c(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    with started([*COMMAND, "--links", "1mbit", "--out", str(tmp_path)]) as process:
        host = f"gs{process.pid}h1"

        def inside() -> list[str]:
            command = ["ip", "netns", "pids", host]
            return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout.split()

        wait_until(inside)
        workers = inside()
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=30)
        assert (process.returncode, complaint) == (130, "benchmarks crossover: interrupted\n")
        assert namespaces(process.pid) == []
        wait_until(lambda: not [pid for pid in workers if Path("/proc", pid).exists()])  # the kernel ends them
