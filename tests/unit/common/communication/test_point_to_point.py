"""From one rank to another: in order, deferred where Paddle defers, and refused where tensors differ."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle

from common.errors import PeerLost, ProtocolError
from common.paddle_api.communication import point_to_point
from tests.support.groups import DEADLINE_S
from tests.support.thread_messenger import ThreadMessenger, communicating, errors_communicating


def filled(value: float, size: int = 3) -> Any:
    return paddle.full([size], value)


def test_tensors_arrive_in_the_order_sent() -> None:
    def body(dist: Any) -> list[float]:
        if dist.get_group(0).rank == 0:
            for value in (1.0, 2.0, 3.0):
                dist.send(filled(value), dst=2)
            return []
        if dist.get_group(0).rank == 1:
            return []
        got = [filled(0) for _ in range(3)]
        for t in got:
            dist.recv(t, src=0)
        return [float(t[2]) for t in got]

    assert communicating(3, body) == [[], [], [1.0, 2.0, 3.0]]


def test_irecv_is_carried_out_by_whatever_is_received_after_it() -> None:
    def body(dist: Any) -> list[Any]:
        if dist.get_group(0).rank == 0:
            for value in (1.0, 2.0, 3.0, 4.0):
                task = dist.isend(filled(value), 1)
                assert (task.is_completed(), task.is_sync(), task.wait(5)) == (True, True, True)
            dist.send_object_list(["five"], 1)
            return []
        one, two, three, four = (filled(0) for _ in range(4))
        ops = [dist.P2POp(dist.irecv, tensor, 0) for tensor in (one, two)]
        first, second = dist.batch_isend_irecv(ops)
        assert one.tolist() == [0, 0, 0]  # not yet
        dist.recv(three, 0)
        fourth = dist.irecv(four, 0)
        objects = [None]
        dist.recv_object_list(objects, 0)
        done = [task.wait() for task in (fourth, second, first)]
        return [float(t[0]) for t in (one, two, three, four)] + objects + done

    assert communicating(2, body)[1] == [1.0, 2.0, 3.0, 4.0, "five", True, True, True]


@pytest.mark.parametrize("how", ["irecv", "recv"])
def test_what_comes_soon_is_there_when_irecv_returns(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over Gloo, whose programs may forget to wait."""
    comes, asked = ThreadMessenger.comes, threading.Event()

    def told(self: ThreadMessenger, *given: Any) -> bool:
        asked.set()
        return comes(self, *given)

    monkeypatch.setattr(ThreadMessenger, "comes", told)
    monkeypatch.setattr(point_to_point, "SOON_S", DEADLINE_S)

    def body(dist: Any) -> Any:
        got = filled(0)
        if dist.get_group(0).rank == 0:
            assert asked.wait(DEADLINE_S)
            dist.isend(filled(7), 1)
            return None
        dist.irecv(got, 0) if how == "irecv" else dist.recv(got, 0, sync_op=False)
        return got.tolist()

    assert communicating(2, body)[1] == [7.0] * 3


def test_ranks_that_ask_before_they_send_wait_for_each_other_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(point_to_point, "SOON_S", 0.1)
    comes, came = ThreadMessenger.comes, dict[int, list[bool]]()

    def noted(self: ThreadMessenger, *given: Any) -> bool:
        came.setdefault(self.rank, []).append(comes(self, *given))
        return came[self.rank][-1]

    monkeypatch.setattr(ThreadMessenger, "comes", noted)

    def body(dist: Any) -> None:
        peer = 1 - dist.get_group(0).rank
        for step in range(3):
            got = filled(0)
            task = dist.irecv(got, peer)
            dist.send(filled(step), peer)
            task.wait()
            assert got.tolist() == [step] * 3

    communicating(2, body)
    assert [False] in came.values()  # whoever asked first
    assert all(all(looks[:-1]) for looks in came.values())


@pytest.mark.parametrize("how", ["wait", "is_completed", "synchronize", "dist.wait"])
def test_a_task_is_done_when_it_was_waited_for(how: str) -> None:
    def body(dist: Any) -> Any:
        mine, other = filled(dist.get_group(0).rank + 1.0), filled(0)
        peer = 1 - dist.get_group(0).rank
        task = dist.irecv(other, peer)
        dist.isend(mine, peer)
        dist.wait(other) if how == "dist.wait" else getattr(task, how)()
        return other.tolist()

    assert communicating(2, body) == [[2.0] * 3, [1.0] * 3]


