"""Two real ranks: the bits of Paddle's own, and wrong use named on every rank."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from common.paddle_api.replicas import replicas_agree  # noqa: E402
from common.sync.local import LocalSynchronizer  # noqa: E402
from common.system.process import RESTARTS_VARIABLE  # noqa: E402
from tests.support import warm  # noqa: E402
from tests.support.groups import ROOT  # noqa: E402
from tests.support.paddle_models import batch, life  # noqa: E402
from tests.support.traces import check_trace, read_trace, spans  # noqa: E402

PROGRAM = ROOT / "tests" / "programs" / "many_ways.py"


def results_of(output: str) -> list[str]:
    return sorted(line[len("RESULT ") :] for line in output.splitlines() if line.startswith("RESULT "))


def launch(scheme: str, nranks: int, folder: Path, *flags: str) -> list[str]:
    """Run the program under a scheme; returns "rank digest" of every rank."""
    log, trace = folder / scheme, ["--trace", str(folder / f"{scheme}.json")]
    worker = [
        str(ROOT / "benchmarks" / "training" / "script_worker.py"),
        scheme,
        str(folder / "record"),
        str(PROGRAM),
    ]
    command = {
        "ps": ["-m", "ps.run", "--nranks", str(nranks), "--log-dir", str(log), *trace],
        "collective": ["-m", "collective.run", "--nranks", str(nranks), "--log-dir", str(log), *trace],
        "paddle": [
            "-m",
            "paddle.distributed.launch",
            "--nproc_per_node",
            str(nranks),
            "--backend",
            "gloo",
            "--log_dir",
            str(log),
        ],
    }[scheme]
    done = warm.run(
        [sys.executable, *command, *worker, *flags],
        timeout=100,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    logs = "\n".join(p.read_text(errors="replace") for p in sorted(log.glob("workerlog.*")))
    assert done.returncode == 0, done.stderr + logs
    return results_of(logs)


def check_trace_of_program(trace: dict[str, Any], *, servers: int) -> None:
    steps, buckets = len(spans(trace, pid=0, cat="step")), len({e["tid"] for e in spans(trace, pid=0, cat="bucket")})
    assert (steps, buckets) > (1, 1)
    phases = frozenset({"backward"})
    check_trace(trace, nranks=2, servers=servers, steps=range(steps), buckets=buckets, phases=phases)


@pytest.mark.processes
@pytest.mark.long  # tests/processes has the same for whole programs
@pytest.mark.parametrize("flags", [(), ("--unused",)])
def test_two_ranks_equal_paddles_data_parallel_bit_for_bit(tmp_path: Path, flags: tuple[str, ...]) -> None:
    found = {scheme: launch(scheme, 2, tmp_path, *flags) for scheme in ("ps", "collective")}
    assert len(found["ps"]) == 2
    for scheme in found:
        check_trace_of_program(read_trace(tmp_path / f"{scheme}.json"), servers=int(scheme == "ps"))
    assert len({line.split()[1] for line in found["ps"]}) == 1
    assert found["ps"] == found["collective"]
    if not flags:
        assert launch("paddle", 2, tmp_path) == found["ps"]


@pytest.mark.processes
def test_one_rank_needs_no_launcher(tmp_path: Path) -> None:
    program = tmp_path / "alone.py"
    program.write_text(
        PROGRAM.read_text()
        .replace("import paddle.distributed as dist", "import collective as dist")
        .replace("paddle.DataParallel", "dist.DataParallel")
    )
    done = warm.run([sys.executable, "-W", "ignore", str(program)], timeout=100)
    assert done.returncode == 0, done.stderr
    assert results_of(done.stdout) == launch("ps", 1, tmp_path)


APART = """
import paddle
from paddle import nn
import {scheme} as dist
dist.init()
model = dist.DataParallel(nn.Linear(3, 2))
optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
for step in range(12):
    model(paddle.ones([4, 3])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
    if step == {step} and dist.get_rank() == 2:
        model.parameters()[0].set_value(model.parameters()[0] * 1.5)
print("trained")
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("scheme", "flags", "step", "backward"),
    [
        ("collective", (), 0, 2),
        pytest.param("ps", ("--update", "trainer"), 4, 10, marks=pytest.mark.long),
        ("ps", ("--update", "trainer"), 99, None),
        pytest.param("collective", (), 99, None, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_trains_on_parameters_of_its_own_is_named_once(
    tmp_path: Path, scheme: str, flags: tuple[str, ...], step: int, backward: int | None
) -> None:
    program = tmp_path / "apart.py"
    program.write_text(APART.format(scheme=scheme, step=step))
    done = warm.run(
        [sys.executable, "-m", f"{scheme}.run", "--nranks", "3", *flags, str(program)],
        timeout=100,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    text = f"gradsync: in averaging backward {backward} the parameters of rank 2 differ from rank 0's: unless"
    assert done.stderr.startswith(text) if backward else not done.stderr
    assert done.stderr.count("\n") == bool(backward)


@pytest.mark.parametrize("restarts", [0, 1])
def test_after_a_restart_a_counter_of_the_programs_own_may_be_why(
    restarts: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RESTARTS_VARIABLE, str(restarts))
    of_two = LocalSynchronizer()
    monkeypatch.setattr(of_two, "all_gather", lambda mine: np.stack([mine, mine + 1]))
    assert not replicas_agree([np.zeros(3, np.float32)], of_two, "in averaging backward 2")
    told = capsys.readouterr().err
    assert told.startswith("gradsync: in averaging backward 2 the parameters of rank 1 differ from rank 0's: unless")
    hint = "the job was restarted: counters of the program's own begin anew then; use `step` of its TrainingState\n"
    assert told.endswith(hint) == bool(restarts)


def test_parameters_are_compared_seldom(wrapped: Any) -> None:
    model, average, synchronizer = wrapped
    gathered = []

    def all_gather(values: np.ndarray) -> np.ndarray:
        gathered.append((synchronizer.steps, values.copy()))
        return values[None]

    synchronizer.all_gather = all_gather
    for _ in range(11):
        for average.enabled in (False, True):
            model(batch()).sum().backward()
    compared = [step for step, values in gathered if values.size == 1]
    assert compared == [2, 10]
    before, after = (values for _, values in gathered if values.size == 1)
    assert before == after
    model.body.weight.set_value(model.body.weight + 1)
    replicas_agree((p.numpy() for p in model.parameters()), synchronizer, "")
    assert gathered[-1][1] != after


@pytest.mark.parametrize("serves_updates", [True, False])
def test_parameters_are_compared_only_where_backward_waits_for_the_mean(serves_updates: bool) -> None:
    gathered = []
    with life(serves_updates=serves_updates) as each:
        each.synchronizer.all_gather = lambda values: gathered.append(values.nbytes) or np.stack([values, values])
        for _ in range(11):
            each.backward()
            each.step()
    assert gathered.count(8) == (1 if serves_updates else 2)


@pytest.mark.processes
@pytest.mark.parametrize("scheme", ["ps", "collective"])
def test_a_program_that_wraps_no_model_is_told_once_that_its_ranks_train_apart(tmp_path: Path, scheme: str) -> None:
    program = tmp_path / "apart.py"
    program.write_text(
        APART.format(scheme=scheme, step=99).replace("dist.DataParallel(nn.Linear(3, 2))", "nn.Linear(3, 2)")
    )
    done = warm.run(
        [sys.executable, "-m", f"{scheme}.run", "--nranks", "2", str(program)],
        timeout=100,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert done.stderr.startswith(f"{scheme}: gradients are not synchronised, for no model was given to")
    assert done.stderr.count("\n") == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "dist.distributed_model(nn.Linear(2, 2)); other = nn.Linear(2, 2);"
            "dist.distributed_optimizer(paddle.optimizer.SGD(parameters=other.parameters()))",
            "the optimizer has no parameter of the model given to distributed_model",
        ),
        ("dist.DataParallel(nn.Linear(2, 2), group=object())", "group= must be a group of two ranks or more"),
        ("dist.DataParallel(nn.Linear(2, 2 + dist.get_rank()))", "rank . and rank . disagree"),
    ],
    ids=["another model's optimizer", "group", "different models"],
)
@pytest.mark.parametrize("scheme", ["ps", "collective"])
def test_wrong_use_is_named_on_every_rank(tmp_path: Path, scheme: str, body: str, text: str) -> None:
    program = tmp_path / "wrong.py"
    program.write_text(f"import paddle\nfrom paddle import nn\nimport {scheme} as dist\ndist.init()\n{body}\n")
    command = ["-m", f"{scheme}.run", "--nranks", "2", "--log-dir", str(tmp_path / "log"), str(program)]
    done = warm.run(
        [sys.executable, *command],
        timeout=100,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 2, done.stderr
    for log in (tmp_path / "log").glob("workerlog.*"):
        lines = log.read_text().strip().splitlines()
        assert len(lines) == 1, lines
        assert re.search(text, lines[0]) or "left" in lines[0]
    assert re.search(text, done.stderr)
