"""accuracy.json: how long each scheme and mode trains until it is good enough."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from benchmarks.records.results import Positive, Results, Sha256

__all__ = ["AccuracyResults", "AccuracyRun", "Certificate", "Job", "Point"]

Share = Annotated[float, Meta(ge=0, le=1)]


class Job(Struct, frozen=True, kw_only=True):
    """What was trained.

    Args:
        target: accuracy on the test split to be reached.
        eval_every: steps between two evaluations.
        factor: how many times slower a straggler computes.
    """

    model: str
    dataset: str
    batch_size: int
    optimizer: str
    lr: float
    nranks: int
    steps: int
    target: float
    eval_every: int
    factor: float
    seeds: list[int]


class Certificate(Struct, frozen=True, kw_only=True):
    """Those that must end in the same bits, and their digest by seed."""

    passed: bool
    contestants: list[str]
    sha256: dict[str, Sha256 | None]


class Point(Struct, frozen=True):
    """An evaluation: after so many steps of rank 0, so many seconds after the first began; the mean loss since the last
    evaluation."""

    step: int
    seconds: float
    loss: float
    accuracy: Share


class AccuracyRun(Struct, frozen=True, kw_only=True):
    """One training.

    Args:
        target_s: when the first parameters that reach the target were kept; None if none did.
        accuracy: in the end.
    """

    contestant: str
    scheme: str
    backend: str
    mode: str
    nranks: int
    servers: int
    seed: int
    steps: int
    straggler: Annotated[str, Meta(pattern="^(none|permanent|random)$")]
    samples_per_s: Positive
    seconds: Positive
    target_s: float | None
    accuracy: Share
    parameters_sha256: Sha256
    points: list[Point]


class AccuracyResults(Results, frozen=True, kw_only=True, tag="accuracy"):
    job: Job
    certificate: Certificate
    runs: list[AccuracyRun]
