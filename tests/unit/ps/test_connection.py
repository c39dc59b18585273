"""The door for NumPy arrays: the same bits as the collective's, whatever array and data plane, and errors by name."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

import ps
from common.errors import LayoutMismatch, PeerLost, PeerUnreachable, UsageError
from common.system.memory import aligned_empty
from common.tensors.flat_optimizer import FlatOptimizer
from ps.connection import Connection
from ps.coordinator.servicer import ParameterServer
from tests.support.groups import assert_same_bits, on_threads, outcomes_of, reduced, sample
from tests.support.pairwise import combined

STEPS = 3


@contextmanager
def serving(nranks: int, servers: int = 1) -> Iterator[Callable[..., Connection]]:
    """A function that connects a rank."""
    opened = [ParameterServer("127.0.0.1:0", nranks, shard=(index, servers)) for index in range(servers)]
    try:
        yield lambda rank, plane="auto": ps.connect([s.address for s in opened], rank, nranks, plane)
    finally:
        for server in opened:
            server.close()


def make(connection: Connection, shape: Any, shared: bool, values: Any, dtype: str = "float32") -> Any:
    array = connection.empty(shape, dtype) if shared else np.empty(shape, dtype)
    array[...] = values
    return array


def expected_parameters(nranks: int, shape: Any, steps: int) -> Any:
    """By Paddle's SGD on the mean of the ranks' gradients, summed in the canonical order."""
    size = int(np.prod(shape))
    padded = -(-size // 16) * 16
    parameters, gradients = aligned_empty(padded), aligned_empty(padded)
    parameters.fill(0)
    gradients.fill(0)
    parameters[:size] = sample(0, size, "float32", seed=50)
    optimizer = FlatOptimizer(ps.SGD(), parameters, gradients)
    for step in range(steps):
        gradients[:size] = reduced([sample(r, size, "float32", seed=step) for r in range(nranks)], "mean")
        optimizer.step(0.5 / (1 + step))
    return parameters[:size].reshape(shape)


@combined(
    "shape, members, shared, plane",
    [(7, 11), 1, 400_000, (0, 3)],
    [(1, 1), (2, 1), (3, 2)],
    [True, False],
    ["shm", "tcp", "grpc"],
)
def test_servers_update_the_parameters(shape: Any, members: tuple[int, int], shared: bool, plane: str) -> None:
    nranks, servers = members

    def body(rank: int) -> Any:
        with connect(rank, plane) as connection:
            parameters = make(connection, shape, shared, sample(rank, shape, "float32", seed=50))
            gradients = [make(connection, shape, shared, 0) for _ in range(2)]  # used in turn
            out = np.empty(shape, np.float32)
            connection.register(parameters, optimizer=ps.SGD(learning_rate=0.5))
            assert connection.data_plane == plane
            for step in range(STEPS):
                gradients[step % 2][...] = sample(rank, shape, "float32", seed=step)
                connection.push_pull(gradients[step % 2], out=out, learning_rate=0.5 / (1 + step))
                assert_same_bits(out, parameters)
            assert connection.step == STEPS
        return parameters

    with serving(nranks, servers) as connect:
        results = on_threads(nranks, body)
    for parameters in results:
        assert_same_bits(parameters, expected_parameters(nranks, shape, STEPS))


@pytest.mark.parametrize("plane", ["shm", "tcp", "grpc"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shared", [True, False])
def test_without_an_optimizer_it_is_an_all_reduce(dtype: str, shared: bool, plane: str) -> None:
    """The bits of collective.Group.all_reduce, whose expected values these are."""
    shape = (33, 5)

    def body(rank: int) -> list[Any]:
        with connect(rank, plane) as connection:
            connection.register(make(connection, shape, shared, 0, dtype))
            gradients, seen = make(connection, shape, shared, 0, dtype), []
            for step in range(STEPS):
                gradients[...] = sample(rank, shape, dtype, seed=step)
                connection.push_pull(gradients)
                seen.append(gradients.copy())
            connection.barrier()
            assert connection.all_gather(np.array([rank])).tolist() == [[0], [1], [2]]
            other = make(connection, shape, not shared, 0, dtype)
            connection.push_pull(sample(rank, shape, dtype, seed=9), out=other)
        return [*seen, other]

    with serving(3, 2) as connect:
        results = on_threads(3, body)
    for step, seed in enumerate([*range(STEPS), 9]):
        expected = reduced([sample(r, shape, dtype, seed=seed) for r in range(3)], "mean")
        for seen in results:
            assert_same_bits(seen[step], expected)


def test_servers_may_be_one_text() -> None:
    with pytest.raises(PeerUnreachable, match=r"nobody answered at 127\.0\.0\.1:1 "):
        ps.connect("127.0.0.1:1,127.0.0.1:2", 0, 1, timeout=0.3)


def test_arrays_outlive_the_connection() -> None:
    with serving(1) as connect:
        with connect(0) as connection:
            parameters = make(connection, 1000, True, 3.0)
            connection.register(parameters, ps.SGD(learning_rate=1.0))
            connection.push_pull(make(connection, 1000, True, 1.0))
        del connection
        gc.collect()
        parameters += 1
        assert np.all(parameters == 3.0)


@pytest.mark.parametrize("plane", ["shm", "tcp", "grpc"])
def test_what_lies_beside_a_part_of_an_array_is_left_alone(plane: str) -> None:
    """Parts of arrays from `empty` have no padding of their own behind them, and neighbours in their memory."""

    def body(rank: int) -> Any:
        with connect(rank, plane) as connection:
            whole = connection.empty(64)
            whole[...] = 7 + rank
            parameters, gradients = whole[:20], whole[32:52]
            parameters[...], gradients[...] = 1, 3
            connection.register(parameters, ps.SGD(learning_rate=1.0))
            for _ in range(2):
                connection.push_pull(gradients)
        return whole

    with serving(2) as connect:
        results = on_threads(2, body)
    for rank, whole in enumerate(results):
        assert whole[:20].tolist() == [-5.0] * 20
        assert whole[32:52].tolist() == [3.0] * 20
        assert np.all(whole[20:32] == 7 + rank)
        assert np.all(whole[52:] == 7 + rank)


def test_a_learning_rate_is_the_optimizers_unless_given() -> None:
    with serving(1) as connect, connect(0) as connection:
        parameters = np.zeros(4, np.float32)
        connection.register(parameters, ps.SGD(learning_rate=0.25))
        connection.push_pull(np.ones(4, np.float32))
        assert parameters.tolist() == [-0.25] * 4
        connection.push(np.ones(4, np.float32))
        connection.pull(learning_rate=0.5)
        assert parameters.tolist() == [-0.75] * 4


ones = np.ones((2, 3), np.float32)
WRONG: dict[str, tuple[Callable[[Connection], object], type[Exception], str]] = {
    "float16": (lambda c: c.register(ones.astype("float16")), TypeError, r"parameters must be float32 or float64.*f2"),
    "float64 with an optimizer": (
        lambda c: c.register(ones.astype("float64"), ps.SGD()),
        TypeError,
        r"parameters must be float32 \(got <f8\)",
    ),
    "a list": (lambda c: c.register([1.0]), TypeError, r"parameters must be a numpy.ndarray \(got list\)"),  # type: ignore[arg-type]
    "not contiguous": (lambda c: c.register(ones.T), ValueError, "parameters must be contiguous and writable"),
    "push first": (lambda c: c.push(ones), UsageError, r"call register\(parameters, optimizer\) first"),
    "another shape": (
        lambda c: (c.register(ones), c.push(np.ones(6, np.float32))),
        ValueError,
        r"gradients must have the parameters' shape \(2, 3\) \(got \(6,\)\)",
    ),
    "registered twice": (lambda c: (c.register(ones), c.register(ones)), UsageError, "one connection synchronises one"),
    "pull first": (lambda c: (c.register(ones, ps.SGD()), c.pull()), UsageError, r"call push\(gradients\) first"),
    "pushed twice": (lambda c: (c.register(ones), c.push(ones), c.push(ones)), UsageError, r"call pull\(\) before"),
    "nowhere to go": (lambda c: (c.register(ones), c.push(ones), c.pull()), UsageError, r"pull needs an array"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_use_is_named(name: str) -> None:
    call, kind, text = WRONG[name]
    with serving(1) as connect, connect(0) as connection, pytest.raises(kind, match=text):
        call(connection)


def test_trainers_that_differ_are_named() -> None:
    def body(rank: int) -> None:
        with connect(rank) as connection:
            connection.register(np.zeros(4 + rank, np.float32))

    with serving(2) as connect:
        errors = [outcome.error for outcome in outcomes_of(2, body)]
    assert all(
        isinstance(e, LayoutMismatch) and "parameters [4] against parameters [5]" in str(e) for e in errors
    ) or all(isinstance(e, LayoutMismatch) and "parameters [5] against parameters [4]" in str(e) for e in errors), (
        errors
    )


def test_one_that_fails_tells_the_others_why() -> None:
    def body(rank: int) -> None:
        with connect(rank) as connection:
            connection.register(np.zeros(4, np.float32))
            if rank:
                raise ValueError("boom")
            connection.push_pull(np.zeros(4, np.float32))

    with serving(2) as connect:
        first, second = (outcome.error for outcome in outcomes_of(2, body))
    assert isinstance(second, ValueError)
    assert isinstance(first, PeerLost)
    assert "rank 1 left at step 0 with ValueError: boom" in str(first)
