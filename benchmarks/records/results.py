"""What the results of every kind have in common: what they are, when, where and by which command they came about."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime, timezone
from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = [
    "Cluster",
    "Count",
    "Environment",
    "Interval",
    "Kind",
    "NonNegative",
    "Positive",
    "Results",
    "Sha256",
    "command_line",
    "moment",
]

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Interval = tuple[Positive, Positive]  # of a median, from low to high
Sha256 = str  # of all parameters
Kind = Literal["compare", "script", "sweep", "crossover", "accuracy", "faults", "programs", "scale", "suite"]


class Environment(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The machine and the software that the figures come from.

    Args:
        mkl_cpu_type: MKL_DEBUG_CPU_TYPE, where it is set.
        gpus, nccl: names and driver, and the NCCL that CuPy loads, where there are any.
        governor: of the first CPU's frequency; None where the kernel does not tell.
        memcpy_gb_per_s: of one copy of 100 MB, counting the bytes once.
        noise: relative spread of that copy, (p75 - p25) / median.
        versions: by package.
        commit: of the source tree, with a + where it has changes; None outside a checkout.
    """

    cpu: str
    mkl_cpu_type: str | None = None
    gpus: str | None = None
    nccl: str | None = None
    governor: str | None
    cores: Count
    memory_bytes: int
    memcpy_gb_per_s: float
    noise: float
    kernel: str
    python: str
    versions: dict[str, str]
    commit: Annotated[str, Meta(pattern=r"^[0-9a-f]+\+?$")] | None


class Cluster(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Emulated hosts.

    Args:
        links_bytes_per_s: of every host's link, each way.
        delay_s: of each link, one way.
        stream_bytes_per_s: what a plain TCP stream carried; of `compare` only.
    """

    words: str
    hosts: Annotated[int, Meta(ge=2)]
    links_bytes_per_s: list[float]
    delay_s: float
    cores_per_host: Count | None
    congestion_control: str
    stream_bytes_per_s: Positive | None = None


class Results(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The head of every file of results. `kind` tells which struct a file is read as.

    Args:
        created: in UTC.
        command: that made them.
    """

    schema: Literal[1] = 1
    created: Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$")]
    command: str
    environment: Environment

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


def moment() -> str:
    """Now, for `created`."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def command_line() -> str:
    """Of this process, for `command`."""
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
