"""Where the cores' time goes: what perf says is sorted into places, and a perf that cannot is named."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks.flags.sweep import SweepConfig
from benchmarks.records import core_time as module
from benchmarks.records.core_time import (
    PerfFailed,
    Sample,
    core_time,
    parse,
    place_of,
    sampled,
    samples_of,
    to_markdown,
)
from benchmarks.verbs import doctor, sweep
from benchmarks.verbs.sweep import Groups, Measured
from common.errors import GradSyncError, UsageError

REPORT = """
# a comment
 600         ;swapper      ;[kernel.kallsyms]     ;[k] pv_native_safe_halt
 200         ;python       ;[kernel.kallsyms]     ;[k] rep_movs_alternative
 100         ;python       ;libpython3.11.so.1.0  ;[.] _PyEval_EvalFrameDefault
  80         ;python       ;_multiarray_umath.so  ;[.] FLOAT_add_AVX2
   6         ;python       ;libmpi.so.40          ;[.] operator();(int)
   4         ;swapper      ;[veth]                ;[k] veth_xmit
   5         ;python       ;libc.so.6             ;[.] 0x00000000000a1b2c
   5         ;python       ;libc.so.6             ;[.] 0000000000a1b2d0

not;a
"""
RESULTS = {
    "command": "python -m benchmarks sweep --profile 5",
    "created": "2026-11-22T17:00:00+00:00",
    "environment": {"cpu": "a CPU", "cores": 2, "kernel": "6.18", "commit": "abc1234"},
}


@pytest.mark.parametrize(
    ("process", "file", "function", "place"),
    [
        ("swapper", "kernel", "pv_native_safe_halt", "idle"),
        ("swapper", "kernel", "net_rx_action", "kernel: the rest"),
        ("python", "kernel", "mwait_play_dead", "kernel: the rest"),
        ("python", "kernel", "rep_movs_alternative", "kernel: copies"),
        ("python", "kernel", "clear_page_erms", "kernel: copies"),
        ("python", "[vdso]", "__vdso_clock_gettime", "other"),
        ("python", "[JIT] tid 7", "(no name)", "other"),
        ("python", "python3.11", "_PyEval_EvalFrameDefault", "Python"),
        ("python", "libpython3.12.so.1.0", "PyLong_AsLong", "Python"),
        ("python", "_multiarray_umath.cpython-311-x86_64-linux-gnu.so", "FLOAT_add_AVX2", "NumPy"),
        ("python", "libc.so.6", "__memmove_avx_unaligned_erms", "libc"),
        ("python", "libc-2.31.so", "(no name)", "libc"),
        ("grpc_poll", "cygrpc.cpython-311-x86_64-linux-gnu.so", "grpc_chttp2_encode_data", "gRPC"),
        ("python", "libpaddle.so", "phi::SGDDenseKernel", "Paddle"),
        ("python", "mca_btl_vader.so", "mca_btl_vader_poll", "other"),
    ],
)
def test_places(process: str, file: str, function: str, place: str) -> None:
    assert place_of(process, file, function) == place


def test_what_perf_reports_is_summed_by_place_and_function() -> None:
    found = core_time("shm", 4, 4096, 57e-6, parse(REPORT))
    assert found.samples == 1000
    assert dict(found.places) == {
        "idle": 600,
        "kernel: copies": 200,
        "kernel: the rest": 4,
        "Python": 100,
        "NumPy": 80,
        "libc": 10,
        "other": 6,
    }
    assert found.symbols.most_common(1) == [(("rep_movs_alternative", "kernel"), 200)]
    assert found.symbols["operator();(int)", "libmpi.so.40"] == 6
    assert found.symbols["(no name)", "libc.so.6"] == 10
    assert all(function != "pv_native_safe_halt" for function, _ in found.symbols)


def test_the_report_says_what_was_sampled_and_where() -> None:
    text = to_markdown([core_time("shm-copied", 4, 100_000_000, 0.0226, parse(REPORT))], RESULTS)
    assert "`python -m benchmarks sweep --profile 5`, commit abc1234, 2026-11-22T17:00:00+00:00, on a CPU," in text
    heads = "| N | bytes | backend | ms a call | samples | idle | kernel: copies | kernel: the rest | Python | NumPy |"
    assert f"{heads} libc | gRPC | Paddle | other |" in text
    assert "| 4 | 100 MB | shm-copied | 22.6 | 1,000 | 60% | 20% | 0% | 10% | 8% | 1% |  |  | 1% |" in text
    assert r"20.0% rep\_movs\_alternative (kernel); 10.0%" in text
    assert "veth" not in text  # less than 1 %


def fake_perf(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "perf").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "perf").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_without_perf_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module.why_no_perf() == ("perf is not installed", "apt-get install linux-perf")
    found = doctor.profiler()
    assert (found.usable, found.found, found.mend) == (False, "perf is not installed", "apt-get install linux-perf")
    with pytest.raises(UsageError, match=r"--profile: perf is not installed \(apt-get install linux-perf\)"):
        sweep.run_sweep(SweepConfig(profile=5, out=tmp_path))


def test_a_perf_that_may_not_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_perf(tmp_path, monkeypatch, "echo 'No permission (13)\n to enable cpu-clock.' >&2; exit 255")
    said = r"perf cannot sample the cores: No permission \(13\) to enable cpu-clock\."
    with pytest.raises(PerfFailed, match=f"^{said}$"), sampled():
        pytest.fail("nothing is sampled")


def test_a_perf_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "perf").write_text("no program")
    (tmp_path / "perf").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PerfFailed, match=r"^perf cannot be started: Exec format error$"), sampled():
        pytest.fail("nothing is sampled")


def test_a_perf_that_does_not_answer_is_named_and_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_perf(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 60")
    monkeypatch.setattr(module, "ANSWER_S", 3.0)
    with pytest.raises(PerfFailed, match=r"^perf did not answer to 'enable' within 3 s$"), sampled():
        pytest.fail("nothing is sampled")
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_a_perf_report_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_perf(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(PerfFailed, match=r"^perf report failed: without a word$"):
        samples_of(tmp_path / "data")


PERF = r"""
if [ $1 = report ]; then cat {folder}/report; exit; fi
echo "$@" > {folder}/flags
control=$(echo "$@" | sed 's/.*--control fd:\([0-9,]*\) .*/\1/')
while read -r what; do
  echo $what >> {folder}/orders
  echo ack > /dev/fd/${{control#*,}}
  [ $what = disable ] && break
done < /dev/fd/${{control%,*}}
cat
"""


def test_the_cores_are_sampled_only_while_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "report").write_text(REPORT)
    fake_perf(tmp_path, monkeypatch, PERF.format(folder=tmp_path))
    with sampled() as samples:
        assert (tmp_path / "orders").read_text() == "enable\n"
        assert samples == []
    assert (tmp_path / "orders").read_text() == "enable\ndisable\n"
    flags = (tmp_path / "flags").read_text()
    assert flags.startswith("record --all-cpus --event cpu-clock --freq 499 --delay -1 --control fd:")
    assert flags.endswith(" -- cat\n")
    assert samples[1] == Sample(200, "python", "kernel", "rep_movs_alternative")
    assert len(samples) == 8
    assert not Path(re.findall(r"--output (\S+)", flags)[0]).parent.exists()


def test_the_real_perf_sees_this_process() -> None:
    if reason := module.why_no_perf()[0]:
        pytest.skip(reason)
    with sampled() as samples:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass
    found = core_time("this", 1, 4, 1.0, samples)
    assert found.places["Python"] > 0.05 * module.FREQUENCY  # half a second of one core, of which others may take some


@pytest.mark.parametrize("seconds", [-1, 61])
def test_how_long_cannot_be_anything(seconds: float) -> None:
    with pytest.raises(UsageError, match=r"--profile must be from 0 to 60 seconds"):
        SweepConfig(profile=seconds)


class Group:
    """Each of its calls takes half a second of the clock's."""

    nranks = 4

    def __init__(self, backend: str, clock: list[float]) -> None:
        self.backend, self.clock, self.closed = backend, clock, False
        self.asked: list[tuple[int, int]] = []

    def measure(self, nbytes: int, iterations: int, *, check: bool) -> tuple[list[float], int]:
        assert not check
        if self.backend == "gloo" and self.asked:
            raise GradSyncError("gloo: a rank ended")
        self.asked.append((nbytes, iterations))
        self.clock[0] += 0.5
        return [0.25] * iterations, 0

    def rest(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_each_backend_is_profiled_at_each_size_for_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    begun: list[float] = []
    windows: list[float] = []

    @contextmanager
    def window() -> Iterator[list[Sample]]:
        begun.append(clock[0])
        if len(begun) == 2:
            raise PerfFailed("perf cannot")
        yield list(parse(REPORT))
        windows.append(clock[0] - begun[-1])

    @contextmanager
    def start() -> Iterator[Group]:
        yield ray

    monkeypatch.setattr(sweep, "sampled", window)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    shm, gloo, mpi, ray = (Group(name, clock) for name in ("shm", "gloo", "mpi", "ray"))
    groups = Groups(4, [shm, gloo, mpi], {"ray": start})  # type: ignore[list-item,dict-item]
    measured = Measured(failed={"mpi": "mpi: was late"})
    measured.medians = {(name, n): [0.1] for name in ("shm", "gloo", "ray") for n in (4096, 1 << 20)}
    measured.medians["shm", 1 << 20] = [2.0]
    told: list[str] = []
    console = Console(record=True, width=200)
    config = SweepConfig(sizes="4KiB,1MiB", profile=2)
    found = list(sweep.profile(groups, measured, config, lambda what, cost: told.append(what), console))
    assert [(each.backend, each.nbytes, each.seconds) for each in found] == [
        *(("shm", 4096, 0.25), ("ray", 4096, 0.25), ("ray", 1 << 20, 0.25)),
    ]
    assert shm.asked == [(4096, 10)] * 5 + [(1 << 20, 1)]  # one before the window, four within
    assert windows == [2.0, 2.0, 2.0]
    assert measured.failed == {"mpi": "mpi: was late", "gloo": "gloo: a rank ended"}  # perf's failure is not shm's
    assert [group.closed for group in (shm, gloo, mpi)] == [False, True, True]
    assert mpi.asked == []
    assert "no profile of shm: perf cannot" in console.export_text()
    assert told[0] == "N=4, 4 KiB: profile of shm"
