"""`compare script.py`: a user's own program under each scheme, and under Paddle's own DataParallel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.flags.script import CompareScriptConfig
from benchmarks.records.environment import plain_head
from benchmarks.records.progress import progress
from benchmarks.records.result_files import check_history, from_plain, write_results
from benchmarks.reports.script import cells, distances, heads, outcome
from benchmarks.reports.writing import write_report
from benchmarks.stats.interval import interval
from benchmarks.stats.rounds import rounds
from benchmarks.training.contestants import OTHER_ORDER, PADDLE_SCHEMES, Contestant
from benchmarks.training.measure import Records, records_from, records_to_json
from common.errors import CertificateFailed, GradSyncError
from common.launch.cli import check_writable
from common.launch.job import FOLDER, Job
from common.system.mkl import CPU_TYPE, MKL_CHOOSES, wanted_cpu_type
from common.system.process import end_in_order_on_sigterm

__all__ = ["PADDLE_BOUNDS", "YARDSTICK_MULTIPLE", "compare_script"]

PADDLE_BOUNDS = {1: 1e-7, 5: 1e-4, 20: 1e-2}
"""After so many backwards (or all, if there are fewer), the largest accepted distance of the parameters from those
under paddle.DataParallel, relative to their size (L2 norms).

With two ranks there is none: a + b = b + a, and halving is exact. With more, Gloo adds in another order, and training
amplifies the difference. For the MNIST example on 4 ranks it is 1e-8 after one step, 4e-8 after 5, 6e-8 after 12, 3e-4
after 20, 5e-3 after 40: Adam divides each gradient by its own size, so one that is little more than rounding moves its
parameter by up to the learning rate, here 0.01, either way. Later the two are two equally good trainings.

How fast rounding grows is the program's own affair. So where a bound is exceeded by more than two ranks, the program
runs once more on a ring that sums in another order, as good as its own (benchmarks/training/other_order.py), and
Paddle may be YARDSTICK_MULTIPLE times as far away as that one is. For the ResNet-18 example on 4 ranks, batch 8:

    backwards                    1      2      3      5      10     20
    Paddle                       2e-9   2e-5   4e-4   5e-3   3e-2   7e-2
    another order                2e-9   1e-5   4e-4   4e-3   3e-2   7e-2
    a bucket without one rank    6e-4   1e-3   3e-3   1e-2
    a bucket 0.1 % too large     1e-6   2e-5   6e-4   5e-3

