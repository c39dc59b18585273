"""One round of all contestants of a comparison, and the summary of all rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import convert, to_builtins
from msgspec.structs import asdict

from benchmarks.contestants.table_of_trainings import Contestant
from benchmarks.measuring.measurement import OnRun, there_and_back
from benchmarks.records.compare import Quantiles, RankRecord, Run
from benchmarks.stats.interval import interval
from benchmarks.training.certificate import require_same_on_all_ranks
from benchmarks.training.pool import WorkerPool
from common.launch.flags import TrainingConfig

__all__ = ["Records", "measure_round", "records_from", "records_to_json", "summarise"]

Records = dict[Contestant, list[RankRecord]]  # rank 0's of every repetition


def measure_round(
    pool: WorkerPool,
    contestants: Sequence[Contestant],
    number: int,
    *,
    training_of: Callable[[int], TrainingConfig],
    warmup_steps: int,
    trace: Path | None,
    records: Records,
    on_run: OnRun,
    where: str,
) -> None:
    """Add to `records`, in the first round with the model's accuracy, which is the same in all.

    Args:
        training_of: what each of so many ranks is given.
        where: what the round is called.

    Raises:
        CertificateFailed: the ranks of a training ended with different parameters.
    """
    for contestant in there_and_back(contestants, number):
        on_run(f"{where}: {contestant.name}")
        training, evaluate = training_of(contestant.nranks), number == 0
        run = pool.run(contestant, training, warmup_steps=warmup_steps, evaluate=evaluate, trace=trace)
        require_same_on_all_ranks(contestant, run, f"after {run[0].steps} measured steps")
        records.setdefault(contestant, []).append(run[0])


def records_to_json(records: Mapping[Contestant, Sequence[RankRecord]]) -> dict[str, Any]:
    """By name, as they are kept between rounds."""
    return {contestant.name: to_builtins(mine) for contestant, mine in records.items()}


def records_from(content: Mapping[str, Any], contestants: Sequence[Contestant]) -> Records:
    """What `records_to_json` made."""
    return {each: convert(content[each.name], list[RankRecord]) for each in contestants if each.name in content}


def summarise(contestant: Contestant, repetitions: Sequence[RankRecord]) -> Run:
    """Medians over repetitions; of the throughput its interval and values too."""
    first = repetitions[0]
    rates = [each.samples_per_s for each in repetitions]
    phases = {phase: float(median(each.phases_ms[phase] for each in repetitions)) for phase in first.phases_ms}
    medians = {
        "samples_per_s": median(rates),
        "phases_ms": phases,
        "step_ms": middle([each.step_ms for each in repetitions]),
        "sync_ms": middle([each.sync_ms for each in repetitions]),
        "wait_ms": middle([each.wait_ms for each in repetitions]),
    }
    low, high = interval(rates)
    return Run(
        **{**asdict(first), **medians},
        contestant=contestant.name,
        repetitions=len(repetitions),
        samples_per_s_interval=(low, high),
        samples_per_s_rounds=rates,
    )


def middle(found: Sequence[Quantiles]) -> Quantiles:
    return Quantiles(float(median(each.p50 for each in found)), float(median(each.p99 for each in found)))
