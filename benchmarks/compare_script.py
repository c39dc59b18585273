"""`compare script.py`: a user's own program under each scheme, and under Paddle's own DataParallel."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contestants import PADDLE_SCHEMES, Contestant
from benchmarks.environment import describe_environment
from benchmarks.script_config import CompareScriptConfig
from common.entry import check_writable
from common.errors import CertificateFailed, GradSyncError
from common.launch import Job

__all__ = ["PADDLE_BOUNDS", "compare_script"]

PADDLE_BOUNDS = {5: 1e-4, 20: 1e-2}
"""After so many backwards (or all, if there are fewer), the largest accepted distance of the parameters from those
under paddle.DataParallel, relative to their size (L2 norms).

With two ranks there is none: a + b = b + a, and halving is exact. With more, Gloo adds in another order, and training
amplifies the difference. For the MNIST example on 4 ranks it is 1e-8 after one step, 4e-8 after 5, 6e-8 after 12, 3e-4
after 20, 5e-3 after 40: Adam divides each gradient by its own size, so one that is little more than rounding moves its
parameter by up to the learning rate, here 0.01, either way. Later the two are two equally good trainings."""

WORKER = Path(__file__).with_name("script_worker.py")


def compare_script(config: CompareScriptConfig, script: Sequence[str]) -> None:
    """Run every contestant `repetitions` times in turn; print a table and write `script.json` to `config.out`.

    Raises:
        CertificateFailed: `ps` and `ring` ended with different parameters, or Paddle beyond the bound.
        GradSyncError: the program failed under a contestant.
    """
    console = Console(highlight=False)
    check_writable("out", config.out / "script.json")
    contestants = config.contestants()
    runs: dict[Contestant, list[dict[str, Any]]] = {c: [] for c in contestants}
    with tempfile.TemporaryDirectory(prefix="gradsync-") as folder:
        for repetition in range(config.repetitions):
            for contestant in contestants if repetition % 2 == 0 else reversed(contestants):
                if console.is_terminal:
                    console.print(f"[dim]round {repetition + 1} of {config.repetitions}: {contestant.name}[/dim]")
                runs[contestant].append(run_once(contestant, config, script, Path(folder)))
        results: dict[str, Any] = {
            "schema": 1,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
            "environment": describe_environment(),
            "certificate": certificate(contestants, runs, Path(folder)),
        }
    certified = results["certificate"]["passed"]
    results["runs"] = [summarise(c, runs[c], config.warmup_steps) for c in contestants] if certified else []
    (config.out / "script.json").write_text(json.dumps(results, indent=1) + "\n")
    show(results, console)
    console.print(f"\nresults: {config.out / 'script.json'}", soft_wrap=True)
    if not results["certificate"]["identical"]:
        raise CertificateFailed("the schemes did not compute the same; no speed is reported")
    if not certified:
        raise CertificateFailed("too far from paddle.DataParallel; no speed is reported")


def run_once(
    contestant: Contestant, config: CompareScriptConfig, script: Sequence[str], folder: Path
) -> dict[str, Any]:
    """One whole run of the program; returns rank 0's step times and the digest, the same on all ranks."""
    record = folder / contestant.name.replace("/", "-").replace(" ", "_")
    module = "collective" if contestant.scheme == "ring" else contestant.scheme
    worker = [str(WORKER), module, str(record), *script]
    log = folder / "log"
    with Job(log) as job:
        process = job.start(contestant.name, [*launcher(contestant, config, log), *worker], log="launcher.log")
        try:
            process.wait(config.run_timeout)
        except subprocess.TimeoutExpired as exc:
            raise GradSyncError(f"{contestant.name}: the program ran longer than {config.run_timeout:g} s") from exc
        if process.returncode:
            tails = [f"{p.name}: {line}" for p in sorted(log.iterdir()) for line in last_lines(p)]
            raise GradSyncError(
                f"{contestant.name}: the program ended with exit code {process.returncode}\n" + "\n".join(tails)
            )
    ranks = [json.loads(record.with_suffix(f".{r}.json").read_text()) for r in range(contestant.nranks)]
    if len({r["parameters_sha256"] for r in ranks}) > 1:
        raise CertificateFailed(f"{contestant.name}: ranks ended with different parameters")
    return dict(ranks[0])


