"""What waits to be sent: in order, or by its place in the arena."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random

import pytest

from ps.client.outbox import Outbox
from ps.store.arrivals import Arrivals


def filled(puts: Callable[[Outbox[str]], None], *, by_place: bool) -> Iterator[str]:
    """What is sent next, and next."""
    outbox: Outbox[str] = Outbox()
    outbox.by_place = by_place
    puts(outbox)
    outbox.end()
    return iter(outbox)


def a_step(outbox: Outbox[str]) -> None:
    """As backward makes it: the last layer first; the middle one is of two pieces."""
    outbox.put(["commit"])
    outbox.put(["64"], at=64)
    outbox.put(["16", "32"], at=16)
    outbox.put(["0"], at=0)
    outbox.put(["served", "gathered"])
    outbox.put(["next 64"], at=64)
    outbox.put(["next 0"], at=0)


@pytest.mark.parametrize(
    ("by_place", "sent"),
    [
        (False, "commit, 64, 16, 32, 0, served, gathered, next 64, next 0"),
        (True, "commit, 0, 16, 32, 64, served, gathered, next 0, next 64"),
    ],
)
def test_pieces_that_wait_go_by_their_place_and_overtake_nothing_else(by_place: bool, sent: str) -> None:
    assert list(filled(a_step, by_place=by_place)) == sent.split(", ")


def test_a_piece_that_comes_later_overtakes_between_two_messages() -> None:
    outbox: Outbox[str] = Outbox()
    outbox.by_place = True
    outbox.put(["32", "48", "64"], at=32)
    messages = iter(outbox)
    assert next(messages) == "32"
    outbox.put(["0", "16"], at=0)
    assert [next(messages) for _ in range(4)] == ["0", "16", "48", "64"]
    outbox.put(iter(()), at=0)  # of nothing there is nothing to send
    outbox.end()
    assert list(messages) == []


def test_messages_are_made_only_when_they_are_sent() -> None:
    made = []

    def making() -> Iterator[str]:
        for name in "ab":
            made.append(name)
            yield name

    messages = filled(lambda outbox: outbox.put(making(), at=0), by_place=True)
    assert (next(messages), made) == ("a", ["a"])
    assert (list(messages), made) == (["b"], ["a", "b"])


@pytest.mark.parametrize("seed", range(20))
def test_arrivals_know_what_has_come_whatever_the_order(seed: int) -> None:
    random = Random(seed)
    cuts = [0, *sorted(random.sample(range(1, 40), 9)), 40]
    pieces = list(pairwise(cuts))
    random.shuffle(pieces)
    arrived, here = Arrivals(), set()
    for piece in pieces:
        arrived.add(*piece)
        here |= set(range(*piece))
        for start, stop in ((random.randrange(40), random.randrange(41)) for _ in range(30)):
            assert arrived.cover(start, stop) == (set(range(start, stop)) <= here), (start, stop, sorted(here))
    assert arrived.cover(0, 40)
    arrived.clear()
    assert not arrived.cover(0, 1)
    assert arrived.cover(7, 7)
