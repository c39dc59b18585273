"""Whether processes are killed for lack of memory: what the kernel counts, and what to tell whoever lost one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from common.system.memory import memory_bytes

__all__ = ["hint_of_memory", "killed_for_memory"]

COUNTERS = (  # of the machine, and of a container: cgroup versions 2 and 1
    Path("/proc/vmstat"),
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)
MUCH = 0.5  # of all memory


def killed_for_memory() -> int:
    """How many processes the kernel has killed so far, on this machine or in this container."""
    counts = [0]
    for file in COUNTERS:
        with suppress(OSError, ValueError):
            counts += [int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill ")]
    return max(counts)


def hint_of_memory(killed: int, peak_bytes: int) -> str:
    """What follows "was killed by SIGKILL".

    Args:
        killed: how many the kernel has killed while the job ran.
        peak_bytes: the most memory that the process was seen to have; 0: nobody looked.
    """
    total = memory_bytes()[1]
    had = f"; it had {peak_bytes / 1e9:.1f} GB of the {total / 1e9:.1f} GB here" if peak_bytes else ""
    advice = "; use a smaller batch or model, or fewer processes on this host"
    if killed:
        return f" because memory ran out{had}{advice}"
    if peak_bytes > MUCH * total:
        return f", perhaps because memory ran out{had}{advice}"
    return ""