def launcher(contestant: Contestant, config: CompareScriptConfig, log: Path) -> list[str]:
    nranks, timeout = str(contestant.nranks), str(config.timeout)
    if contestant.scheme == "ps":
        flags = ["--nranks", nranks, "--servers", str(contestant.servers), "--timeout", timeout, "--log-dir", str(log)]
        return ["-m", "ps.run", "--data-plane", contestant.backend, *flags]
    if contestant.scheme == "ring":
        flags = ["--nranks", nranks, "--backend", contestant.backend, "--timeout", timeout, "--log-dir", str(log)]
        return ["-m", "collective.run", *flags]
    flags = ["--nproc_per_node", nranks, "--backend", "gloo", "--log_dir", str(log)]
    return ["-m", "paddle.distributed.launch", *flags]


def last_lines(path: Path) -> list[str]:
    if not path.name.startswith(("workerlog", "serverlog", "launcher")):
        return []
    return path.read_text(errors="replace").strip().splitlines()[-3:]


def certificate(
    contestants: Sequence[Contestant], runs: dict[Contestant, list[dict[str, Any]]], folder: Path
) -> dict[str, Any]:
    """Ours must be equal bit for bit, in every repetition; Paddle's within the bound."""
    schemes = {c.name: runs[c][0]["parameters_sha256"] for c in contestants}
    identical = True
    against_paddle: dict[str, dict[int, float]] = {}
    for nranks in sorted({c.nranks for c in contestants}):
        ours = [c for c in contestants if c.nranks == nranks and c.scheme not in PADDLE_SCHEMES]
        identical &= len({r["parameters_sha256"] for c in ours for r in runs[c]}) <= 1
        for peer in (c for c in contestants if c.nranks == nranks and c.scheme in PADDLE_SCHEMES):
            for contestant in ours[:1]:
                against_paddle[peer.name] = {
                    steps: distance(parameters(folder, contestant, steps), parameters(folder, peer, steps))
                    for steps in PADDLE_BOUNDS
                }
    close = all(d <= PADDLE_BOUNDS[steps] for found in against_paddle.values() for steps, d in found.items())
    return {
        "identical": identical,
        "against_paddle": against_paddle,
        "bounds": PADDLE_BOUNDS,
        "passed": identical and close,
        "schemes": schemes,
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
    """Median step time of each repetition, the median of those, and their spread (ms); rank 0's memory above that after
    imports (MB)."""
    medians = [1e3 * float(np.median(np.diff(r["times"])[warmup:])) for r in repetitions]
    return {
        "contestant": contestant.name,
        "scheme": contestant.scheme,
        "nranks": contestant.nranks,
        "steps": len(repetitions[0]["times"]),
        "repetitions": len(repetitions),
        "step_ms": median(medians),
        "step_ms_interval": [min(medians), max(medians)],
        "memory_mb": median(r["memory_bytes"] for r in repetitions) / 1e6,
        "parameters_sha256": repetitions[0]["parameters_sha256"],
    }


def show(results: dict[str, Any], console: Console) -> None:
    found = results["certificate"]
    word = "the same bits under every scheme of ours" if found["identical"] else "NOT the same under all schemes"
    console.print(f"Certificate: {word}.")
    for peer, distances in found["against_paddle"].items():
        apart = [f"{d:.1e} after {steps} (bound {PADDLE_BOUNDS[steps]:.0e})" for steps, d in distances.items()]
        text = "the same bits" if not any(distances.values()) else f"relative difference {', '.join(apart)}"
        console.print(f"  against {peer}, steps 1 to {max(distances)}: {text}")
    if not results["runs"]:
        return
    runs = results["runs"]
    peers = [peer for peer in PADDLE_SCHEMES if any(run["scheme"] == peer for run in runs)]
    table = Table(
        "contestant", "step ms", "min-max", *(f"vs {p}" for p in peers), "memory MB", box=None, pad_edge=False
    )
    for run in runs:
        low, high = run["step_ms_interval"]
        ratios = [speedup(run, runs, peer) for peer in peers]
        cells = [run["contestant"], f"{run['step_ms']:.1f}", f"{low:.1f}-{high:.1f}", *ratios]
        table.add_row(*cells, f"{run['memory_mb']:,.0f}")
    console.print(table)


def speedup(run: dict[str, Any], runs: Sequence[dict[str, Any]], peer: str) -> str:
    """The peer's median step time over this one's, at the same number of ranks."""
    of_peer = [r["step_ms"] for r in runs if r["scheme"] == peer and r["nranks"] == run["nranks"]]
    return f"{of_peer[0] / run['step_ms']:.2f}x" if of_peer else ""
