"""The interval of a median, in which that of another such run lies as often as is said; and which of two is lower."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.stats.interval import Measured, are_paired, chance, in_words, interval, measured


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 12])
def test_with_few_values_it_is_from_the_least_to_the_greatest(n: int) -> None:
    values = [3.0 * i**2 for i in range(n)]
    assert interval(values[::-1]) == [values[0], values[-1]]


@pytest.mark.parametrize("n", [13, 15, 21, 40])
def test_it_is_the_narrowest_that_holds_the_median_of_as_many_further_values(n: int) -> None:
    low, high = interval([*range(n)])
    assert low > 0
    assert low + high == n - 1
    drawn = np.random.default_rng(n).random((2, 40_000, n))
    ordered, middle = np.sort(drawn[0], axis=1), np.sort(drawn[1], axis=1)[:, (n - 1) // 2]
    below, narrower = ((middle < ordered[:, int(k)]).mean() for k in (low, low + 1))
    assert 2 * below < 0.052
    assert 2 * narrower > 0.048


@pytest.mark.parametrize(("n", "share"), [(3, 0.6), (5, 0.833), (7, 0.930)])
def test_how_often_few_values_hold_it(n: int, share: float) -> None:
    """Of all orders in which two runs of n can come, as docs/benchmarks.md tells."""
    inside = total = 0
    for mine in itertools.combinations(range(2 * n), n):
        theirs = sorted(set(range(2 * n)) - set(mine))
        low, high = interval(mine)
        inside += low < theirs[n // 2] < high
        total += 1
    assert inside / total == pytest.approx(share, abs=5e-4)


def test_what_was_measured_once_has_no_interval() -> None:
    assert in_words([1.0, 2.5], "{:.1f}".format) == "1.0–2.5"
    assert in_words([2.0, 2.0], "{:.1f}".format) == "?"


# ---- which of two is the lower ----------------------------------------------------------------------------------

DRIFT = (1.0, 2.0, 1.5, 3.0, 1.2, 2.5, 1.8)  # of a machine whose speed varies by three while it measures


def rounds_of(*values: float) -> Measured:
    return Measured(float(np.median(values)), *interval(values), values)


def test_what_is_a_little_lower_in_every_round_is_lower_however_the_machine_drifts() -> None:
    one, other = rounds_of(*DRIFT), rounds_of(*(1.05 * each for each in DRIFT))
    assert (one.against(other), other.against(one), one.against(one)) == (-1, 1, 0)
    assert one.against(other, same_rounds=False) == 0  # their intervals overlap


def test_a_lead_of_less_than_a_hundredth_is_none() -> None:
    one = rounds_of(*DRIFT)
    assert one.against(rounds_of(*(1.009 * each for each in DRIFT))) == 0
    assert one.against(rounds_of(*(1.011 * each for each in DRIFT))) == -1


def test_one_of_seven_rounds_the_other_way_and_it_is_noise() -> None:
    other = [1.05 * each for each in DRIFT]
    other[3] = 0.9 * DRIFT[3]
    assert rounds_of(*DRIFT).against(rounds_of(*other)) == 0
    other[3] = DRIFT[3]  # nor are equals counted for either
    assert rounds_of(*DRIFT).against(rounds_of(*other)) == 0


def test_a_median_the_other_way_and_it_is_noise() -> None:
    one = rounds_of(*range(1, 6), 6.5, *range(7, 13))
    other = rounds_of(*(each + 0.1 for each in range(1, 6)), 6.0, *(each + 0.1 for each in range(7, 13)))  # 11 of 12
    assert one.against(other) == other.against(one) == 0


@pytest.mark.parametrize("other", [DRIFT[:6], ()])
def test_without_seven_rounds_in_common_intervals_decide(other: tuple[float, ...]) -> None:
    one = Measured(1.5, 1, 3, DRIFT[: len(other)] or DRIFT)
    assert not are_paired(one, Measured(1.5, 1, 3, other))
    assert one.against(Measured(1.6, 1.1, 3.1, other)) == 0
    assert one.against(Measured(3.2, 3.1, 3.3, other)) == -1
    assert Measured(3.2, 3.1, 3.3, other).against(one) == 1


@pytest.mark.parametrize("count", range(7, 13))
def test_equals_look_apart_as_often_as_is_said(count: int) -> None:
    """Of all ways in which one can be ahead, round by round; too many for chance are never needed."""
    level = rounds_of(*([1.0] * count))
    ways = [tuple(1.0 + 0.1 * sign for sign in signs) for signs in itertools.product((-1, 1), repeat=count)]
    apart = [level.against(rounds_of(*way)) for way in ways]
    assert sum(map(abs, apart)) / len(ways) == pytest.approx(chance(count, paired=True))
    assert sum(apart) == 0
    assert chance(count, paired=True) <= 0.02


def test_with_few_rounds_equals_look_apart_as_often_as_is_said() -> None:
    for count in (2, 3, 4, 5):
        orders = list(itertools.combinations(range(2 * count), count))
        apart = sum(mine[-1] < count or mine[0] >= count for mine in orders)
        assert apart / len(orders) == pytest.approx(chance(count, paired=False))


def test_a_file_may_hold_no_single_rounds() -> None:
    record = {"step_ms": 2.0, "step_ms_interval": [1.0, 3.0]}
    assert measured(record, "step_ms") == Measured(2.0, 1.0, 3.0)
    assert measured({**record, "step_ms_rounds": [1.0, 2.0, 3.0]}, "step_ms").rounds == (1.0, 2.0, 3.0)
