"""A model of how two ranks pass pieces to each other (collective/shared_memory/paired.py): whatever the order of their
steps, each reads what the other has posted for that meeting, and what follows finds the halves as after any meeting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from common.kernels.layout import PAIR_SLOTS as SLOTS

CALLS = 3
PIECES = (2, 3, 4, 9, 10)  # of a call


class Step(NamedTuple):
    """What one rank does. Piece `piece` of call `call` lies in `slot` of the half of meeting `meeting`; None: all of
    that half is written, as other calls may do first."""

    what: str
    meeting: int
    slot: int | None = None
    piece: tuple[int, int] = (0, 0)


def steps_of(pieces: int, first: int, *, slots: int = SLOTS, last_is_early: bool = False) -> list[Step]:
    """Of calls of so many pieces, the first meeting of which is number `first`."""
    steps = []
    for call in range(CALLS):
        met = first + call * pieces
        steps += [Step("post", met, None, (call, 0)), Step("arrive", met)]
        for piece in range(pieces):
            steps.append(Step("wait", met + piece))
            following = Step("arrive", met + piece + 1)
            early = piece + 2 < pieces or last_is_early
            if piece + 1 < pieces:
                steps.append(Step("post", met + piece + 1, (piece + 1) // 2 % slots, (call, piece + 1)))
                steps += [following] * early
            steps.append(Step("read", met + piece, piece // 2 % slots, (call, piece)))
            if piece + 1 < pieces and not early:
                steps.append(following)
    return steps


def held_after(steps: list[Step], slots: int) -> list[dict[tuple[int, int], tuple[int, int]]]:
    """After so many steps of a rank: which piece is in which slot of which half of its own."""
    held: list[dict[tuple[int, int], tuple[int, int]]] = [{}]
    for step in steps:
        where = () if step.what != "post" else range(slots) if step.slot is None else [step.slot]
        held.append(held[-1] | {(step.meeting % 2, slot): step.piece for slot in where})
    return held


def wrong_reads(steps: list[Step], slots: int = SLOTS) -> Iterator[tuple[Step, object]]:
    """Of two ranks that do these steps in any order: where one may be about to read, and something else is there."""
    held = held_after(steps, slots)
    arrived = [
        max([0, *(step.meeting for step in steps[:done] if step.what == "arrive")]) for done in range(len(steps) + 1)
    ]
    seen, left = {(0, 0)}, [(0, 0)]
    while left:
        mine, other = left.pop()
        for done, theirs, swapped in ((mine, other, False), (other, mine, True)):
            if done == len(steps):
                continue
            step = steps[done]
            if step.what == "wait" and arrived[theirs] < step.meeting:
                continue
            if step.what == "read" and held[theirs].get((step.meeting % 2, step.slot or 0)) != step.piece:
                yield step, held[theirs].get((step.meeting % 2, step.slot or 0))
            following = (theirs, done + 1) if swapped else (done + 1, theirs)
            if following not in seen:
                seen.add(following)
                left.append(following)


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("pieces", PIECES)
def test_whatever_the_order_each_reads_what_was_posted_for_it(pieces: int, first: int) -> None:
    assert not [*wrong_reads(steps_of(pieces, first))]


@pytest.mark.parametrize("change", [{"last_is_early": True}, {"slots": 1}])
def test_each_rule_is_needed(change: dict[str, int]) -> None:
    assert any(any(wrong_reads(steps_of(pieces, 1, **change), change.get("slots", SLOTS))) for pieces in PIECES)