So it is the first backward that tells a wrong mean from rounding."""

YARDSTICK_MULTIPLE = 10

SURFACES = {"ring": "collective", OTHER_ORDER: "benchmarks.training.other_order"}  # others are called as they are
WORKER = Path(__file__).parents[1] / "training" / "script_worker.py"
EXCEPTION = re.compile(r"(\S+: )?([\w.]*(Error|Exception|Lost|Stalled|Mismatch|Failed|Unreachable|InUse)\b)(:|$)")
PEER_ERROR = re.compile(r"\b(PeerLost|PeerStalled|PeerError)\b")  # the fault is elsewhere


Failures = dict[Contestant, GradSyncError]
Distances = dict[int, float]  # after so many backwards


class ProgramFailed(GradSyncError):
    """The program failed under a contestant; the message is one line, `output` the ends of the ranks' logs."""

    def __init__(self, message: str, output: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.output = list(output)


def compare_script(config: CompareScriptConfig, script: Sequence[str]) -> None:
    """Run every contestant `repetitions` times in turn; print a table; write `script.json`, and its .md and .html.

    A contestant that fails is named with its reason, and the others are measured without it.

    Raises:
        CertificateFailed: `ps` and `ring` ended with different parameters, or Paddle beyond the bound.
        GradSyncError: the program failed under a scheme of ours.
    """
    end_in_order_on_sigterm()
    console = Console(highlight=False)
    check_history(config.history)
    check_writable("out", config.out / "script.json")
    contestants = config.contestants()
    results: dict[str, Any] = {
        **plain_head("script"),
        "program": Path(script[0]).name,
    }
    runs: Records = {}
    failures: Failures = {}
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-") as folder:

        @cache  # paddle and paddle-default are measured by the same one, after every round
        def once_more(contestant: Contestant) -> bool:
            why = "paddle-default has these matrix kernels" if contestant.mkl_chooses else "Paddle is beyond the bound"
            console.print(f"once more, as {contestant.name}: {why}", soft_wrap=True)
            return run_beside(contestant, failures, config, script, Path(folder))

        def so_far() -> dict[str, Any]:
            certified = certificate([c for c in contestants if c in runs], runs, failures, Path(folder), once_more)
            speeds = [summarise(c, runs[c], config.warmup_steps) for c in contestants if c in runs]
            return {
                **results,
                "certificate": certified,
                "failed": {c.name: {"reason": str(exc), "output": _output(exc)} for c, exc in failures.items()},
                "runs": speeds if certified["passed"] else [],
            }

        def restore(kept: Mapping[str, Any]) -> None:
            runs.update(records_from(kept["runs"], contestants))
            failures.update(
                (c, failure_from(kept["failures"][c.name])) for c in contestants if c.name in kept["failures"]
            )

        left = rounds(
            config.repetitions,
            config.out,
            state=lambda: {"runs": records_to_json(runs), "failures": failures_to_json(failures)},
            restore=restore,
            so_far=so_far,
        )
        run_all(contestants, config, script, Path(folder), console, runs=runs, failures=failures, rounds=left)
        results = so_far()
    results = json.loads(json.dumps(results))  # as whoever reads the file has it
    show(results, console)
    write_results(from_plain(results), config.out / "script.json", config.history)
    write_report(from_plain(results), config.out, "script", config.lang)
    console.print(f"\nresults: {config.out / 'script.json'}", soft_wrap=True)
    verdict(results["certificate"], failures)


def verdict(certificate: dict[str, Any], failures: Failures) -> None:
    """Whatever says that ours are not right: a failed certificate first, then a failure. Paddle's own may fail."""
    for name, exc in ours_that_disagree(failures).items():
        raise CertificateFailed(f"{name}: {exc}; no speed is reported")
    if not certificate["identical"]:
        raise CertificateFailed("the schemes did not compute the same; no speed is reported")
    if not certificate["passed"]:
        raise CertificateFailed("too far from paddle.DataParallel; no speed is reported")
    for contestant, exc in failures.items():
        if contestant.scheme not in PADDLE_SCHEMES:
            raise GradSyncError("\n  ".join([f"{contestant.name}: {exc}", *_output(exc)]))


def run_all(
    contestants: Sequence[Contestant],
    config: CompareScriptConfig,
    script: Sequence[str],
    folder: Path,
    console: Console,
    *,
    runs: Records,
    failures: Failures,
    rounds: Iterable[int],
) -> None:
    """Add the runs of those who ended well every time, and why the others did not; who has failed runs no more."""
    with progress(console, len(contestants) * config.repetitions) as on_run:
        for repetition in rounds:
            for contestant in contestants if repetition % 2 == 0 else contestants[::-1]:
                on_run(f"round {repetition + 1} of {config.repetitions}: {contestant.name}")
                if contestant in failures:
                    continue
                try:
                    runs.setdefault(contestant, []).append(run_once(contestant, config, script, folder))
                except GradSyncError as exc:
                    failures[contestant] = exc
                    runs.pop(contestant, None)


def failures_to_json(failures: Failures) -> dict[str, Any]:
    """By name, as they are kept between rounds."""
    return {
        c.name: {"reason": str(exc), "output": _output(exc), "wrong": isinstance(exc, CertificateFailed)}
        for c, exc in failures.items()
    }


def failure_from(content: Mapping[str, Any]) -> GradSyncError:
    """What one entry of `failures_to_json` was made of."""
    reason, output = content["reason"], content["output"]
    return CertificateFailed(reason) if content["wrong"] else ProgramFailed(reason, output)


def run_once(
    contestant: Contestant, config: CompareScriptConfig, script: Sequence[str], folder: Path
) -> dict[str, Any]:
    """One whole run of the program; returns rank 0's step times and the digest, the same on all ranks.

    Raises:
        ProgramFailed: it did not end well on every rank.
        CertificateFailed: the ranks ended with different parameters.
    """
    record = folder / contestant.name.replace("/", "-").replace(" ", "_")
    worker = [str(WORKER), SURFACES.get(contestant.scheme, contestant.scheme), str(record), *script]
    log = folder / "log"
    shutil.rmtree(log, ignore_errors=True)  # another contestant's words explain nothing
    with Job(log) as job:
        kernels = {CPU_TYPE: MKL_CHOOSES} if contestant.mkl_chooses else {}
        command = [*launcher(contestant, config, log), *worker]
        process = job.start(contestant.name, command, log="launcher.log", environment=kernels)
        try:
            process.wait(config.run_timeout)
        except subprocess.TimeoutExpired as exc:
            raise ProgramFailed(
                f"the program ran longer than {config.run_timeout:g} s (--run-timeout)", tails(log)
            ) from exc
        if process.returncode:
            raise ProgramFailed(f"exit code {process.returncode}: {reason_in(log)}", tails(log))
    files = [record.with_suffix(f".{r}.json") for r in range(contestant.nranks)]
    if missing := [str(rank) for rank, file in enumerate(files) if not file.exists()]:
        raise ProgramFailed(f"the program ended early on rank {', '.join(missing)}, without an error", tails(log))
    ranks = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()  # the next repetition writes its own
    if not all(r["models"] for r in ranks):
        raise ProgramFailed("no model was given to DataParallel or distributed_model, so there is nothing to compare")
    if (made := len(ranks[0]["times"])) < config.warmup_steps + 2:
        raise ProgramFailed(f"{made} backwards leave no step to time after --warmup-steps {config.warmup_steps}")
    if len({r["parameters_sha256"] for r in ranks}) > 1:
        raise CertificateFailed("ranks ended with different parameters")
    return dict(ranks[0])


def launcher(contestant: Contestant, config: CompareScriptConfig, log: Path) -> list[str]:
    nranks, timeout = str(contestant.nranks), str(config.timeout)
    if contestant.scheme == "ps":
        flags = ["--nranks", nranks, "--servers", str(contestant.servers), "--timeout", timeout, "--log-dir", str(log)]
        return ["-m", "ps.run", "--data-plane", contestant.backend, *flags]
    if contestant.scheme in ("ring", OTHER_ORDER):
        flags = ["--nranks", nranks, "--backend", contestant.backend, "--timeout", timeout, "--log-dir", str(log)]
        return ["-m", "collective.run", *flags]
    flags = ["--nproc_per_node", nranks, "--backend", "gloo", "--log_dir", str(log)]
    return ["-m", "paddle.distributed.launch", *flags]


def tails(log: Path) -> list[str]:
    """The last lines of every process."""
    return [f"{path.name}: {line}" for path in logs(log) for line in lines_of(path)[-3:]]


def reason_in(log: Path) -> str:
    """The line that says best why a run failed: one that names an exception, of the process that fell silent first,
    and only if there is no other one that blames another process; else anyone's last line."""
    found = [line for path in logs(log) for line in reversed(lines_of(path)) if EXCEPTION.match(line)]
    found.sort(key=lambda line: bool(PEER_ERROR.search(line)))
    last = [line for path in logs(log) for line in lines_of(path)[-1:]]
    return next(iter([*found, *last]), "without a word")


def logs(folder: Path) -> list[Path]:
    """Of the ranks first, then of servers, then of the launcher; each in the order in which they fell silent."""
    kinds = ("workerlog", "serverlog", "launcher")
    return [path for kind in kinds for path in sorted(folder.glob(f"{kind}*"), key=lambda p: p.stat().st_mtime_ns)]


def lines_of(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]


def _output(failure: GradSyncError) -> list[str]:
    return failure.output if isinstance(failure, ProgramFailed) else []


def ours_that_disagree(failures: Failures) -> dict[str, GradSyncError]:
    """Contestants of ours whose own ranks ended with different parameters."""
    wrong = {c: exc for c, exc in failures.items() if isinstance(exc, CertificateFailed)}
    return {c.name: exc for c, exc in wrong.items() if c.scheme not in PADDLE_SCHEMES}


def certificate(
    contestants: Sequence[Contestant],
    runs: Records,
    failures: Failures,
    folder: Path,
    once_more: Callable[[Contestant], bool],
) -> dict[str, Any]:
    """Ours must be equal bit for bit, on every rank and in every repetition; Paddle's within the bound.

    Args:
        once_more: runs the program under one of ours that is not measured, and says whether it ran: with MKL's own
            choice of kernels, to hold paddle-default against where ours are others, or in another order, by which more
            than two ranks beyond a fixed bound are judged.
    """
    schemes = {c.name: runs[c][0]["parameters_sha256"] for c in contestants}
    identical = True
    against_paddle: dict[str, Distances] = {}
    yardsticks: dict[str, dict[int, dict[str, float]]] = {}
    own_kernels: list[str] = []
    close = True
    for nranks in sorted({c.nranks for c in contestants}):
        ours = [c for c in contestants if c.nranks == nranks and c.scheme not in PADDLE_SCHEMES]
        identical &= len({r["parameters_sha256"] for c in ours for r in runs[c]}) <= 1
        for peer in (c for c in contestants if c.nranks == nranks and c.scheme in PADDLE_SCHEMES):
            for contestant in ours[:1]:
                alike = contestant
                if peer.scheme == "paddle-default" and wanted_cpu_type() != os.environ.get(CPU_TYPE):
                    alike = replace(contestant, mkl_chooses=True)
                    if not once_more(alike):
                        continue  # that failure is told
                    own_kernels.append(peer.name)
                found = against_paddle[peer.name] = distances_between(alike, peer, folder)
                bounds = PADDLE_BOUNDS
                other = Contestant(OTHER_ORDER, "shm", nranks)  # with our kernels for paddle-default too: a scale
                if nranks > 2 and not within(found, bounds) and once_more(other):
                    yardstick = distances_between(contestant, other, folder)
                    bounds = bounds_by(yardstick)
                    yardsticks[peer.name] = {n: {"distance": d, "bound": bounds[n]} for n, d in yardstick.items()}
                close &= within(found, bounds)
    identical &= not ours_that_disagree(failures)
    return {
        "identical": identical,
        "ours": [c.name for c in contestants if c.scheme not in PADDLE_SCHEMES],
        "against_paddle": against_paddle,
        "bounds": PADDLE_BOUNDS,
        "yardsticks": yardsticks,
        "own_kernels": own_kernels,
        "passed": identical and close,
        "schemes": schemes,
    }


def run_beside(
    contestant: Contestant, failures: Failures, config: CompareScriptConfig, script: Sequence[str], folder: Path
) -> bool:
    """Run one of ours that is not measured, for its parameters; False if it fails, which is noted."""
    try:
        run_once(contestant, config, script, folder)
    except GradSyncError as exc:
        failures[contestant] = exc
        return False
    return True


def bounds_by(yardstick: Distances) -> Distances:
    """The fixed ones, or a multiple of what rounding does, if that is more."""
    return {steps: max(bound, YARDSTICK_MULTIPLE * yardstick[steps]) for steps, bound in PADDLE_BOUNDS.items()}


def within(found: Distances, bounds: Distances) -> bool:
    return all(apart <= bounds[steps] for steps, apart in found.items())


def distances_between(one: Contestant, other: Contestant, folder: Path) -> Distances:
    return {
        steps: distance(parameters(folder, one, steps), parameters(folder, other, steps)) for steps in PADDLE_BOUNDS
    }


def parameters(folder: Path, contestant: Contestant, steps: int) -> dict[str, Any]:
    name = contestant.name.replace("/", "-").replace(" ", "_")
    with np.load(folder / f"{name}.{steps}.npz", allow_pickle=False) as stored:
        return {key: stored[key] for key in stored.files}


def distance(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    apart = sum(float(np.square(mine[name].astype(float) - theirs[name]).sum()) for name in theirs)
    size = sum(float(np.square(theirs[name].astype(float)).sum()) for name in theirs)
    return float(np.sqrt(apart / size)) if size else 0.0


def summarise(contestant: Contestant, repetitions: Sequence[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """Median step time of each repetition, the median of those and its interval (ms); rank 0's memory above that after
    imports (MB)."""
    medians = [1e3 * float(np.median(np.diff(r["times"])[warmup:])) for r in repetitions]
    return {
        "contestant": contestant.name,
        "scheme": contestant.scheme,
        "nranks": contestant.nranks,
        "steps": len(repetitions[0]["times"]),
        "repetitions": len(repetitions),
        "step_ms": median(medians),
        "step_ms_interval": interval(medians),
        "step_ms_rounds": medians,
        "memory_mb": median(r["memory_bytes"] for r in repetitions) / 1e6,
        "parameters_sha256": repetitions[0]["parameters_sha256"],
    }


def show(results: dict[str, Any], console: Console) -> None:
    console.print(f"Certificate: {outcome(results['certificate'])}.")
    for line in distances(results):
        console.print(f"  {line}", soft_wrap=True)
    if results["runs"]:
        console.print(table_of(results))
    for name, failure in results["failed"].items():
        console.print(f"{name} failed: {failure['reason']}", soft_wrap=True, markup=False)


def table_of(results: dict[str, Any]) -> Table:
    """A row for each contestant; those that failed come last, without figures."""
    table = Table(*heads(), box=None, pad_edge=False)
    for run in results["runs"]:
        table.add_row(*cells(run, results["runs"]))
    for name in results["failed"]:
        table.add_row(name, "failed")
    return table
