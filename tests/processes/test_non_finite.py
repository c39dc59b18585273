"""A training that diverges ends with a named error, under every scheme, and saves nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.groups import ROOT, environment

pytest.importorskip("paddle")
LIMIT_S = 60.0
COMMANDS = {
    "ring": ["collective.run", "--nranks", "2"],
    "ps": ["ps.run", "--trainers", "2", "--servers", "2"],
    "tcp": ["collective.run", "--nranks", "2", "--backend", "tcp"],
    "sharded": ["collective.run", "--nranks", "3", "--shard-optimizer"],
    "ps tcp": ["ps.run", "--trainers", "2", "--data-plane", "tcp"],
    "ps grpc": ["ps.run", "--trainers", "2", "--servers", "2", "--data-plane", "grpc"],
    "ssp": ["ps.run", "--trainers", "2", "--mode", "ssp", "--staleness", "1"],
    "async": ["ps.run", "--trainers", "2", "--mode", "async"],
    "geo": ["ps.run", "--trainers", "2", "--mode", "geo", "--local-steps", "3"],
}
QUICK = ("ring", "ps")
JOB = ["--model", "mlp:8", "--dataset", "synthetic", "--batch-size", "4", "--steps", "100", "--optimizer", "sgd"]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in COMMANDS])
def test_too_high_a_learning_rate_is_a_named_error(name: str, tmp_path: Path) -> None:
    flags = [*JOB, "--lr", "1e30", "--save", tmp_path / "model", "--log-dir", tmp_path / "logs"]
    command = [sys.executable, "-m", *COMMANDS[name], *map(str, flags)]
    ended = warm.run(command, timeout=LIMIT_S, cwd=ROOT, env=environment())
    assert ended.returncode == 1, ended.stderr
    logs = [path.read_text() for path in sorted((tmp_path / "logs").iterdir()) if path.name.startswith("worker")]
    words = {match for log in logs for match in re.findall(r"NonFiniteGradient: (.*)", log)}
    assert all("NonFiniteGradient: rank" in log for log in logs), logs
    assert len(words) == 1
    assert re.search(r"rank \d's gradient of parameter \S+ is not finite at step \d+ \(", *words)
    assert not (tmp_path / "model").exists()