def test_what_all_members_do_does_not_mix_with_what_two_do() -> None:
    def body(dist: Any) -> Any:
        rank, got, everyone = dist.get_group(0).rank, filled(0), []
        if rank == 0:
            dist.isend(filled(7), 1)
        task = dist.irecv(got, 0) if rank == 1 else None
        dist.all_gather_object(everyone, rank)
        dist.barrier()
        total = filled(1)
        dist.all_reduce(total)
        if task:
            task.wait()
        return got.tolist()[0], everyone, total.tolist()[0]

    assert communicating(2, body) == [(0, [0, 1], 2), (7, [0, 1], 2)]


def test_a_batch_around_a_ring() -> None:
    def body(dist: Any) -> list[int]:
        rank, got = dist.get_group(0).rank, paddle.zeros([2], "int64")
        ops = [
            dist.P2POp(dist.irecv, got, (rank - 1) % 3),
            dist.P2POp(dist.isend, paddle.full([2], rank, "int64"), (rank + 1) % 3),
        ]
        for task in dist.batch_isend_irecv(ops):
            task.wait()
        with pytest.raises(RuntimeError, match=r"op must be paddle\.distributed\.isend or"):
            dist.P2POp(dist.send, got, 0)
        with pytest.raises(RuntimeError, match=r"expected a list of some P2POp \(got tuple\)"):
            dist.batch_isend_irecv(())
        return got.tolist()

    assert communicating(3, body) == [[2, 2], [0, 0], [1, 1]]


def test_groups_have_ways_of_their_own_and_count_ranks_as_the_world_does() -> None:
    def body(dist: Any) -> list[float]:
        rank, some = dist.get_group(0).rank, dist.new_group([1, 3])
        if rank == 1:
            dist.send(filled(5), 3)
            dist.send(filled(6), 3, group=some)
        got, other = filled(0), filled(0)
        if rank == 3:
            dist.recv(got, 1, group=some)
            dist.recv(other, 1)
        return [float(got[0]), float(other[0])]

    assert communicating(4, body)[3] == [6.0, 5.0]


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (lambda: paddle.zeros([4]), r"rank 0 made send of float32 \[3\], this rank send of float32 \[4\]"),
        (lambda: paddle.zeros([3], "int32"), r"rank 0 made send of float32 \[3\], this rank send of int32 \[3\]"),
    ],
)
def test_another_tensor_than_was_sent_is_refused(mine: Any, words: str) -> None:
    def body(dist: Any) -> None:
        if dist.get_group(0).rank == 0:
            dist.send(filled(1), 1)
        else:
            dist.recv(mine(), 0)

    error = errors_communicating(2, body)[1]
    assert type(error) is ProtocolError
    with pytest.raises(ProtocolError, match=words):
        raise error


def test_dimensions_of_one_do_not_matter() -> None:
    def body(dist: Any) -> Any:
        if dist.get_group(0).rank == 0:
            return dist.send(paddle.to_tensor(7.0), 1).wait()
        got = paddle.zeros([1, 1])
        dist.recv(got, 0)
        return got.tolist()

    assert communicating(2, body) == [True, [[7.0]]]


CALLS = {
    "all_reduce": lambda dist, t: dist.all_reduce(t),
    "all_reduce min": lambda dist, t: dist.all_reduce(t, 2),
    "all_gather": lambda dist, t: dist.all_gather([], t),
    "broadcast": lambda dist, t: dist.broadcast(t, 0),
    "reduce": lambda dist, t: dist.reduce(t, 1),
    "alltoall": lambda dist, t: dist.alltoall([], [t, t]),
    "reduce_scatter": lambda dist, t: dist.reduce_scatter(t, [t, t]),
}


@pytest.mark.parametrize("other", [np.zeros((3, 4), np.float32), np.zeros(6, np.float64), np.zeros((2, 3), np.float32)])
@pytest.mark.parametrize("call", CALLS)
def test_ranks_whose_tensors_differ_are_told_so(call: str, other: np.ndarray) -> None:
    """Of another size, dtype or shape than [6] of float32 ([2, 3]: of as many elements)."""

    def body(dist: Any) -> None:
        mine = np.zeros(6, np.float32) if dist.get_group(0).rank == 0 else other
        CALLS[call](dist, paddle.to_tensor(mine))
        dist.barrier()

    found = [type(error) for error in errors_communicating(2, body)]
    assert ProtocolError in found
    assert {*found} <= {ProtocolError, PeerLost}


def test_ranks_whose_calls_differ_are_told_so() -> None:
    def body(dist: Any) -> None:
        some = dist.new_group([0, 1] if dist.get_group(0).rank else [0, 1, 2])
        t = paddle.zeros([2])
        if dist.get_group(0).rank < 2:
            dist.broadcast(t, 0, group=some)

    error = errors_communicating(3, body)[1]
    assert type(error) is ProtocolError
    assert "rank 0 made broadcast on a group of other ranks than this rank" in str(error)
