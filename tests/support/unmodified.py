"""Runs programs that know nothing of us under our launchers and under Paddle's."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from tests.support import warm
from tests.support.groups import ROOT

__all__ = ["LAUNCHERS", "run"]

LAUNCHERS = {
    "ps": ["ps.run", "--nranks", "2", "--log-dir"],
    "collective": ["collective.run", "--nranks", "2", "--log-dir"],
    "paddle": ["paddle.distributed.launch", "--nproc_per_node", "2", "--backend", "gloo", "--log_dir"],
}


def run(scheme: str, folder: Path, *program: object, cwd: Path = ROOT, code: int = 0) -> tuple[list[str], str]:
    """(RESULT and EVALUATED lines, all that was said); under "paddle" Paddle computes as it does under us, and may try
    again: 1 of some 130 jobs with its Gloo crashes at its end (benchmarks/training/script_worker.py)."""
    log = folder / "log"
    for attempts_left in (1, 0) if scheme == "paddle" else (0,):
        shutil.rmtree(log, ignore_errors=True)
        done = warm.run(
            [sys.executable, "-m", *LAUNCHERS[scheme], str(log), *map(str, program)],
            timeout=100,
            cwd=cwd,
            env={**os.environ, "PYTHONWARNINGS": "ignore", "MKL_DEBUG_CPU_TYPE": "5", "OMP_NUM_THREADS": "1"},
        )
        said = done.stderr + "".join(p.read_text(errors="replace") for p in sorted(log.glob("workerlog.*")))
        if done.returncode == code:
            break
        assert attempts_left, said
    return sorted(re.findall(r"^((?:RESULT|EVALUATED) .*)$", said, re.MULTILINE)), said
