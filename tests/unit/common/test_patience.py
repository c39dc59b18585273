"""When a wait is too long, whom the error names, and when a line says whom the others wait for."""

from __future__ import annotations

import pytest

from common.network.patience import Patience

ALIVE = "it is alive, but slower than {} allows: raise that if it only computes"
FROZEN = "it gives no sign of life (--timeout): it is stopped or in a debugger, or its host is gone"


def test_who_gives_no_sign_of_life_is_named_at_the_timeout() -> None:
    patience = Patience(10.0, 100.0)
    assert patience.ends({1: 10.0, 2: 3.0}, 50.0) is None
    text = f"rank 1 did not take part in step 4 for 10 s (rank 0 was sending); {FROZEN}"
    assert str(patience.ends({1: 10.1, 2: 3.0}, 50.0, doing=" in step 4", asker="rank 0 was sending")) == text


@pytest.mark.parametrize(
    ("timeout", "wait_limit", "limit", "flag"),
    [(10.0, 100.0, 100.0, "--wait-limit"), (30.0, 20.0, 30.0, "--timeout")],
    ids=["as usual", "a timeout that is longer counts"],
)
def test_who_lives_is_named_at_the_wait_limit(timeout: float, wait_limit: float, limit: float, flag: str) -> None:
    patience = Patience(timeout, wait_limit)
    assert patience.ends({1: 0.1, 2: 0.1}, limit) is None
    text = f"rank 1, 2 did not take part for {limit:g} s; {ALIVE.format(flag)}"
    assert str(patience.ends({1: 0.1, 2: 0.1}, limit + 0.1)) == text


def test_a_line_comes_after_the_timeout_and_at_each_doubling_of_each_wait() -> None:
    patience = Patience(10.0)
    waits = [*range(1, 100), *range(1, 50)]
    said = [waited for waited in waits if patience.remark([1], [0], 12, waited)]
    assert said == [11, 21, 41, 81, 11, 21, 41]


@pytest.mark.parametrize(
    ("waiting", "late", "step", "line"),
    [
        ([1], [0], 12, "rank 1 waits for rank 0, at step 12, for 31 s; it is alive"),
        ([0, 3], [1, 2], None, "rank 0, 3 wait for rank 1, 2, for 31 s; they are alive"),
        ([0, 1, 3, 4, 5], [2], 1, "rank 0 and 4 others wait for rank 2, at step 1, for 31 s; it is alive"),
        ([], [0], 12, ""),
        ([0], [], 12, ""),
    ],
)
def test_the_line_says_who_waits_for_whom(waiting: list[int], late: list[int], step: int | None, line: str) -> None:
    assert Patience(30.0).remark(waiting, late, step, 31.2) == line


def test_signs_of_life_are_asked_for_every_tenth_of_the_timeout_and_at_least_every_3_seconds() -> None:
    for timeout, every in ((10.0, 1.0), (300.0, 3.0)):
        patience = Patience(timeout)
        asked = [tenths / 10 for tenths in range(200) if patience.asks(tenths / 10, tenths / 10)]
        assert asked[:3] == pytest.approx([every, 2 * every, 3 * every])
