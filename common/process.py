"""What every GradSync process does first: one compute thread, tuned malloc, and an end with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
from pathlib import Path

from common.memory import tune_malloc

__all__ = ["PARENT_VARIABLE", "die_with_parent", "prepare_process"]

PARENT_VARIABLE = "GRADSYNC_PARENT"  # process id of the launcher, set by it


def prepare_process() -> None:
    """Call before Paddle is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a second thread does nothing for convolutions, and spins
    warnings.filterwarnings("ignore", "No ccache found")  # Paddle's, at import, about compiling extensions
    sys.setswitchinterval(5e-4)  # at the default 5 ms a busy thread costs 54 us a backward hook
    tune_malloc()
    die_with_parent()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however it dies: our launcher, or one started by it."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(parent) and not Path(f"/proc/{parent}").exists():  # it died before the call
        os._exit(1)
