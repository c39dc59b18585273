"""DataParallel: a user's program does what it did before, and between ranks its gradients are the mean."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")
from paddle import nn  # noqa: E402

from common import backward  # noqa: E402
from common.data_parallel import GradientAverage  # noqa: E402
from common.errors import PeerLost, UsageError  # noqa: E402
from common.local import LocalSynchronizer  # noqa: E402

PROGRAM = Path(__file__).parent / "programs" / "many_ways.py"


class Branches(nn.Layer):
    """Two heads, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Any, left: bool = True) -> Any:
        return (self.left if left else self.right)(nn.functional.relu(self.body(x)))


class Twice(LocalSynchronizer):
    """As if another rank had the same gradients times three: the mean is twice one's own."""

    fail_with: Exception | None = None

    def attach(self, arena: Any, optimizer: Any) -> None:
        self.arena, self.marked, self.steps = arena, [], 0
        super().attach(arena, optimizer)

    def mark_final(self, bucket: int) -> None:
        self.marked.append(bucket)
        if self.fail_with:
            raise self.fail_with

    def finish(self, learning_rate: float) -> None:
        self.steps += 1
        self.arena.gradients *= 2


@pytest.fixture
def wrapped() -> Any:
    """(model, its average over a Twice with tiny buckets, the synchronizer), unhooked at the end."""
    paddle.seed(3)
    model, synchronizer = Branches(), Twice()
    average = GradientAverage(model, synchronizer, first_bytes=64, bucket_bytes=64)
    average.share_parameters()
    backward.listen_to_backward(average)
    yield model, average, synchronizer
    backward.forget(average)


def plain() -> Any:
    paddle.seed(3)
    return Branches()


def batch(seed: int = 0) -> Any:
    return paddle.to_tensor(np.random.default_rng(seed).random((4, 6), np.float32))


def gradients(model: Any) -> dict[str, Any]:
    return {
        n: None if p.grad is None or p.grad.data_ptr() is None else p.grad.numpy() for n, p in model.named_parameters()
    }


def test_gradients_are_the_mean_after_backward(wrapped: Any) -> None:
    model, _, synchronizer = wrapped
    reference = plain()
    for each in (model, reference):
        each(batch()).sum().backward()
    found, expected = gradients(model), gradients(reference)
    for name, value in expected.items():
        if value is None:
            assert found[name] is None
        else:
            np.testing.assert_array_equal(found[name], 2 * value)
    assert synchronizer.steps == 1


@pytest.mark.parametrize("clear", ["clear_grad", "clear_grad_false", "clear_gradients", "none_of_them"])
def test_whoever_clears_gradients_nothing_stale_is_trained_on(wrapped: Any, clear: str) -> None:
    model, _, _ = wrapped
    optimizer = paddle.optimizer.SGD(0.0, parameters=model.parameters())
    results = []
    for seed in range(3):
        loss = model(batch(seed)).sum()
        if clear == "clear_grad":
            optimizer.clear_grad()
        elif clear == "clear_grad_false":
            optimizer.clear_grad(set_to_zero=False)
        elif clear == "clear_gradients":
            model.clear_gradients()
        loss.backward()
        results.append(gradients(model)["body.weight"])
    own = []
    for seed in range(3):
        reference = plain()
        reference(batch(seed)).sum().backward()
        own.append(gradients(reference)["body.weight"])
    accumulated = 2 * (2 * (2 * own[0] + own[1]) + own[2])
    expected = accumulated if clear == "none_of_them" else 2 * own[2]
    np.testing.assert_allclose(results[2], expected, rtol=1e-6)


def test_a_gradient_cleared_between_forward_and_backward(wrapped: Any) -> None:
    model, _, _ = wrapped
    model(batch(0)).sum().backward()
    loss = model(batch(1)).sum()
    model.clear_gradients()
    loss.backward()
    reference = plain()
    reference(batch(1)).sum().backward()
    np.testing.assert_array_equal(gradients(model)["body.bias"], 2 * gradients(reference)["body.bias"])


def test_an_unused_parameter_is_not_updated(wrapped: Any) -> None:
    model, _, _ = wrapped
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters(), weight_decay=0.1)
    for seed, left in enumerate([False, True, True]):
        before = model.right.weight.numpy().copy()
        model(batch(seed), left).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        assert np.array_equal(before, model.right.weight.numpy()) == left


def test_no_sync_accumulates_and_the_next_backward_synchronises_the_sum(wrapped: Any) -> None:
    model, average, synchronizer = wrapped
    average.enabled = False
    model(batch(0)).sum().backward()
    assert synchronizer.steps == 0
    average.enabled = True
    model(batch(1)).sum().backward()
    assert synchronizer.steps == 1
    reference = plain()
    for seed in (0, 1):
        reference(batch(seed)).sum().backward()
    np.testing.assert_array_equal(gradients(model)["body.weight"], 2 * gradients(reference)["body.weight"])


def test_a_backward_of_another_model_changes_nothing(wrapped: Any) -> None:
    model, _, synchronizer = wrapped
    model(batch()).sum().backward()
    before = gradients(model)
    nn.Linear(6, 2)(batch()).sum().backward()
    assert synchronizer.steps == 1
    after = gradients(model)
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])


def test_buckets_are_marked_during_backward_last_layer_first(wrapped: Any) -> None:
    model, average, synchronizer = wrapped
    model(batch()).sum().backward()
    layout, buckets = average._arena.layout, average._arena.buckets
    order = [layout.slots_between(buckets[b].start, buckets[b].stop)[0].name for b in synchronizer.marked]
    assert order.index("left.weight") < order.index("body.weight")


