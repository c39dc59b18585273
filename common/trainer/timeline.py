"""The moments of a training's steps, and what they say: the run record of all ranks. No Paddle needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.launch.flags import TrainingConfig
from common.sync.synchronizer import Synchronizer
from common.sync.trace import Trace
from common.trainer.record import Loss, Quantiles, RunRecord

__all__ = ["Timeline", "make_record"]


@dataclass
class Timeline:
    """One rank's moments of every step: monotonic clock readings, seconds, shared by all processes of a host."""

    begin: list[float] = field(default_factory=list)
    input_done: list[float] = field(default_factory=list)
    forward_done: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)  # backward is done: the last bucket is final
    end: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    def tell(self, trace: Trace) -> None:
        """Of the step under way, once it is ready."""
        trace.add("input", self.begin[-1], self.input_done[-1])
        trace.add("forward", self.input_done[-1], self.forward_done[-1])
        trace.add("backward", self.forward_done[-1], self.ready[-1])

    def as_array(self) -> Any:
        """float64 [6, steps]."""
        return np.array([self.begin, self.input_done, self.forward_done, self.ready, self.end, self.loss], np.float64)


def make_record(
    config: TrainingConfig,
    synchronizer: Synchronizer,
    timeline: Timeline,
    warmup: int,
    accuracy: float | None,
    digest: str,
) -> RunRecord:
    """Put all ranks' timelines side by side. This compares clocks of different processes, right on one host only."""
    ranks = synchronizer.all_gather(timeline.as_array())  # [nranks, 6, steps]
    late, begin, end = synchronizer.staleness, ranks[synchronizer.rank, 0], ranks[synchronizer.rank, 4]
    steps = np.diff(ranks[:, 0], append=ranks[:, 4, -1:])
    rates = config.batch_size / np.median(steps[:, warmup:], axis=1) if steps.size else np.zeros(len(ranks))
    phases = {name: values[warmup:] for name, values in phases_of(ranks, synchronizer.rank, late).items()}
    losses = ranks[:, 5].mean(0)
    return RunRecord(
        scheme=synchronizer.scheme,
        backend=synchronizer.backend,
        nranks=synchronizer.nranks,
        servers=synchronizer.servers,
        mode=synchronizer.mode,
        model=config.model,
        dataset=config.dataset,
        batch_size=config.batch_size,
        optimizer=config.optimizer,
        learning_rate=config.lr,
        seed=config.seed,
        steps=len(begin),
        warmup_steps=warmup,
        samples_per_s=float(rates.sum() if late != 0 else synchronizer.nranks * rates[synchronizer.rank]),
        step_ms=Quantiles.of(steps[synchronizer.rank, warmup:]),
        sync_ms=Quantiles.of(phases["sync"]),
        wait_ms=Quantiles.of(phases["wait"]),
        phases_ms={name: Quantiles.of(values).p50 for name, values in phases.items()},
        loss=Loss(float(losses[0]), float(losses[-1])) if losses.size else Loss(0.0, 0.0),
        accuracy=accuracy,
        parameters_sha256=digest,
        curve=[(float(t - begin[0]), float(x)) for t, x in zip(end, losses, strict=True)],
    )


def phases_of(ranks: Any, rank: int, late: int | None) -> dict[str, Any]:
    """What one rank's steps were spent on, in seconds; what was waiting for others, and what was synchronisation?

    Between this rank's `ready` and the last rank's (that of the step it must have made, where ranks may run apart) lies
    waiting, from there to `end` exposed synchronisation.

    Args:
        ranks: every rank's timeline, as an array.
        late: how many steps a rank may be ahead of the slowest; None: any number.
    """
    begin, input_done, forward_done, ready, end, _ = ranks[rank]
    others_ready = np.full(len(ready), -np.inf)  # when all had made the step without which this one cannot end
    if late is not None:
        others_ready[late:] = ranks[:, 3, : max(0, len(ready) - late)].max(0)
    all_ready = np.clip(others_ready, ready, end)
    return {
        "input": input_done - begin,
        "forward": forward_done - input_done,
        "backward": ready - forward_done,
        "wait": all_ready - ready,
        "sync": end - all_ready,
    }
