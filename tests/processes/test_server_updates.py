"""Updates by parameter servers in a user's program: the same bits as by Paddle's own optimizer on every rank, whatever
the optimizer, and a clear word where servers cannot make them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

paddle = pytest.importorskip("paddle")
from paddle import nn  # noqa: E402

from common.paddle_api.user_optimizer import describe_optimizer  # noqa: E402
from common.tensors.optimizers import SGD, Adagrad, Adam, AdamW, Momentum, Optimizer, RMSProp  # noqa: E402
from tests.support import warm  # noqa: E402
from tests.support.groups import ROOT  # noqa: E402

PROGRAM = ROOT / "tests" / "programs" / "optimizers.py"
optim = paddle.optimizer


def run(scheme: str, program: Path, folder: Path, *arguments: str, servers: int = 1, update: str = "auto") -> Any:
    """(exit code, RESULT lines, everything said); scheme "paddle" is Paddle itself, unchanged."""
    log = folder / f"{scheme}{servers}"
    launcher = {
        "ps": ["ps.run", "--nranks", "2", "--servers", str(servers), "--update", update],
        "collective": ["collective.run", "--nranks", "2"],
        "paddle": ["paddle.distributed.launch", "--nproc_per_node", "2", "--backend", "gloo"],
    }[scheme]
    worker = [
        str(ROOT / "benchmarks" / "training" / "script_worker.py"),
        scheme,
        str(folder / "record"),
        str(program),
        *arguments,
    ]
    done = warm.run(
        [sys.executable, "-m", *launcher, "--log_dir" if scheme == "paddle" else "--log-dir", str(log), *worker],
        timeout=100,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    said = done.stderr + "".join(p.read_text(errors="replace") for p in sorted(log.glob("workerlog.*")))
    return done.returncode, sorted(re.findall(r"^RESULT (.*)$", said, re.MULTILINE)), said


# One of each kind; test_flat_optimizer has all of them, in this process.
BY_SERVERS = (("sgd", "float32"), pytest.param("adamw", "float32", marks=pytest.mark.long), ("adam", "float64"))
BY_TRAINERS = {  # for two of the reasons; `test_why_servers_cannot` has all of them, in this process
    "clip": "the optimizer clips gradients (ClipGradByNorm)",
    "by hand": "the program changes gradients between backward and step",
}


@pytest.mark.processes
@pytest.mark.parametrize(("name", "dtype"), BY_SERVERS)
def test_servers_give_the_bits_of_the_users_own_optimizer(tmp_path: Path, name: str, dtype: str) -> None:
    arguments = (name, str(tmp_path / "saved"), dtype, "unused")
    codes, results, said = zip(
        run("ps", PROGRAM, tmp_path, *arguments, servers=2),
        run("collective", PROGRAM, tmp_path, *arguments),
        strict=True,
    )
    assert codes == (0, 0), said
    by_servers, by_ranks = ([line.split() for line in found] for found in results)
    assert [line[:3] for line in by_servers] == [line[:3] for line in by_ranks]  # rank, parameters, optimizer state
    assert [line[1:] for line in by_servers[:1]] == [line[1:] for line in by_servers[1:]]
    assert {line[-1] for line in by_servers} == {"0"}  # the ranks keep no state
    assert name == "sgd" or {line[-1] for line in by_ranks} != {"0"}
    assert "gradsync:" not in said[0]


@pytest.mark.processes
@pytest.mark.parametrize("name", BY_TRAINERS)
def test_what_servers_cannot_do_is_said_once_and_done_by_trainers(tmp_path: Path, name: str) -> None:
    arguments = (name, str(tmp_path / "saved"), "float32", "unused")
    codes, results, said = zip(
        run("ps", PROGRAM, tmp_path, *arguments), run("collective", PROGRAM, tmp_path, *arguments), strict=True
    )
    assert codes == (0, 0), said
    assert results[0] == results[1]
    words = f"gradsync: the trainers update, not the servers: {BY_TRAINERS[name]}"
    assert said[0].count(words) == 1
    assert "gradsync:" not in said[1]


READ_AT_FIRST = "gradsync: the trainers update, not the servers: the program reads gradients after backward"
READ_LATER = "gradsync: the trainers update from now on, not the servers: the program reads gradients after backward"
READS = {
    "one rank, from the first step on": READ_AT_FIRST,
    "one rank, after the step": READ_LATER,
    "all ranks, later": READ_LATER,
    "as NumPy, later": READ_LATER,
    "clips later": READ_LATER,
    "clips by value later": READ_LATER,
    "does not bite at first": READ_AT_FIRST,
    "replaces later": READ_LATER,
    "zero_grad": "",
}
REPEAT = ("all ranks, later", "as NumPy, later", "clips by value later", "replaces later")  # what the others show


@pytest.mark.processes
@pytest.mark.parametrize("way", [pytest.param(w, marks=[pytest.mark.long] if w in REPEAT else []) for w in READS])
def test_who_reads_gradients_finds_the_mean(tmp_path: Path, way: str) -> None:
    program = ROOT / "tests" / "programs" / "gradient_reads.py"
    codes, results, said = zip(
        run("ps", program, tmp_path, way), run("collective", program, tmp_path, way), strict=True
    )
    assert codes == (0, 0), said
    assert results[0] == results[1]
    assert re.findall("gradsync: the trainers update.*", said[0]) == ([READS[way]] if READS[way] else [])


@pytest.mark.processes
def test_parameters_of_two_dtypes(tmp_path: Path) -> None:
    arguments = ("sgd", str(tmp_path / "saved"), "mixed")
    codes, results, said = zip(
        run("ps", PROGRAM, tmp_path, *arguments, servers=2),
        run("collective", PROGRAM, tmp_path, *arguments),
        strict=True,
    )
    assert codes == (0, 0), said
    assert results[0] == results[1]
    assert "the trainers update, not the servers: the model has parameters of several dtypes" in said[0]


@pytest.mark.processes
def test_trainer_is_a_choice(tmp_path: Path) -> None:
    arguments = ("adam", str(tmp_path / "saved"), "float32")
    code, results, said = run("ps", PROGRAM, tmp_path, *arguments, update="trainer")
    assert code == 0, said
    assert "gradsync:" not in said
    assert all(line.split()[-1] != "0" for line in results)


WRONG = {
    "server, which cannot": (
        "opt = paddle.optimizer.Lamb(parameters=model.parameters()); backward(); opt.step()",
        r"UsageError: --update server: servers cannot make this update: servers know .* use --update auto",
    ),
    "server, and gradients changed in the second step": (
        "opt = paddle.optimizer.SGD(parameters=model.parameters()); backward(); opt.step(); opt.clear_grad()\n"
        "backward(); nn.utils.clip_grad_norm_(model.parameters(), 1e-3); opt.step()",
        r"UsageError: --update server: servers cannot make this update: the program changes .* use --update auto",
    ),
    "server, and a second optimizer": (
        "for _ in range(2): backward(); paddle.optimizer.SGD(parameters=model.parameters()).step()",
        r"UsageError: --update server: a second optimizer updates the model, .* use --update auto",
    ),
    "parameters changed by the program": (
        "opt = paddle.optimizer.SGD(parameters=model.parameters())\n"
        "for step in range(4):\n"
        "    backward()\n"
        "    if step > 1: [p.set_value(p - 0.1 * p._grad_ivar()) for p in model.parameters()]\n"
        "    else: opt.step(); opt.clear_grad()",
        r"UsageError: the program changed parameters by itself after a backward.* start with --update trainer",
    ),
    "gradients changed later, unseen": (
        "opt = paddle.optimizer.SGD(parameters=model.parameters())\n"
        "for step in range(3):\n"
        "    backward()\n"
        "    if step == 2: [p._grad_ivar().scale_(0.5) for p in model.parameters()]\n"
        "    opt.step()",
        r"UsageError: the program changed gradients between backward and optimizer\.step\(\).* --update trainer",
    ),
    "learning rates": (
        "backward(); paddle.optimizer.SGD(0.1 + dist.get_rank(), parameters=model.parameters()).step()",
        r"LayoutMismatch: rank . has learning rate [\d.]+ at step 1, rank . has [\d.]+; .*scheduler",
    ),
    "optimizers": (
        "kind = [paddle.optimizer.SGD, paddle.optimizer.Adam][dist.get_rank()]\n"
        "backward(); kind(parameters=model.parameters()).step()",
        r"LayoutMismatch: rank . and rank . disagree on the optimizer: .*; make the same optimizer on all ranks",
    ),
    "one loads a state": (
        "opt = paddle.optimizer.SGD(parameters=model.parameters()); backward(); opt.step(); backward()\n"
        "if dist.get_rank(): model.set_state_dict({k: v + 1 for k, v in model.state_dict().items()})\n"
        "opt.step()",
        r"LayoutMismatch: rank . (changed|kept) its parameters at step 3, .*; load the same state on all ranks",
    ),
    "one backward more": (
        "opt = paddle.optimizer.SGD(parameters=model.parameters())\n"
        "for _ in range(2): backward(); opt.step()\n"
        "backward()\n"
        "backward() if dist.get_rank() else opt.step()",
        r"LayoutMismatch: rank . (.* ran another backward|called optimizer\.step\(\)).*all ranks must do the same",
    ),
    "one rank reads, later": (
        "opt = paddle.optimizer.SGD(parameters=model.parameters())\n"
        "for _ in range(2): backward(); opt.step()\n"
        "backward()\n"
        "print(model.weight.grad) if dist.get_rank() else opt.step()",
        r"LayoutMismatch: rank . (read gradients or ran .*|called optimizer\.step\(\)).* gradients .* --update trainer",
    ),
    "state of another model": (
        "opt = paddle.optimizer.Adam(parameters=model.parameters()); backward(); opt.step(); backward()\n"
        "opt.set_state_dict({'foreign_moment1_0': paddle.ones([3])}); opt.step()",
        r"UsageError: the optimizer state has foreign_moment1_0, which belongs to no parameter of this model",
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_named(tmp_path: Path, name: str) -> None:
    body, text = WRONG[name]
    program = tmp_path / "wrong.py"
    program.write_text(
        "import paddle\nfrom paddle import nn\nimport paddle.distributed as dist\ndist.init_parallel_env()\n"
        "model = paddle.DataParallel(nn.Linear(4, 2))\n"
        f"def backward(): model(paddle.rand([3, 4])).sum().backward()\n{body}\n"
    )
    choice = "server" if name.startswith("server") else "auto"
    code, _, said = run("ps", program, tmp_path, update=choice)
    assert code == 2, said
    assert re.search(text, said), said


def model_and_names() -> tuple[Any, list[str]]:
    model = nn.Linear(3, 2)
    return model, ["", *(p.name for p in model.parameters())]


KNOWN: dict[str, tuple[Any, Optimizer]] = {
    "sgd": (lambda p: optim.SGD(parameters=p), SGD()),
    "sgd, L2": (lambda p: optim.SGD(parameters=p, weight_decay=0.25), SGD(weight_decay=0.25)),
    "momentum": (
        lambda p: optim.Momentum(momentum=0.5, use_nesterov=True, weight_decay=0.125, parameters=p),
        Momentum(momentum=0.5, use_nesterov=True, weight_decay=0.125),
    ),
    "momentum, L2Decay": (
        lambda p: optim.Momentum(weight_decay=paddle.regularizer.L2Decay(0.5), parameters=p),
        Momentum(weight_decay=0.5),
    ),
    "adagrad": (
        lambda p: optim.Adagrad(0.1, epsilon=0.5, initial_accumulator_value=0.25, parameters=p),
        Adagrad(epsilon=0.5, initial_accumulator_value=0.25),
    ),
    "rmsprop": (
        lambda p: optim.RMSProp(0.1, rho=0.5, epsilon=0.25, momentum=0.125, centered=True, parameters=p),
        RMSProp(rho=0.5, epsilon=0.25, momentum=0.125, centered=True),
    ),
    "adam": (
        lambda p: optim.Adam(beta1=0.5, beta2=0.25, epsilon=0.125, parameters=p),
        Adam(beta1=0.5, beta2=0.25, epsilon=0.125),
    ),
    "adamw": (lambda p: optim.AdamW(weight_decay=0.5, parameters=p), AdamW(weight_decay=0.5)),
    "a scheduler": (lambda p: optim.SGD(optim.lr.StepDecay(0.1, 3), parameters=p), SGD()),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_optimizer_is_described_with_its_numbers(name: str) -> None:
    model, names = model_and_names()
    make, expected = KNOWN[name]
    assert describe_optimizer(make(model.parameters()), names) == expected


def own_rate() -> Any:
    return nn.Linear(3, 2, weight_attr=paddle.ParamAttr(learning_rate=0.5))


def own_regularizer() -> Any:
    return nn.Linear(3, 2, weight_attr=paddle.ParamAttr(regularizer=paddle.regularizer.L2Decay(0.1)))


UNKNOWN: dict[str, tuple[Any, Any, str]] = {
    "kind": (nn.Linear, lambda m: optim.Adamax(parameters=m.parameters()), "not Adamax"),
    "subclass": (nn.Linear, lambda m: type("Mine", (optim.SGD,), {})(parameters=m.parameters()), "not Mine"),
    "clip": (
        nn.Linear,
        lambda m: optim.SGD(parameters=m.parameters(), grad_clip=nn.ClipGradByGlobalNorm(1.0)),
        "clips gradients (ClipGradByGlobalNorm)",
    ),
    "groups": (nn.Linear, lambda m: optim.SGD(parameters=[{"params": m.parameters()}]), "parameter groups"),
    "L1": (
        nn.Linear,
        lambda m: optim.Adam(parameters=m.parameters(), weight_decay=paddle.regularizer.L1Decay(0.1)),
        "the optimizer has L1Decay",
    ),
    "a part": (nn.Linear, lambda m: optim.SGD(parameters=[m.weight]), "1 of the model's 2 parameters"),
    "more": (
        nn.Linear,
        lambda m: optim.SGD(parameters=[*m.parameters(), *nn.Linear(1, 1).parameters()]),
        "2 of the model's 2 parameters, and 2 others (sparse tables, or another model's)",
    ),
    "lazy": (nn.Linear, lambda m: optim.Adam(parameters=m.parameters(), lazy_mode=True), "Adam has lazy_mode set"),
    "some decay": (
        nn.Linear,
        lambda m: optim.AdamW(parameters=m.parameters(), apply_decay_param_fun=lambda name: False),
        "AdamW has apply_decay_param_fun set",
    ),
    "own rate": (
        lambda *_: own_rate(),
        lambda m: optim.SGD(parameters=m.parameters()),
        "a learning rate or regularizer",
    ),
    "own decay": (
        lambda *_: own_regularizer(),
        lambda m: optim.SGD(parameters=m.parameters()),
        "a learning rate or regularizer",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_why_servers_cannot(name: str) -> None:
    make_model, make, reason = UNKNOWN[name]
    model = make_model(3, 2)
    found = describe_optimizer(make(model), ["", *(p.name for p in model.parameters())])
    assert isinstance(found, str)
    assert reason in found
