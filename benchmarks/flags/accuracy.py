"""The flags of `python -m benchmarks accuracy`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.contestants.table_of_trainings import Contestant, line_up
from benchmarks.flags.compare import MeasuredTraining, numbers
from benchmarks.page.language import LANGUAGES
from benchmarks.training.watched import STRAGGLERS, Straggler
from collective.choice import BACKENDS
from common.errors import UsageError, choose
from common.launch.settings import check_rank
from ps.planes.plane import DATA_PLANES

__all__ = ["AccuracyConfig"]


@dataclass(frozen=True, kw_only=True)
class AccuracyConfig(MeasuredTraining):
    """Train to a target under each mode of the parameter server and the ring, with and without a straggler, and say
    how long it took."""

    steps: int | None = 180
    """Steps of every rank in every training: the budget within which the target is to be reached."""
    lr: float = 0.005
    """Learning rate."""
    target: float = 0.97
    """Accuracy on the test split to be reached, 0..1."""
    eval_every: int = 20
    """Steps between two evaluations; best a multiple of geo's local steps."""
    seeds: str = "1,2,3"
    """Seeds of the initial parameters and of the random straggler, separated by commas; each trains everything once."""
    straggler: str = "3x"
    """How many times slower a straggler computes."""
    nranks: int = 2
    """Number of ranks."""
    servers: int = 1
    """Number of parameter servers."""
    ps_modes: str = "sync,ssp:2,async,geo:4"
    """Modes of parameter servers, separated by commas: sync, ssp:S, async, geo:K."""
    data_plane: str = "shm"
    """What carries the gradients to parameter servers: shm, tcp or grpc."""
    backend: str = "shm"
    """Back end of the ring: shm or tcp."""
    out: Path = Path("out/accuracy")
    """Folder for accuracy.json, accuracy.md and accuracy.html."""
    lang: str = "en"
    """Language of the report: en or zh."""
    history: Path | None = None
    """Folder that keeps the results of every run as a file, such as benchmarks/results/history. (default: none)"""
    seed: tyro.conf.Suppress[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("language", self.lang, LANGUAGES)
        check_rank(0, self.nranks)
        choose("data plane", self.data_plane, [p for p in DATA_PLANES if p != "auto"])
        choose("backend", self.backend, [b for b in BACKENDS if b not in ("auto", "nccl")])
        if self.nranks < 2 or self.servers < 1:
            raise UsageError("--nranks must be at least 2, one rank straggles behind nobody; --servers at least 1")
        if not 0 < self.target <= 1:
            raise UsageError(f"--target must be a share of the test split, as in 0.97 (got {self.target:g})")
        if not 1 <= self.eval_every <= (self.steps or 0):
            raise UsageError(f"--eval-every must be in 1..{self.steps}, the --steps (got {self.eval_every})")
        self.stragglers(1)
        self.every_seed()
        self.contestants()

    def contestants(self) -> list[Contestant]:
        modes = self.ps_modes.split(",")
        return line_up(("ps", "ring"), [self.nranks], [self.backend], [self.servers], [self.data_plane], modes)

    def every_seed(self) -> list[int]:
        return list(dict.fromkeys(numbers("seeds", self.seeds)))

    def stragglers(self, seed: int) -> list[Straggler]:
        """Nobody, one rank always, one rank drawn each step."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)x?", self.straggler)
        if not found or float(found[1]) <= 1:
            raise UsageError(f"--straggler must be a factor above 1, as in 3x (got {self.straggler!r})")
        return [Straggler(kind, 1.0 if kind == "none" else float(found[1]), seed) for kind in STRAGGLERS]
