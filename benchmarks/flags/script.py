"""The flags of `python -m benchmarks compare script.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.contestants.table_of_trainings import PADDLE_SCHEMES, Contestant
from benchmarks.flags.compare import numbers
from benchmarks.page.language import LANGUAGES
from common.errors import UsageError, choose
from common.launch.settings import check_rank

__all__ = ["CompareScriptConfig"]

SCRIPT_SCHEMES = ("ps", "ring", *PADDLE_SCHEMES)


@dataclass(frozen=True, kw_only=True)
class CompareScriptConfig:
    """Run your own Paddle program, unchanged, under each scheme and compare its steps."""

    schemes: str = "ps,ring,paddle"
    """Schemes to compare, separated by commas: ps, ring, paddle (paddle.DataParallel over Gloo, with our settings of
    malloc and MKL), paddle-default (the same as Paddle's users have it)."""
    nranks: str = "2"
    """Numbers of ranks, separated by commas."""
    servers: int = 1
    """Number of parameter servers."""
    data_plane: str = "shm"
    """What carries the gradients to them: shm, tcp or grpc."""
    backend: str = "shm"
    """Back end of the ring: shm or tcp."""
    repetitions: int = 3
    """How often each contestant runs the program; medians are reported."""
    warmup_steps: int = 3
    """Steps at the start of every run that are not timed."""
    timeout: float = 30.0
    """Deadline of every wait for another process, in seconds."""
    run_timeout: float = 3600.0
    """Longest time for one run of the program, in seconds."""
    out: Path = Path("out/compare")
    """Folder for script.json, script.md and script.html."""
    lang: str = "en"
    """Language of the report: en or zh."""
    history: Path | None = None
    """Folder that keeps the results of every run as a file, such as benchmarks/results/history. (default: none)"""

    def __post_init__(self) -> None:
        choose("language", self.lang, LANGUAGES)
        for scheme in self.schemes.split(","):
            choose("scheme", scheme, SCRIPT_SCHEMES)
        choose("backend", self.backend, ("shm", "tcp"))
        choose("data plane", self.data_plane, ("shm", "tcp", "grpc"))
        if self.repetitions < 1 or self.warmup_steps < 0 or self.servers < 1:
            raise UsageError("--repetitions and --servers must be at least 1, --warmup-steps at least 0")

    def contestants(self) -> list[Contestant]:
        found = []
        for count in numbers("nranks", self.nranks):
            check_rank(0, count)
            backends = {
                "ps": (self.data_plane, self.servers),
                "ring": (self.backend, 0),
                **dict.fromkeys(PADDLE_SCHEMES, ("gloo", 0)),
            }
            found += [Contestant(s, *_placed(backends[s], count)) for s in self.schemes.split(",")]
        return found


def _placed(backend: tuple[str, int], nranks: int) -> tuple[str, int, int]:
    return backend[0], nranks, backend[1]
