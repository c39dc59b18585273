"""Rows 1 and 2 without `--max-restarts`: whoever is killed, at whatever point, all others and the launcher say so."""

from __future__ import annotations

import re
import time

import pytest

pytest.importorskip("paddle")

from tests.faults.kills import AT, Run, left_by
from tests.faults.test_kills import RING_TCP, SERVER, TRAINER

WITHIN_S = 1.0 + 4.0  # to notice, and for processes and the launcher to end, on a loaded machine
CASES = [
    *(("collective", "tcp", point, who) for point in ("joined", *RING_TCP) for who in ("0", "1")),
    *(("ps", "shm", point, who) for point in ("joined", *TRAINER) for who in ("0", "1")),
    *(("ps", "tcp", point, "s0") for point in SERVER),
]


@pytest.mark.parametrize(("scheme", "plane", "point", "who"), CASES)
def test_all_others_name_who_was_killed(scheme: str, plane: str, point: str, who: str, run: Run) -> None:
    victim = f"server {who[1:]}" if who.startswith("s") else f"rank {who}"
    fault = f"{point}:{who}:{0 if point == 'joined' else AT[1]}"
    job = run(scheme, fault, plane=plane, commits=False)
    (struck,) = job.struck()
    assert time.monotonic() - struck < WITHIN_S
    assert job.started.code == 128 + 9
    assert f"{victim} was killed by SIGKILL" in job.err
    others = {file: log for file, log in job.logs.items() if "GRADSYNC_FAULT_HERE" not in log}
    assert others
    for file, log in others.items():
        assert re.search(rf"PeerLost: .*\b{victim}\b", log), f"{file}: {log}"
    assert left_by(job) == []
