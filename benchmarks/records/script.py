"""script.json: a program of the user's own under several schemes."""

from __future__ import annotations

from msgspec import Struct

from benchmarks.records.results import Count, Interval, NonNegative, Positive, Results, Sha256
from benchmarks.stats.interval import Measured

__all__ = ["Certificate", "Failure", "ProgramRecord", "ScriptResults", "ScriptRun", "Yardstick"]


class ProgramRecord(Struct, frozen=True, kw_only=True):
    """One whole run of the program, as rank 0 saw it.

    Args:
        times: when each outermost backward ended, in seconds.
        memory_bytes: above that after imports.
        models: that were given to DataParallel or distributed_model.
    """

    times: list[float]
    memory_bytes: int
    parameters_sha256: Sha256
    models: int


class Yardstick(Struct, frozen=True):
    """How far rounding alone takes two trainings apart, and the bound that follows."""

    distance: NonNegative
    bound: NonNegative


class Certificate(Struct, frozen=True, kw_only=True):
    """Whether our schemes computed the same, and Paddle's within a bound.

    Args:
        ours: contestants that must end in the same bits.
        against_paddle: by contestant of Paddle's, the distance of ours after so many backwards.
        bounds: the fixed ones, after so many backwards.
        yardsticks: by contestant of Paddle's for which these were exceeded.
        own_kernels: contestants of Paddle's that were held against a run of ours with MKL's own choice of kernels.
        schemes: digests by contestant.
    """

    identical: bool
    ours: list[str]
    against_paddle: dict[str, dict[int, float]]
    bounds: dict[int, float]
    yardsticks: dict[str, dict[int, Yardstick]] = {}
    own_kernels: list[str] = []
    passed: bool
    schemes: dict[str, Sha256]


class Failure(Struct, frozen=True):
    """Why a contestant failed, and the last lines of its logs."""

    reason: str
    output: list[str]


class ScriptRun(Struct, frozen=True, kw_only=True):
    """One contestant.

    Args:
        step_ms: the median over repetitions of the median over steps, with its interval and the repetitions' values.
        memory_mb: of rank 0, above that after imports.
    """

    contestant: str
    scheme: str
    nranks: Count
    steps: int
    repetitions: Count
    step_ms: Positive
    step_ms_interval: Interval
    step_ms_rounds: list[Positive] = []
    memory_mb: float
    parameters_sha256: Sha256

    @property
    def step(self) -> Measured:
        """In milliseconds."""
        return Measured(self.step_ms, *self.step_ms_interval, tuple(self.step_ms_rounds))


class ScriptResults(Results, frozen=True, kw_only=True, tag="script"):
    """
    Args:
        program: its file's name.
        failed: by contestant.
        runs: empty where the certificate failed.
    """

    program: str = ""
    certificate: Certificate
    failed: dict[str, Failure]
    runs: list[ScriptRun]
