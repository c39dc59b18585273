"""Buckets start in one order whatever the order in which they become final, beside backward or after it."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.sync.overlap import BucketRunner, LaunchOrder

LIMIT_S = 20.0
ORDERS = st.integers(0, 12).flatmap(lambda count: st.permutations(range(count)))


@pytest.fixture(params=[True, False], ids=["overlap", "after"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize(
    ("told", "started"),
    [
        ([0, 1, 2, 3], [[0], [1], [2], [3]]),
        ([3, 2, 1, 0], [[], [], [], [0, 1, 2, 3]]),
        ([1, 0, 3, 2], [[], [0, 1], [], [2, 3]]),
        ([2, 0, 1, 3], [[], [0], [1, 2], [3]]),
    ],
)
def test_launch_table(told: list[int], started: list[list[int]]) -> None:
    order = LaunchOrder(4)
    assert [list(order.mark(bucket)) for bucket in told] == started
    assert list(order.rest()) == []


@given(ORDERS)
def test_each_bucket_starts_once_in_order_as_soon_as_it_may(told: list[int]) -> None:
    order = LaunchOrder(len(told))
    started: list[int] = []
    for i, bucket in enumerate(told):
        started += order.mark(bucket)
        final = set(told[: i + 1])
        assert started == list(range(next(b for b in range(len(told) + 1) if b not in final)))
    assert list(order.rest()) == []


@given(ORDERS, st.data())
def test_the_rest_is_what_had_not_started(told: list[int], data: st.DataObject) -> None:
    order = LaunchOrder(len(told))
    started: list[int] = []
    for bucket in told[: data.draw(st.integers(0, len(told)))]:
        started += order.mark(bucket)
    started += order.rest()
    assert started == list(range(len(told)))
    assert list(order.rest()) == []


@given(ORDERS)
def test_a_reset_begins_a_new_step(told: list[int]) -> None:
    order = LaunchOrder(len(told))
    for bucket in told[::2]:
        order.mark(bucket)
    order.reset()
    assert [b for bucket in told for b in order.mark(bucket)] == list(range(len(told)))


@given(ORDERS, st.data())
def test_another_order_is_followed_from_the_next_step_on(told: list[int], data: st.DataObject) -> None:
    order = LaunchOrder(len(told))
    wanted = data.draw(st.permutations(range(len(told))))
    order.follow(wanted)
    for _ in range(2):
        started: list[int] = []
        for i, bucket in enumerate(told):
            started += order.mark(bucket)
            assert set(started) <= set(told[: i + 1])
        assert started == wanted
        order.reset()


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 3]])
def test_an_order_must_name_every_bucket_once(order: list[int]) -> None:
    with pytest.raises(ValueError, match=r"order must name each of 3 buckets once \(got \["):
        LaunchOrder(3).follow(order)


def test_work_follows_the_order(overlap: bool) -> None:
    done: list[int] = []
    runner = BucketRunner(3, done.append, overlap=overlap)
    runner.order.follow([2, 0, 1])
    for _ in range(2):
        for bucket in (1, 0, 2):
            runner.mark_ready(bucket)
        runner.finish()
    assert done == [2, 0, 1, 2, 0, 1]
    runner.close()


@pytest.mark.parametrize("bucket", [-1, 3, 100])
def test_a_bucket_that_does_not_exist(bucket: int) -> None:
    with pytest.raises(ValueError, match=rf"bucket must be in 0\.\.2 \(got {bucket}\)"):
        LaunchOrder(3).mark(bucket)


def test_twice_marked_is_an_error_until_the_next_step(overlap: bool) -> None:
    runner = BucketRunner(3, lambda bucket: None, overlap=overlap)
    runner.mark_ready(1)
    with pytest.raises(ValueError, match="bucket 1 was marked ready twice in one step"):
        runner.mark_ready(1)
    runner.finish()
    runner.mark_ready(1)
    runner.finish()
    runner.close()


@given(ORDERS, st.integers(0, 12), st.booleans())
def test_the_work_is_the_same_with_overlap_and_without(told: list[int], marked: int, overlap: bool) -> None:
    done: list[int] = []
    runner = BucketRunner(len(told), done.append, overlap=overlap)
    for step in (1, 2):
        for bucket in told[:marked]:
            runner.mark_ready(bucket)
        runner.finish()
        assert done == step * list(range(len(told)))
    runner.close()


def test_work_begins_before_finish_on_another_thread() -> None:
    begun, threads = threading.Event(), []

    def work(bucket: int) -> None:
        threads.append(threading.current_thread())
        begun.set()

    runner = BucketRunner(2, work)
    runner.mark_ready(0)
    assert begun.wait(LIMIT_S)
    runner.finish()
    runner.close()
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()


def test_without_overlap_all_is_done_in_finish_by_the_caller() -> None:
    threads = []
    runner = BucketRunner(2, lambda bucket: threads.append(threading.current_thread()), overlap=False)
    runner.mark_ready(0)
    assert threads == []
    runner.finish()
    assert threads == [threading.current_thread()] * 2
    runner.close()


def test_finish_waits_for_the_work_under_way() -> None:
    let_go, done = threading.Event(), []

    def work(bucket: int) -> None:
        assert let_go.wait(LIMIT_S)
        done.append(bucket)

    runner = BucketRunner(2, work)
    runner.mark_ready(0)
    threading.Thread(target=let_go.set).start()
    runner.finish()
    assert done == [0, 1]
    runner.close()


def test_the_first_error_is_raised_and_the_rest_skipped(overlap: bool) -> None:
    begun: list[int] = []
    errors = {2: ConnectionError("the first"), 3: ValueError("the second")}

    def work(bucket: int) -> None:
        begun.append(bucket)
        if bucket in errors:
            raise errors[bucket]

    runner = BucketRunner(5, work, overlap=overlap)
    for bucket in (4, 3, 1, 0):
        runner.mark_ready(bucket)
    with pytest.raises(ConnectionError) as caught:
        runner.finish()
    assert caught.value is errors[2]
    assert begun == [0, 1, 2]
    with pytest.raises(ConnectionError, match="the first"):  # a broken group stays broken
        runner.finish()
    assert begun == [0, 1, 2]
    runner.close()


def test_an_exit_inside_the_work_does_not_hang_finish(overlap: bool) -> None:
    def work(bucket: int) -> None:
        raise SystemExit(7)

    runner = BucketRunner(1, work, overlap=overlap)
    with pytest.raises(SystemExit):
        runner.finish()
    runner.close()


def test_close_ends_the_thread_once_the_work_under_way_is_done() -> None:
    begun, let_go, done = threading.Event(), threading.Event(), []

    def work(bucket: int) -> None:
        begun.set()
        assert let_go.wait(LIMIT_S)
        done.append(threading.current_thread())

    runner = BucketRunner(1, work)
    runner.mark_ready(0)
    assert begun.wait(LIMIT_S)
    threading.Thread(target=let_go.set).start()
    runner.close()
    assert len(done) == 1
    assert not done[0].is_alive()
    runner.close()


def test_no_bucket_at_all(overlap: bool) -> None:
    runner = BucketRunner(0, lambda bucket: pytest.fail("called"), overlap=overlap)
    runner.finish()
    with pytest.raises(ValueError, match="bucket must be in"):
        runner.mark_ready(0)
    runner.close()
