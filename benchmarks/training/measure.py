"""The measurements: all contestants in turn, several times over, so that a drifting machine is fair to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.flags.compare import CompareConfig
from benchmarks.stats.interval import interval
from benchmarks.training.certificate import require_same_on_all_ranks
from benchmarks.training.contestants import Contestant
from benchmarks.training.pool import WorkerPool

__all__ = ["Records", "measure", "records_from", "records_to_json", "summarise"]

Records = dict[Contestant, list[dict[str, Any]]]  # rank 0's run record of every repetition


def measure(
    pool: WorkerPool,
    contestants: Sequence[Contestant],
    config: CompareConfig,
    *,
    on_run: Callable[[str], None],
    records: Records,
    rounds: Iterable[int],
) -> None:
    """Add to `records`, the first with the model's accuracy, which is the same in all. Every other round goes
    backwards, so that nobody is always last.

    Args:
        rounds: the numbers of those that are to be made.

    Raises:
        CertificateFailed: the ranks of a training ended with different parameters.
    """
    for repetition in rounds:
        for contestant in contestants if repetition % 2 == 0 else reversed(contestants):
            on_run(f"round {repetition + 1} of {config.repetitions}: {contestant.name}")
            trace = config.trace if repetition == config.repetitions - 1 else None
            training, evaluate = config.for_ranks(contestant.nranks), repetition == 0
            warmup = config.warmup_steps
            run = pool.run(contestant, training, warmup_steps=warmup, evaluate=evaluate, trace=trace)
            require_same_on_all_ranks(contestant, run, f"after {run[0]['steps']} measured steps")
            records.setdefault(contestant, []).append(run[0])


def records_to_json(records: Mapping[Contestant, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """By name, as they are kept between rounds."""
    return {contestant.name: list(mine) for contestant, mine in records.items()}


def records_from(content: Mapping[str, Any], contestants: Sequence[Contestant]) -> Records:
    """What `records_to_json` made."""
    return {contestant: list(content[contestant.name]) for contestant in contestants if contestant.name in content}


def summarise(contestant: Contestant, repetitions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One entry of results.json's `runs`: medians over repetitions; of the throughput its interval and values too."""
    first = repetitions[0]
    rates = [r["samples_per_s"] for r in repetitions]

    def middle(*path: str) -> float:
        return float(median(_at(r, path) for r in repetitions))

    return {
        **first,
        "contestant": contestant.name,
        "repetitions": len(repetitions),
        "samples_per_s": median(rates),
        "samples_per_s_interval": interval(rates),
        "samples_per_s_rounds": rates,
        **{key: {p: middle(key, p) for p in ("p50", "p99")} for key in ("step_ms", "sync_ms", "wait_ms")},
        "phases_ms": {phase: middle("phases_ms", phase) for phase in first["phases_ms"]},
    }


def _at(record: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        record = record[key]
    return record