def test_buckets_start_in_the_order_of_the_first_backward(wrapped: Any) -> None:
    """The heads come after the body in the arena; with its body last, a model's backward reaches that first."""
    _, average, synchronizer = wrapped
    orders: list[list[int]] = []
    synchronizer.launch_in = orders.append

    class Reversed(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(5, 3), nn.Linear(6, 5)

        def forward(self, x: Any) -> Any:
            return self.last(self.first(x))

    model = Reversed()
    other = GradientAverage(model, synchronizer, first_bytes=64, bucket_bytes=64)
    other.share_parameters()
    backward.forget(average)
    backward.listen_to_backward(other)
    try:
        for _ in range(2):
            model(batch()).sum().backward()
    finally:
        backward.forget(other)
    slots = {slot.name: slot.start for slot in synchronizer.arena.layout.slots}
    starts = [bucket.start for bucket in synchronizer.arena.buckets]
    assert len(orders) == 1
    assert sorted(orders[0]) == list(range(len(starts)))
    by_launch = [starts[bucket] for bucket in orders[0]]
    assert by_launch.index(slots["last.weight"]) < by_launch.index(slots["first.weight"])
    assert by_launch[-1] == 0  # the used-mask, known only when backward is done


def test_an_error_of_the_scheme_reaches_the_caller_of_backward_as_itself(wrapped: Any) -> None:
    model, _, synchronizer = wrapped
    synchronizer.fail_with = PeerLost("rank 1 died")
    with pytest.raises(PeerLost, match="rank 1 died"):
        model(batch()).sum().backward()


def test_freezing_a_wrapped_parameter_is_refused(wrapped: Any) -> None:
    model, _, _ = wrapped
    model.left.weight.stop_gradient = True
    with pytest.raises(UsageError, match=r"left\.weight was frozen after the model was wrapped"):
        model(batch()).sum().backward()


def test_what_cannot_be_synchronised_is_refused() -> None:
    synchronizer = LocalSynchronizer()
    with pytest.raises(UsageError, match="no trainable parameter"):
        GradientAverage(nn.ReLU(), synchronizer, first_bytes=1, bucket_bytes=1)
    with pytest.raises(UsageError, match=r"bfloat16: only float32 and float64 .*auto_cast\(level='O1'\)"):
        GradientAverage(nn.Linear(2, 2).to(dtype="bfloat16"), synchronizer, first_bytes=1, bucket_bytes=1)


def results_of(output: str) -> list[str]:
    return sorted(line[len("RESULT ") :] for line in output.splitlines() if line.startswith("RESULT "))


def launch(scheme: str, nranks: int, folder: Path, *flags: str) -> list[str]:
    """Run the program under a scheme; returns "rank digest" of every rank."""
    log = folder / scheme
    worker = [
        str(Path(__file__).parent.parent / "benchmarks" / "script_worker.py"),
        scheme,
        str(folder / "record"),
        str(PROGRAM),
    ]
    command = {
        "ps": ["-m", "ps.run", "--nranks", str(nranks), "--log-dir", str(log)],
        "collective": ["-m", "collective.run", "--nranks", str(nranks), "--log-dir", str(log)],
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
    done = subprocess.run(
        [sys.executable, *command, *worker, *flags],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    logs = "\n".join(p.read_text(errors="replace") for p in sorted(log.glob("workerlog.*")))
    assert done.returncode == 0, done.stderr + logs
    return results_of(logs)


@pytest.mark.processes
@pytest.mark.parametrize("flags", [(), ("--unused",)])
def test_two_ranks_equal_paddles_data_parallel_bit_for_bit(tmp_path: Path, flags: tuple[str, ...]) -> None:
    found = {scheme: launch(scheme, 2, tmp_path, *flags) for scheme in ("ps", "collective")}
    assert len(found["ps"]) == 2
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
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert results_of(done.stdout) == launch("ps", 1, tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "dist.DataParallel(nn.Linear(2, 2)); dist.DataParallel(nn.Linear(2, 2))",
            "a second model was given to DataParallel",
        ),
        (
            "dist.distributed_model(nn.Linear(2, 2)); other = nn.Linear(2, 2);"
            "dist.distributed_optimizer(paddle.optimizer.SGD(parameters=other.parameters()))",
            "the optimizer has no parameter of the model given to distributed_model",
        ),
        ("dist.DataParallel(nn.Linear(2, 2), group=object())", "sub-groups are not supported"),
        ("dist.DataParallel(nn.Linear(2, 2 + dist.get_rank()))", "rank . and rank . disagree"),
    ],
    ids=["two models", "another model's optimizer", "group", "different models"],
)
@pytest.mark.parametrize("scheme", ["ps", "collective"])
def test_wrong_use_is_named_on_every_rank(tmp_path: Path, scheme: str, body: str, text: str) -> None:
    program = tmp_path / "wrong.py"
    program.write_text(f"import paddle\nfrom paddle import nn\nimport {scheme} as dist\ndist.init()\n{body}\n")
    command = ["-m", f"{scheme}.run", "--nranks", "2", "--log-dir", str(tmp_path / "log"), str(program)]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 2, done.stderr
    for log in (tmp_path / "log").glob("workerlog.*"):
        lines = log.read_text().strip().splitlines()
        assert len(lines) == 1, lines
        assert re.search(text, lines[0]) or "left" in lines[0]
    assert re.search(text, done.stderr)
