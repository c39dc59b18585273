"""Paddle's matrix kernels: its MKL is of 2019, and gives processors that are not Intel's its slowest code."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

__all__ = ["CPU_TYPE", "MKL_CHOOSES", "set_cpu_type", "wanted_cpu_type"]

CPU_TYPE = "MKL_DEBUG_CPU_TYPE"  # read by MKL at its first computation in a process; MKL newer than 2020.0 ignores it
AVX2 = "5"
MKL_CHOOSES = "auto"  # not a number, so it looks at the processor, as if the variable were not set
OTHER_CHOICES = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")  # which CPU_TYPE would override
MAKERS = {"AuthenticAMD", "HygonGenuine"}
CPU_INFO = Path("/proc/cpuinfo")


def set_cpu_type(cpu_info: Path = CPU_INFO) -> None:
    """Have MKL compute with AVX2 and FMA on an AMD or Hygon processor that has them, unless the user has chosen, by
    `CPU_TYPE` ("auto" leaves it to MKL) or another variable of MKL's. For every process that computes with Paddle,
    before it computes.

    MKL's own choice there is SSE2. With it products of 1024 x 1024 float32 matrices ran at 25 to 35 GFLOP/s on one core
    of an EPYC instead of 45 to 89, a step of ResNet-18 took 1.4 s instead of 0.5; and Paddle's SGD ended in other bits
    than on Intel's processors, for it multiplied and added in two roundings instead of one.
    """
    if (wanted := wanted_cpu_type(cpu_info)) is not None:
        os.environ[CPU_TYPE] = wanted


def wanted_cpu_type(cpu_info: Path = CPU_INFO) -> str | None:
    """The user's `CPU_TYPE`, else ours; None where it is not to be set.

    Args:
        cpu_info: what the kernel says of the processor.
    """
    ours = AVX2 if _is_misjudged(cpu_info) and not any(name in os.environ for name in OTHER_CHOICES) else None
    return os.environ.get(CPU_TYPE, ours)


def _is_misjudged(cpu_info: Path) -> bool:
    """Whether this processor can do more than MKL believes."""
    try:
        with cpu_info.open() as file:
            lines = [line.partition(":") for line in takewhile(str.strip, file)]  # of the first core
    except OSError:
        return False
    facts = {name.strip(): value.split() for name, _, value in lines}
    return bool(MAKERS & {*facts.get("vendor_id", ())}) and {"avx2", "fma"} <= {*facts.get("flags", ())}
