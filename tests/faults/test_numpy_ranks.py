"""Ranks with NumPy alone, without a launcher, whose fates are judged to the second: killed, frozen, behind links that
are cut for a while or for good, both ways or one, and behind those that lose packets, bring them twice, late, or with a
bit of them flipped. What is promised of each: benchmarks/faults/cases.py."""

from __future__ import annotations

import pytest

from benchmarks.faults.cases import CASES, Case

SCHEME = {"ps": "ps", "ring": "collective"}


def cases(*rows: int) -> pytest.MarkDecorator:
    found = [
        pytest.param(
            case,
            id=f"{SCHEME[case.scheme]}-{case.backend}-{case.name.replace('-', ' ')}",
            marks=[pytest.mark.skip(reason=case.why_not_here)] if case.why_not_here else [],
        )
        for case in CASES
        if case.row in rows
    ]
    return pytest.mark.parametrize("case", found)


@cases(1, 2)
def test_who_is_killed_is_named_within_a_second(case: Case) -> None:
    assert max(case.run()) < 1.0


@cases(4)
def test_who_is_frozen_is_named_within_the_timeout_and_a_second(case: Case) -> None:
    case.run()


@cases(5)
def test_a_link_is_cut(case: Case) -> None:
    case.run()


@cases(6)
def test_a_link_is_bad(case: Case) -> None:
    case.run()


@cases(7)
def test_a_message_does_not_come_as_it_was_sent(case: Case) -> None:
    case.run()


@cases(8)
def test_bits_flip_between_hosts(case: Case) -> None:
    case.run()
