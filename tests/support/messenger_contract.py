"""What every Messenger promises, as checks to be run over each implementation with `make(rank, nranks)`, nranks >= 2.

    @pytest.mark.parametrize("check", CHECKS, ids=name_of)
    def test_messenger(check, make, nranks):
        check(make, nranks)

`make` is that of the synchronizers' contract; the messengers are their `messenger`.
"""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import PeerLost
from common.sync.messenger import Messenger
from common.sync.synchronizer import Synchronizer
from common.tensors.optimizers import SGD
from tests.support.synchronizer_contract import name_of
from tests.support.synchronizer_steps import (
    BUCKETS,
    RATES,
    Check,
    Make,
    after_sgd,
    assert_all_equal,
    errors_of,
    new_arena,
    one_step,
    run,
)

__all__ = ["CHECKS", "Check", "name_of"]

MIB = 1 << 20
LARGE = 3_000_001
LAST_CHANNEL = 2**32 - 1


def content(sender: int, receiver: int, number: int, size: int) -> bytes:
    """What differs by who sends what to whom, and by byte."""
    return np.random.default_rng([sender, receiver, number]).bytes(size)


def others(messenger: Messenger) -> list[int]:
    """All other ranks, from the next one on."""
    return [(messenger.rank + distance) % messenger.nranks for distance in range(1, messenger.nranks)]


def check_it_says_who_it_is(make: Make, nranks: int) -> None:
    seen = run(make, nranks, lambda s: (s.messenger.rank, s.messenger.nranks))
    assert seen == [(rank, nranks) for rank in range(nranks)]


def check_messages_arrive_in_order_and_whole(make: Make, nranks: int) -> None:
    """Of none, one and many bytes, and of about as many as one piece of a message may have; from each to the next."""
    sizes = [0, 1, 17, 0, 4097, MIB - 1, MIB, MIB + 1, 0, 3]

    def body(synchronizer: Synchronizer) -> list[bytearray]:
        messenger = synchronizer.messenger
        to, source = (messenger.rank + 1) % nranks, (messenger.rank - 1) % nranks
        for number, size in enumerate(sizes):
            messenger.send(to, 7, content(messenger.rank, to, number, size))
        return [messenger.receive(source, 7) for _ in sizes]

    for rank, received in enumerate(run(make, nranks, body)):
        assert [type(message) for message in received] == [bytearray] * len(sizes)
        for number, (message, size) in enumerate(zip(received, sizes, strict=True)):
            assert message == content((rank - 1) % nranks, rank, number, size), number


def check_channels_do_not_mix(make: Make, nranks: int) -> None:
    """They are received in another order than sent, the last message of one before the first of another."""
    channels = [0, 5, LAST_CHANNEL, 1]

    def body(synchronizer: Synchronizer) -> dict[int, list[bytearray]]:
        messenger = synchronizer.messenger
        to, source = (messenger.rank + 1) % nranks, (messenger.rank - 1) % nranks
        for number in range(3):
            for index, channel in enumerate(channels):
                messenger.send(to, channel, content(messenger.rank, to, 10 * index + number, 1000 * index + number))
        return {channel: [messenger.receive(source, channel) for _ in range(3)] for channel in reversed(channels)}

    for rank, received in enumerate(run(make, nranks, body)):
        for index, channel in enumerate(channels):
            source = (rank - 1) % nranks
            right = [content(source, rank, 10 * index + number, 1000 * index + number) for number in range(3)]
            assert received[channel] == right


def check_all_send_what_is_large_at_once(make: Make, nranks: int) -> None:
    """Each to each other, before anybody receives."""

    def body(synchronizer: Synchronizer) -> dict[int, bytearray]:
        messenger = synchronizer.messenger
        for to in others(messenger):
            messenger.send(to, 0, content(messenger.rank, to, 0, LARGE))
        return {source: messenger.receive(source, 0) for source in others(messenger)}

    for rank, received in enumerate(run(make, nranks, body)):
        assert sorted(received) == sorted({*range(nranks)} - {rank})
        for source, message in received.items():
            assert message == content(source, rank, 0, LARGE)


def check_it_says_whether_a_message_comes(make: Make, nranks: int) -> None:
    """Each time it is sent only when it was looked for in vain."""

    def body(synchronizer: Synchronizer) -> list[bool]:
        messenger = synchronizer.messenger
        to, source = (messenger.rank + 1) % nranks, (messenger.rank - 1) % nranks
        before = messenger.comes(source, 4, 0.05)
        synchronizer.all_gather(np.zeros(1))
        messenger.send(to, 3, b"other")
        messenger.send(to, 4, b"this")
        there = messenger.comes(source, 4, 10.0)
        assert messenger.receive(source, 4) == b"this"
        after = [messenger.comes(source, 4, 0.0), messenger.comes(source, 3, 10.0)]
        synchronizer.all_gather(np.zeros(1))
        return [before, there, *after]

    assert run(make, nranks, body) == nranks * [[False, True, False, True]]


def check_many_small_messages_wait_to_be_asked_for(make: Make, nranks: int) -> None:
    count = 200

    def body(synchronizer: Synchronizer) -> None:
        messenger = synchronizer.messenger
        for number in range(count):
            for to in others(messenger):
                messenger.send(to, number % 3, b"%d %d %d" % (messenger.rank, to, number))
        for number in range(count):
            for source in others(messenger):
                assert messenger.receive(source, number % 3) == b"%d %d %d" % (source, messenger.rank, number)

    run(make, nranks, body)


