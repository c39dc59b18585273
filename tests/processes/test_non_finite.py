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


PROGRAM = """
import importlib, sys
import paddle
fleet = importlib.import_module(sys.argv[1])
fleet.init(is_collective=True)
model = fleet.distributed_model(paddle.nn.Linear(1200, 1000))
optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1, parameters=model.parameters()))
for step in range(6):
    factor = float("nan") if (step, fleet.worker_index()) == (4, 1) else 1.0
    (model(paddle.ones([2, 1200])).mean() * factor).backward()
    optimizer.step()
    optimizer.clear_grad()
print("done")
"""


@pytest.mark.parametrize("scheme", ["collective", "ps"])
def test_a_program_of_ones_own_goes_on_and_the_rank_is_named(scheme: str, tmp_path: Path) -> None:
    """The large parameter is looked at while ranks add it, or when it is seen whether the program changes any; under
    `collective` the small one before."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", f"{scheme}.run", "--nranks", "2", str(tmp_path / "program.py"), scheme]
    ended = warm.run(command, timeout=LIMIT_S, cwd=ROOT, env=environment())
    assert ended.returncode == 0, ended.stderr
    told = [line for line in ended.stderr.splitlines() if "not finite" in line]
    words = {"collective": r"weight is not finite at step 4;", "ps": r"bias is not finite at step 4 \(1,000 of 1,000 "}
    assert any(re.search(f"rank 1's gradient of parameter {words[scheme]}", line) for line in told), ended.stderr
    assert all("rank 1's" in line and line.endswith("goes on (--non-finite error stops it)") for line in told)


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
