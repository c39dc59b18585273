"""The flags of `python -m benchmarks compare`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import tyro

from benchmarks.contestants.table_of_trainings import SCHEMES, TORCH, Contestant, line_up
from benchmarks.contestants.torch_training import why_absent
from benchmarks.netlab.config import ClusterConfig
from benchmarks.page.language import LANGUAGES
from collective.choice import BACKENDS
from common.errors import UsageError, choose
from common.launch.flags import TrainingConfig
from common.launch.settings import check_rank
from ps.planes.plane import DATA_PLANES

__all__ = ["CompareConfig", "MeasuredTraining", "numbers"]

SCALINGS = ("weak", "strong")


@dataclass(frozen=True, kw_only=True)
class MeasuredTraining(TrainingConfig):
    """One training of many, without files of its own; its length is in steps."""

    json: tyro.conf.Suppress[Path | None] = None
    save: tyro.conf.Suppress[Path | None] = None
    log_dir: tyro.conf.Suppress[Path | None] = None
    epochs: tyro.conf.Suppress[int | None] = None


@dataclass(frozen=True, kw_only=True)
class CompareConfig(MeasuredTraining):
    """Prove that all schemes compute the same bits, then measure them side by side and write a report.

    These are the options of the built-in training. For your own program, compare [OPTIONS] script.py ARGS, they are
    listed by compare --help script.py. For a job of many parts: compare --preset quick --help."""

    batch_size: int = 32
    """Samples per rank and step; with --scaling strong, of all ranks together."""
    scaling: str = "weak"
    """What more ranks mean. weak: more samples a step, --batch-size for each rank. strong: the same samples shared, one
    --batch-size for all ranks."""
    steps: int | None = 30
    """Steps of every measured training, running on over epoch ends."""
    schemes: str = ",".join(SCHEMES)
    """Schemes to compare, separated by commas: local, ps, ring, paddle (paddle.DataParallel over Gloo), torch-ddp
    (PyTorch's DistributedDataParallel over Gloo)."""
    nranks: str = "1,2,4"
    """Numbers of ranks, separated by commas."""
    servers: str = "1,2"
    """Numbers of parameter servers, separated by commas."""
    data_planes: str | None = None
    """What carries the gradients to parameter servers, separated by commas: shm, tcp, grpc. (default: shm,tcp; between
    emulated hosts tcp)"""
    ps_modes: str = "sync"
    """Modes of parameter servers, separated by commas: sync, ssp:S, async, geo:K; all but sync and ssp:0 compute
    something else, and are reported apart."""
    backends: str | None = None
    """Back ends of the ring, separated by commas: shm, tcp. (default: both; between emulated hosts tcp)"""
    shard_optimizer: bool = False
    """A ring whose ranks update 1/N of the parameters each takes part, too."""
    repetitions: int = 3
    """How often each contestant is measured; medians are reported."""
    warmup_steps: int = 3
    """Steps at the start of every training that are not timed."""
    out: Path = Path("out/compare")
    """Folder for results.json, report.md and report.html."""
    lang: str = "en"
    """Language of the report: en or zh."""
    history: Path | None = None
    """Folder that keeps the results of every run as a file, such as benchmarks/results/history. (default: none)"""
    trace: Path | None = None
    """Folder for a trace of the last repetition of each contestant of ours, as NAME.json, for ui.perfetto.dev."""
    cluster: tyro.conf.OmitArgPrefixes[ClusterConfig] = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("language", self.lang, LANGUAGES)
        choose("scaling", self.scaling, SCALINGS)
        backends, data_planes = self._backends()
        for name in backends:
            choose("backend", name, [b for b in BACKENDS if b not in ("auto", "nccl")])
        for name in data_planes:
            choose("data plane", name, [p for p in DATA_PLANES if p != "auto"])
        if self.cluster.hosts is not None and "shm" in (*backends, *data_planes):
            raise UsageError("shm does not reach other hosts; leave --backends and --data-planes out")
        if self.repetitions < 1 or self.warmup_steps < 0 or (self.steps or 0) <= self.warmup_steps:
            raise UsageError("--repetitions must be at least 1, and --steps more than --warmup-steps")
        if not self.contestants():
            raise UsageError(f"nobody takes part: --schemes {self.schemes} with --nranks {self.nranks}")
        if self.scaling == "strong":
            self._check_shares()

    def contestants(self) -> list[Contestant]:
        nranks = numbers("nranks", self.nranks)
        for count in nranks:
            check_rank(0, count)
        servers = numbers("servers", self.servers)
        backends, data_planes = self._backends()
        modes = self.ps_modes.split(",")
        schemes = self.schemes.split(",")
        return line_up(schemes, nranks, backends, servers, data_planes, modes, shard_optimizer=self.shard_optimizer)

    def absent(self) -> dict[str, str]:
        """The schemes asked for that cannot take part on this machine or in this training, and why."""
        wanted = any(contestant.scheme == TORCH for contestant in self.contestants())
        return {TORCH: why} if wanted and (why := why_absent(self)) else {}

    def for_ranks(self, nranks: int) -> CompareConfig:
        """What each of so many ranks is given: with strong scaling, its share of the batch."""
        if self.scaling == "weak":
            return self
        return replace(self, scaling="weak", batch_size=self.batch_size // nranks)

    def _check_shares(self) -> None:
        counts = sorted({contestant.nranks for contestant in self.contestants()})
        for nranks in (count for count in counts if self.batch_size % count):
            raise UsageError(
                f"--scaling strong shares --batch-size {self.batch_size} equally, which {nranks} ranks cannot; "
                f"give a multiple of {math.lcm(*counts)}"
            )

    def _backends(self) -> tuple[list[str], list[str]]:
        """Of rings, and the data planes of parameter servers."""
        usual = ("shm,tcp", "shm,tcp") if self.cluster.hosts is None else ("tcp", "tcp")
        return (self.backends or usual[0]).split(","), (self.data_planes or usual[1]).split(",")


def numbers(flag: str, text: str) -> list[int]:
    """The positive whole numbers of a comma-separated list."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"--{flag} must be numbers separated by commas, as in 1,2,4 (got {text!r})")
    return [int(part) for part in parts]