def check_an_answer_may_follow_a_question(make: Make, nranks: int) -> None:
    """Who waits for a message has not asked for it in vain when it comes later; back and forth between 0 and 1."""

    def body(synchronizer: Synchronizer) -> bytes:
        messenger, token = synchronizer.messenger, b""
        for turn in range(50):
            if messenger.rank == turn % 2:
                messenger.send(1 - messenger.rank, 0, token + bytes([turn]))
            elif messenger.rank == 1 - turn % 2:
                token = bytes(messenger.receive(1 - messenger.rank, 0))
        return token

    assert run(make, nranks, body)[:2] == [bytes(range(50)), bytes(range(49))]


def check_what_was_sent_may_be_changed(make: Make, nranks: int) -> None:
    """As soon as `send` has returned; and bytes of any kind may be sent, as wide as their items may be."""
    whole = np.arange(500_003, dtype=np.float32)

    def body(synchronizer: Synchronizer) -> list[bytearray]:
        messenger = synchronizer.messenger
        to, source = (messenger.rank + 1) % nranks, (messenger.rank - 1) % nranks
        array, short = whole + np.float32(messenger.rank), bytearray(b"short")
        messenger.send(to, 0, memoryview(array))
        messenger.send(to, 0, short)
        array.fill(np.nan)
        short[:] = b"SHORT"
        return [messenger.receive(source, 0) for _ in range(2)]

    for rank, (array, short) in enumerate(run(make, nranks, body)):
        assert array == (whole + np.float32((rank - 1) % nranks)).tobytes()
        assert short == b"short"


def check_messages_between_steps_change_no_bits(make: Make, nranks: int) -> None:
    """Before `attach`, and before and after each step; and they do not disturb a gather."""

    def body(synchronizer: Synchronizer) -> np.ndarray:
        messenger = synchronizer.messenger
        to, source = (messenger.rank + 1) % nranks, (messenger.rank - 1) % nranks
        messenger.send(to, 1, b"before")
        arena = new_arena(synchronizer)
        synchronizer.attach(arena, SGD())
        for step, rate in enumerate(RATES):
            messenger.send(to, 2, content(messenger.rank, to, step, 100_003))
            one_step(synchronizer, arena, step, rate, range(BUCKETS))
            assert messenger.receive(source, 2) == content(source, messenger.rank, step, 100_003)
            assert synchronizer.all_gather(np.array([messenger.rank, step])).tolist() == [
                [rank, step] for rank in range(nranks)
            ]
        assert messenger.receive(source, 1) == b"before"
        return arena.parameters.copy()

    assert_all_equal(run(make, nranks, body), after_sgd(nranks, RATES))


def check_there_must_be_such_another_rank(make: Make, nranks: int) -> None:
    def body(synchronizer: Synchronizer) -> None:
        messenger = synchronizer.messenger
        for nobody in (-1, nranks, messenger.rank):
            with pytest.raises(ValueError, match=rf"\(got to={nobody}\)"):
                messenger.send(nobody, 0, b"")
            with pytest.raises(ValueError, match=rf"\(got source={nobody}\)"):
                messenger.receive(nobody, 0)

    run(make, nranks, body)


def check_a_rank_that_raises_is_named_to_who_waits_for_its_message(make: Make, nranks: int) -> None:
    """With its reason; the others wait for another one, which waits for it."""

    def body(synchronizer: Synchronizer) -> None:
        messenger = synchronizer.messenger
        if messenger.rank == nranks - 1:
            raise ValueError("boom")
        messenger.receive(messenger.rank + 1, 0)

    *waited, culprit = errors_of(make, nranks, body)
    assert type(culprit) is ValueError
    for error in waited:
        assert type(error) is PeerLost
        assert "ValueError: boom" in str(error)
    assert f"rank {nranks - 1} left" in str(waited[-1])


def check_what_was_sent_before_leaving_arrives_and_no_more(make: Make, nranks: int) -> None:
    """A rank that has left in good order is named to who waits for its next message."""

    def body(synchronizer: Synchronizer) -> None:
        messenger = synchronizer.messenger
        if messenger.rank == 0:
            messenger.send(1, 0, content(0, 1, 0, LARGE))
        elif messenger.rank == 1:
            assert messenger.receive(0, 0) == content(0, 1, 0, LARGE)
            messenger.receive(0, 0)

    first, waited, *rest = errors_of(make, nranks, body)
    assert (first, rest) == (None, [None] * (nranks - 2))
    assert type(waited) is PeerLost
    assert "rank 0" in str(waited)


CHECKS: list[Check] = [
    check_it_says_who_it_is,
    check_messages_arrive_in_order_and_whole,
    check_channels_do_not_mix,
    check_it_says_whether_a_message_comes,
    check_all_send_what_is_large_at_once,
    check_many_small_messages_wait_to_be_asked_for,
    check_an_answer_may_follow_a_question,
    check_what_was_sent_may_be_changed,
    check_messages_between_steps_change_no_bits,
    check_there_must_be_such_another_rank,
    check_a_rank_that_raises_is_named_to_who_waits_for_its_message,
    check_what_was_sent_before_leaving_arrives_and_no_more,
]
