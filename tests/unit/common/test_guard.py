"""A guard names what is not finite, and knows whose business that is."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import NonFiniteGradient
from common.sync.guard import UNGUARDED, Guard
from common.tensors.arena import Arena, Layout

NAN_AT = 3


def arena() -> Arena:
    layout = Layout.of([("first", (2, 3)), ("second", (40,))]).then([("double", (5,))], "float64")
    made = Arena(layout, buckets=layout.plan(first_bytes=64, bucket_bytes=64))
    made.gradients.fill(0)
    for slot in layout.slots:
        made.gradient(slot)[...] = 1
    return made


def spoil(made: Arena, name: str, value: float) -> int:
    """Its bucket."""
    slot = next(slot for slot in made.layout.slots if slot.name == name)
    made.gradient(slot).reshape(-1)[NAN_AT:] = value
    return next(number for number, b in enumerate(made.buckets) if b.start <= slot.start < b.stop)


@pytest.mark.parametrize(("name", "count", "size"), [("first", 3, 6), ("second", 37, 40), ("double", 2, 5)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_it_names_the_parameter_and_how_much_of_it(name: str, count: int, size: int, value: float) -> None:
    made = arena()
    guard = Guard(made, 2, refuses=True)
    bucket = spoil(made, name, value)
    for number in range(len(made.buckets)):
        if number != bucket:
            assert not guard.look(number, 7)
    assert guard.look(bucket, 7)
    words = f"rank 2's gradient of parameter {name} is not finite at step 7 ({count} of {size} values are NaN or"
    assert str(guard.error()).startswith(words)


def test_large_values_are_numbers() -> None:
    made = arena()
    guard = Guard(made, 0, refuses=True)
    made.gradients[: made.layout.slots[2].start] = 3e38
    assert not any(guard.look(bucket, 0) for bucket in range(len(made.buckets)))


def test_a_warning_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    made = arena()
    guard = Guard(made, 1, refuses=False)
    assert not guard.look(spoil(made, "second", np.inf), 3)
    assert not guard.look(spoil(made, "first", np.inf), 4)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "gradsync: rank 1's gradient of parameter second is not finite at step 3 (37 of 40 values are NaN or "
        "infinite); the program goes on (--non-finite error stops it)"
    )


def test_what_others_saw_of_a_bucket_is_a_warning_too(capsys: pytest.CaptureFixture[str]) -> None:
    """It is told of a part of the bucket; the first parameter in it whose mean is not finite is named."""
    made = arena()
    guard = Guard(made, 0, refuses=False)
    assert guard.only_warns
    bucket = spoil(made, "double", np.nan)
    guard.saw(bucket, 1_500, 3, slice(2, 5))
    assert not guard.only_warns
    guard.saw(bucket, 1_501, 2, slice(2, 5))
    assert capsys.readouterr().err == (
        "gradsync: rank 3's gradient of parameter double is not finite at step 1,500; "
        "the program goes on (--non-finite error stops it)\n"
    )
    excused = Guard(made, 0, refuses=False, excused=lambda: True)
    excused.saw(bucket, 1, 3, slice(2, 5))
    assert not excused.only_warns
    assert not UNGUARDED.only_warns
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("refuses", [True, False])
def test_what_is_excused_is_nobodys_business(refuses: bool, capsys: pytest.CaptureFixture[str]) -> None:
    made, asked = arena(), []
    guard = Guard(made, 0, refuses=refuses, excused=lambda: not asked.append(1))
    assert not guard.look(0, 0)
    assert not asked
    bucket = spoil(made, "first", np.nan)
    assert not any(guard.look(bucket, step) for step in range(3))
    assert len(asked) == 1
    assert capsys.readouterr() == ("", "")


def nobody_is_asked(_: object) -> np.ndarray:
    raise AssertionError("nothing is to be compared")


def test_sums_that_overflow_are_told_as_such() -> None:
    made = arena()
    guard = Guard(made, 0, refuses=True)
    guard.compare_notes(nobody_is_asked, 4)
    bucket = spoil(made, "second", np.inf)
    made.gradient(made.layout.slots[1])[0] = np.inf
    with pytest.raises(NonFiniteGradient, match="parameter second add up to more than a number holds, at step 5"):
        guard.compare_notes(lambda mine: np.stack([mine] * 2), 5)
    guard.spoil(bucket)
    assert np.isnan(made.gradient(made.layout.slots[1])).all()


def test_of_several_reports_the_lowest_rank_is_named() -> None:
    guard = Guard(arena(), 0, refuses=True)
    with pytest.raises(NonFiniteGradient, match=r"rank 1's gradient of parameter second is not finite at step 6"):
        guard.compare_notes(lambda _: np.array([[-1, 0], [1, 4], [0, 2]]), 6, whole=False)


def test_who_does_not_refuse_compares_nothing() -> None:
    made = arena()
    spoil(made, "second", np.nan)
    Guard(made, 0, refuses=False).compare_notes(nobody_is_asked, 1, whole=False)
