"""Groups are Paddle's, and so are the signatures; arguments that cannot be are named."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle
import paddle.distributed
from paddle.base import core

from common.paddle_api.communication import COMMUNICATION, STREAM
from common.paddle_api.communication.communication import Communication
from common.paddle_api.communication.reduce_op import ReduceOp
from common.paddle_api.communication.stream import Stream
from tests.support.thread_messenger import communicating, thread_ranks


@pytest.mark.parametrize("name", sorted({*COMMUNICATION} - {"stream", "all_to_all"}))
def test_signatures_are_paddles(name: str) -> None:
    theirs = inspect.signature(getattr(paddle.distributed, name)).parameters
    ours = inspect.signature(getattr(Communication(lambda: None, lambda: False), name)).parameters  # type: ignore
    assert list(ours) == list(theirs)
    for key, parameter in theirs.items():
        assert (ours[key].default, ours[key].kind) == (parameter.default, parameter.kind), key


@pytest.mark.parametrize("name", STREAM)
def test_signatures_of_stream_are_paddles(name: str) -> None:
    theirs = inspect.signature(getattr(paddle.distributed.stream, name)).parameters
    ours = inspect.signature(getattr(Stream(None, None), name)).parameters  # type: ignore[arg-type]
    assert {key: p.default for key, p in ours.items()} == {key: p.default for key, p in theirs.items()}


def test_reductions_have_paddles_numbers() -> None:
    theirs = {key: value for key, value in vars(paddle.distributed.ReduceOp).items() if key.isupper()}
    assert {key: value for key, value in vars(ReduceOp).items() if key.isupper()} == theirs


def test_what_a_group_says_of_itself() -> None:
    def body(dist: Any) -> list[Any]:
        world, some, all_of_them = dist.get_group(), dist.new_group([3, 1]), dist.new_group()
        assert dist.get_group(some.id) is some
        assert isinstance(some, paddle.distributed.communication.group.Group)
        assert (world.id, world.nranks, world.ranks) == (0, 4, [0, 1, 2, 3])
        assert (some.ranks, some.nranks, some.name, some.id) == ([1, 3], 2, "_default_pg10", 10)
        assert all_of_them.ranks == [0, 1, 2, 3]
        assert dist.get_backend() == "GLOO"
        assert dist.is_available()
        return [world.rank, some.rank, some.world_size, some.is_member(), some.get_group_rank(3)]

    members = {1: 0, 3: 1}
    for rank, found in enumerate(communicating(4, body)):
        inside = rank in members
        assert found == [rank, members.get(rank, -1), 2 if inside else -1, inside, 1 if inside else -1]


def test_who_is_no_member_is_warned_and_nothing_happens() -> None:
    """Of a group of one nobody is a member, as in Paddle."""

    def body(dist: Any) -> None:
        rank, one, t = dist.get_group().rank, dist.new_group([2]), paddle.ones([2])
        some = dist.new_group([0, 1])
        for group in [one, some] if rank == 2 else [one]:
            name = group.name
            with pytest.warns(UserWarning, match=f"Current global rank {rank} is not in group {name}"):
                assert dist.all_reduce(t, group=group) is None
            with pytest.warns(UserWarning, match=f"Current global rank {rank} is not in group {name}"):
                assert dist.send(t, 0, group=group) is None
            with pytest.warns(UserWarning, match=f"Current global rank {rank} is not in group {name}"):
                dist.broadcast_object_list([1], 0, group=group)
            with pytest.raises(RuntimeError, match="no member of the group; only members may call it"):
                dist.all_gather([], t, group=group)
            dist.barrier(group)
            assert t.tolist() == [1, 1]
        with pytest.warns(UserWarning, match="Group 77 is not initialized"):
            assert dist.get_group(77) is None

    body_of_one_at_a_time(3, body)


def body_of_one_at_a_time(nranks: int, body: Any) -> None:
    """Warnings are caught for the whole process, so ranks take turns; they must not need each other."""
    import threading

    turn = threading.Lock()

    def alone(dist: Any) -> None:
        with turn:
            body(dist)

    communicating(nranks, alone)


def test_what_carries_a_group_has_the_calls_that_programs_make_of_it() -> None:
    def body(dist: Any) -> None:
        me = dist.get_group().rank
        some = dist.new_group([0, 2])
        tensor = paddle.to_tensor([me + 1.0])
        if me != 1:
            assert some.process_group.broadcast(tensor, 1).wait()  # the second member
            assert tensor.tolist() == [3.0]
            some.process_group.all_reduce(tensor, paddle.distributed.ReduceOp.SUM).wait()
            assert tensor.tolist() == [6.0]
            some.process_group.all_reduce(tensor, core.ReduceOp.MAX).wait()  # as Paddle's own function calls it
            assert tensor.tolist() == [6.0]
            with pytest.raises(
                AttributeError, match=r"^a group of GradSync has no 'all_gather'.*as in dist\.all_gather,"
            ):
                some.process_group.all_gather(tensor, tensor)
        dist.get_group().process_group.broadcast(tensor, 1, True).wait()
        assert tensor.tolist() == [2.0]

    communicating(3, body)


def test_a_destroyed_group_is_refused() -> None:
    def body(dist: Any) -> None:
        some = dist.new_group([0, 1])
        dist.destroy(some)
        with pytest.raises(ValueError, match="all_reduce: no such group"):
            dist.all_reduce(paddle.ones([1]), group=some)
        with pytest.raises(ValueError, match="destroy_process_group: no such group"):
            dist.destroy(some)
        assert dist.new_group([0, 1]).id == 11

    communicating(2, body)


def test_a_group_that_is_joined_anew_knows_nothing_of_the_one_before() -> None:
    ranks = thread_ranks(2)
    dist = Communication(lambda: ranks[0], lambda: False)
    before = dist.new_group([0, 1])
    dist.irecv(paddle.ones([1]), 1)
    ranks[0] = thread_ranks(2)[0]
    assert dist.new_group([0, 1]).id == 10
    with pytest.raises(ValueError, match="broadcast: no such group"):
        dist.broadcast(paddle.ones([1]), 0, group=before)
    dist._point_to_point.finish(dist.get_group(), 1)  # nothing to wait for


ONES = np.ones(3, np.float32)
WRONG = {
    "op": (lambda d, t: d.all_reduce(t, 17), r"op must be one of ReduceOp's \(got 17, expected SUM, MAX"),
    "no tensor": (lambda d, t: d.all_reduce(ONES), r"tensor must be a Tensor \(got ndarray, expected paddle.Tensor\)"),
    "dst": (lambda d, t: d.reduce(t, 2), r"dst must be a member of the group \(got 2, expected one of \[0, 1\]\)"),
    "src": (lambda d, t: d.broadcast(t, -1), r"src must be a member of the group \(got -1"),
    "self": (lambda d, t: d.send(t, d.get_group().rank), r"dst must be another member of the group \(got"),
    "list": (lambda d, t: d.all_gather([t] * 3, t), r"empty or hold a tensor for each of 2 ranks \(it holds 3\)"),
    "no list": (lambda d, t: d.all_gather(None, t), r"tensor_list must be a list \(got NoneType"),
    "short": (
        lambda d, t: d.alltoall([], [t]),
        r"in_tensor_list must hold a tensor for each rank \(got 1, expected 2\)",
    ),
    "unlike": (lambda d, t: d.reduce_scatter(t, [t, t[:2]]), r"must be like tensor \(got float32 \[2\], expected"),
    "odd": (lambda d, t: d.alltoall_single(t, t), r"must be a multiple of the number of ranks \(got shape \[3\]"),
    "sizes": (lambda d, t: d.alltoall_single(t, t, [1, 1], [1, 2]), r"got \[1, 1\], expected 2 sizes that make 3"),
    "one of each": (lambda d, t: d.stream.alltoall(t, [t, t]), r"must be both a Tensor or both a list"),
    "ranks": (lambda d, t: d.new_group([0, 2]), r"ranks must be different ones of 0..1 \(got \[0, 2\]\)"),
    "twice": (lambda d, t: d.new_group([0, 0]), r"ranks must be different ones of 0..1 \(got \[0, 0\]\)"),
    "bool": (lambda d, t: d.all_reduce(t > 0, ReduceOp.AVG), r"there is no mean of truth values"),
    "complex": (lambda d, t: d.all_reduce(t.astype("complex64"), ReduceOp.MAX), r"complex numbers have no maximum"),
    "empty": (lambda d, t: d.send_object_list([], 0), r"object_list must hold an object \(got \[\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str) -> None:
    call, words = WRONG[case]

    def body(dist: Any) -> None:
        with pytest.raises(ValueError, match=words):
            call(dist, paddle.ones([3]))

    communicating(2, body)


def test_a_stream_that_cannot_be_is_refused_as_in_paddle() -> None:
    def body(dist: Any) -> None:
        for call in (dist.stream.all_reduce, dist.stream.send):
            with pytest.raises(RuntimeError, match="use_calc_stream can only be true with sync_op"):
                call(paddle.ones([1]), sync_op=False, use_calc_stream=True)

    communicating(2, body)
