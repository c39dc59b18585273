"""results.json: a comparison of the built-in training under several schemes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from benchmarks.records.results import Cluster, Count, Interval, Positive, Results, Sha256
from benchmarks.stats.interval import Measured

__all__ = ["Certificate", "CompareResults", "Difference", "Distance", "Group", "Loss", "Nearness", "Quantiles", "Rival"]
__all__ += ["RankRecord", "Run"]


class Quantiles(Struct, frozen=True):
    """Median and 99th percentile, in milliseconds."""

    p50: float
    p99: float


class Loss(Struct, frozen=True):
    """Mean over ranks of the first and the last step's training loss."""

    first: float
    last: float


class RankRecord(Struct, frozen=True, kw_only=True):
    """One training, as rank 0 saw it; its fields are those of common/trainer/record.py.

    Args:
        parameter_bytes: of all trainable parameters.
    """

    scheme: str
    backend: str
    nranks: Count
    servers: int
    mode: str
    model: str
    dataset: str
    batch_size: Count
    optimizer: str
    learning_rate: float
    seed: int
    steps: int
    warmup_steps: int
    samples_per_s: Positive
    step_ms: Quantiles
    sync_ms: Quantiles
    wait_ms: Quantiles
    phases_ms: dict[str, float]
    loss: Loss
    accuracy: float | None
    parameters_sha256: Sha256
    curve: list[tuple[float, float]]
    parameter_bytes: int


class Run(RankRecord, frozen=True, kw_only=True, omit_defaults=True):
    """One contestant: medians over repetitions; what is not timed is of the first.

    Args:
        samples_per_s_rounds: in the order of the rounds.
        least_sync_ms: between emulated hosts, the least time in which the network can carry what a step moves.
    """

    contestant: str
    repetitions: Count
    samples_per_s_interval: Interval
    samples_per_s_rounds: list[Positive] = []
    least_sync_ms: float | None = None

    @property
    def rate(self) -> Measured:
        """Samples per second."""
        return Measured(self.samples_per_s, *self.samples_per_s_interval, tuple(self.samples_per_s_rounds))


class Distance(Struct, frozen=True, kw_only=True):
    """Between two sets of arrays, relative to the size of one of them (L2 norms), and the largest that is accepted."""

    difference: float
    bound: float


class Nearness(Distance, frozen=True, kw_only=True, omit_defaults=True):
    """Whether two trainings are near enough: after all steps, or in their first gradient."""

    within: bool
    first_gradient: Distance | None = None


class Rival(Nearness, frozen=True, kw_only=True, omit_defaults=True):
    """Another library's training beside one of ours."""

    contestant: str
    reference: str


class Group(Struct, frozen=True, kw_only=True):
    """All contestants of one number of ranks that must end in the same bits.

    Args:
        sha256: that of the first.
        whole_batch: beside one process that takes all ranks' batches as one; None with one rank.
    """

    nranks: int
    identical: bool
    contestants: list[str]
    sha256: Sha256
    whole_batch: Nearness | None


class Difference(Struct, frozen=True, kw_only=True):
    """Where two contestants differ that must not; the last three are None where two ranks of one do."""

    contestant: str
    reference: str
    bucket: int | None
    parameter: str | None
    max_abs: float | None


class Certificate(Struct, frozen=True, kw_only=True):
    """Whether all schemes compute the same.

    Args:
        steps: that every contestant made for it.
        schemes: digests by contestant.
        other_order: contestants that have another order by design.
    """

    identical: bool
    passed: bool
    steps: int
    schemes: dict[str, Sha256]
    groups: list[Group]
    other_order: list[str]
    peers: list[Rival]
    differences: list[Difference]


class CompareResults(Results, frozen=True, kw_only=True, tag="compare"):
    """
    Args:
        scaling: weak: each rank has a batch of its own; strong: all share one.
        missing: schemes that could not take part, and why.
        runs: empty where the certificate failed.
        interrupted: whether rounds that were asked for are missing.
    """

    scaling: Annotated[str, Meta(pattern="^(weak|strong)$")] = "weak"
    missing: dict[str, str]
    runs: list[Run]
    certificate: Certificate
    cluster: Cluster | None = None
    interrupted: bool = False
