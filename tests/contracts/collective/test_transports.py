"""What every transport promises, checked on all of them with two and three ranks."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest

from collective.call_tags import Tag
from collective.transports.base import PIECE_BYTES
from common.errors import PeerLost, PeerStalled, ProtocolError, StaleEpoch
from tests.support.groups import (
    DEADLINE_S,
    RINGS,
    assert_same_bits,
    errors_on,
    limit_waits,
    on_ranks,
    opened,
    sample,
    transport_of,
)

FULL = PIECE_BYTES // 4  # float32 elements of the largest message
SIZES = (0, 1, 2, 15, 16, 17, 101, FULL - 1, FULL)  # N-1 is 1 or 2
DTYPES = ("bool", "int8", "uint8", "float16", "int32", "float32", "int64", "float64")
LIMIT_S = 0.3


@dataclass(frozen=True)
class Ring:
    """The groups of all ranks; `transport` is what is tested here."""

    groups: list
    nranks: int
    backend: str


@pytest.fixture(params=[2, 3], ids="N{}".format)
def nranks(request):
    return request.param


@pytest.fixture(params=RINGS)
def ring(request, nranks):
    with opened(request.param, nranks) as groups:
        yield Ring(groups, nranks, request.param)


def tag(piece=0, *, epoch=7, step=3, bucket=2, phase=1, chunk=4):
    return Tag(epoch, step, bucket, phase, chunk, piece)


def left_of(transport):
    return (transport.rank - 1) % transport.nranks


def send_on(transport, array, its_tag):
    """To the right neighbour."""
    transport.send((transport.rank + 1) % transport.nranks, array, its_tag)


def take(transport, like, its_tag):
    """What the left neighbour sent."""
    out = np.empty_like(like)
    transport.receive(left_of(transport), out, its_tag)
    return out


def private(transport, values):
    return values


def shared(transport, values):
    """The same values in memory that `send` can pass on without a copy."""
    array = transport.empty(values.size, values.dtype)
    array[...] = values
    return array


kinds = pytest.mark.parametrize("kind", [private, shared])


def nothing(transport):
    pass


def one_way(ring, send, receive):
    """Rank 0 runs `send`, rank 1 `receive`, the others nothing."""

    def body(group):
        role = {0: send, 1: receive}.get(group.rank, nothing)
        return role(transport_of(group))

    return on_ranks(ring.groups, body)


def errors(ring, *roles):
    """What each rank raised; rank r runs roles[r], ranks without one nothing."""

    def body(group):
        if group.rank < len(roles):
            roles[group.rank](transport_of(group))

    return errors_on(ring.groups, body)


def test_a_tag_survives_packing():
    extremes = Tag(2**32 - 1, 2**64 - 1, 2**32 - 1, 2**16 - 1, 2**16 - 1, 2**32 - 1)
    assert [Tag.unpack(t.pack()) for t in (tag(5), extremes)] == [tag(5), extremes]
    assert len(tag().pack()) == 24


@kinds
def test_messages_arrive_in_order_with_what_was_sent(ring, kind):
    def body(group):
        transport = transport_of(group)
        for k, size in enumerate(SIZES):
            send_on(transport, kind(transport, sample(group.rank, size, "float32", seed=k)), tag(k))
        for k, size in enumerate(SIZES):
            out = np.full(size, np.nan, np.float32)
            transport.receive(left_of(transport), out, tag(k))
            assert_same_bits(out, sample(left_of(transport), size, "float32", seed=k))
        transport.flush()

    on_ranks(ring.groups, body)


@kinds
def test_every_dtype_arrives_whole(ring, kind):
    def values(rank, dtype):
        return sample(rank, 8 * 1001, "uint8")[: 1001 * np.dtype(dtype).itemsize].view(dtype)

    def body(group):
        transport = transport_of(group)
        for k, dtype in enumerate(DTYPES):
            send_on(transport, kind(transport, values(group.rank, dtype)), tag(k))
            assert_same_bits(take(transport, np.empty(1001, dtype), tag(k)), values(left_of(transport), dtype))
        transport.flush()

    on_ranks(ring.groups, body)


def test_a_slice_in_the_middle_of_shared_memory_arrives(ring):
    def body(group):
        transport = transport_of(group)
        array = shared(transport, sample(group.rank, 1000, "float32"))
        send_on(transport, array[17:617], tag(0))
        send_on(transport, array[999:], tag(1))
        assert_same_bits(take(transport, array[:600], tag(0)), sample(left_of(transport), 1000, "float32")[17:617])
        assert_same_bits(take(transport, array[:1], tag(1)), sample(left_of(transport), 1000, "float32")[999:])
        transport.flush()

    on_ranks(ring.groups, body)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64"])
def test_empty_makes_a_flat_array_on_a_cache_line(ring, dtype):
    for count in (0, 1, 17, 100_003):
        array = transport_of(ring.groups[0]).empty(count, dtype)
        array.fill(1)
        assert (array.shape, array.dtype) == ((count,), dtype)
        assert count == 0 or array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous


@kinds
def test_many_messages_may_be_under_way(ring, kind):
    count = 49

    def send(transport):
        whole = kind(transport, sample(0, 101 * count, "float32"))
        for k in range(count):
            send_on(transport, whole[101 * k : 101 * (k + 1)], tag(k))
        transport.flush()

    def receive(transport):
        out = np.empty(101 * count, np.float32)
        for k in range(count):
            transport.receive(left_of(transport), out[101 * k : 101 * (k + 1)], tag(k))
        transport.flush()
        return out

    assert_same_bits(one_way(ring, send, receive)[1], sample(0, 101 * count, "float32"))


@kinds
@pytest.mark.parametrize("count", [3, 64], ids="{}messages".format)
def test_after_flush_the_sender_may_overwrite(ring, kind, count):
    """The receiver starts late, so that a flush which does not wait lets the sender spoil what is under way."""
    overwritten = threading.Event()

    def send(transport):
        whole = kind(transport, np.arange(FULL * count, dtype=np.float32))
        for k in range(count):
            send_on(transport, whole[FULL * k : FULL * (k + 1)], tag(k))
        transport.flush()
        whole.fill(np.nan)
        overwritten.set()

    def receive(transport):
        out = np.empty(FULL * count, np.float32)
        overwritten.wait(0.05)  # set by then only where flush need not wait for the receiver
        for k in range(count):
            transport.receive(left_of(transport), out[FULL * k : FULL * (k + 1)], tag(k))
        transport.flush()
        return out

    assert_same_bits(one_way(ring, send, receive)[1], np.arange(FULL * count, dtype=np.float32))


@pytest.mark.parametrize("field", ["step", "bucket", "phase", "chunk", "piece"])
def test_a_message_of_another_step_or_place_is_refused(ring, field):
    wrong = tag()._replace(**{field: 9})
    got = errors(
        ring,
        lambda transport: send_on(transport, np.ones(5), wrong),
        lambda transport: take(transport, np.ones(5), tag()),
    )
    assert type(got[1]) is ProtocolError
    place = f"rank 0 sent chunk {wrong.chunk}, piece {wrong.piece} in phase {wrong.phase} of {tag()}, expected chunk"
    call = f"rank 0 called {wrong}, this rank {tag()}; all ranks must make the same calls"
    assert str(got[1]).startswith(place if field in ("chunk", "piece") else call)


@pytest.mark.parametrize("epoch", [6, 8])
def test_a_message_of_another_epoch_is_refused(ring, epoch):
    got = errors(
        ring,
        lambda transport: send_on(transport, np.ones(5), tag(epoch=epoch)),
        lambda transport: take(transport, np.ones(5), tag()),
    )
    assert type(got[1]) is StaleEpoch
    assert str(got[1]) == f"rank 0 sent a message of epoch {epoch}, this is epoch 7"


@pytest.mark.parametrize(("sent", "expected"), [(16, 17), (17, 16), (0, 1), (1, 0)])
def test_a_message_of_another_size_is_refused(ring, sent, expected):
    got = errors(
        ring,
        lambda transport: send_on(transport, np.ones(sent, np.float32), tag()),
        lambda transport: take(transport, np.ones(expected, np.float32), tag()),
    )
    assert type(got[1]) is ProtocolError
    sizes = f"rank 0 has {4 * sent} bytes where this rank has {4 * expected}, in {tag()}"
    assert str(got[1]) == f"{sizes}; arrays must be of equal size and dtype on all ranks"


def receives(transport):
    take(transport, np.ones(5), tag())


def test_a_rank_that_does_not_take_part_is_named_by_all_others(ring):
    """The others all wait for their left neighbour, which with three ranks is for one of them not the absent one."""
    absent = 1
    limit_waits(ring.groups, LIMIT_S)
    others_gave_up = threading.Barrier(ring.nranks)

    def body(group):
        if group.rank != absent:
            try:
                receives(transport_of(group))
            finally:
                others_gave_up.wait(DEADLINE_S)
        else:
            others_gave_up.wait(DEADLINE_S)

    got = errors_on(ring.groups, body)
    for rank in set(range(ring.nranks)) - {absent}:
        blamed = left_of(transport_of(ring.groups[rank])) if ring.backend == "memory" else absent
        assert type(got[rank]) is PeerStalled
        assert str(got[rank]).startswith(f"rank {blamed} did not take part for {LIMIT_S} s")


def test_a_neighbour_that_takes_nothing_is_named(ring):
    """64 full messages are more than any transport has room for."""
    limit_waits(ring.groups, LIMIT_S)
    gave_up = threading.Event()

    def send(transport):
        try:
            for k in range(64):
                send_on(transport, shared(transport, np.ones(FULL, np.float32)), tag(k))
            transport.flush()
        finally:
            gave_up.set()

    def take_nothing(transport):
        gave_up.wait(DEADLINE_S)

    got = errors(ring, send, take_nothing)
    assert type(got[0]) is PeerStalled
    assert str(got[0]).startswith(f"rank 1 did not take part for {LIMIT_S} s")


def test_a_rank_that_leaves_with_a_reason_is_named_with_it_by_all_others(ring):
    """The others stay in the group until all have noticed, so that each learns it by itself."""
    leaver, others = ring.nranks - 1, threading.Barrier(ring.nranks - 1)

    def body(group):
        if group.rank == leaver:
            return group.close("ValueError: boom")
        with pytest.raises(PeerLost) as caught:
            receives(transport_of(group))
        others.wait(DEADLINE_S)
        return str(caught.value)

    expected = f"rank {leaver} left with ValueError: boom"
    assert on_ranks(ring.groups, body) == [*[expected] * leaver, None]


def test_a_rank_that_finished_while_it_is_needed_is_named(ring):
    got = errors(ring, nothing, receives)
    assert type(got[1]) is PeerLost
    assert str(got[1]).startswith("rank 0 finished while rank 1")


@kinds
def test_what_was_sent_before_leaving_in_good_order_still_arrives(ring, kind):
    def send(transport):
        for k in range(3):
            send_on(transport, kind(transport, sample(0, 101, "float32", seed=k)), tag(k))
        transport.flush()
        transport.close()

    def receive(transport):
        for k in range(3):
            assert_same_bits(take(transport, np.empty(101, np.float32), tag(k)), sample(0, 101, "float32", seed=k))
        take(transport, np.empty(101, np.float32), tag(3))

    got = errors(ring, send, receive)
    assert got[0] is None
    assert type(got[1]) is PeerLost


def test_close_is_idempotent_and_silent(ring):
    for group in ring.groups:
        for reason in ("", "ValueError: too late", ""):
            transport_of(group).close(reason)


def test_the_first_reason_counts(ring):
    ring.groups[0].close("ValueError: first")
    ring.groups[0].close("ValueError: second")
    with pytest.raises(PeerLost, match="rank 0 left with ValueError: first"):
        receives(transport_of(ring.groups[1]))


def test_every_rank_reaches_every_other(ring):
    def body(group):
        transport, others = transport_of(group), {*range(ring.nranks)} - {group.rank}
        for rank in others:
            transport.send(rank, sample(group.rank, 101, "float32", seed=rank), tag(chunk=rank))
        for rank in others:
            out = np.empty(101, np.float32)
            transport.receive(rank, out, tag(chunk=group.rank))
            assert_same_bits(out, sample(rank, 101, "float32", seed=group.rank))
        transport.flush()

    on_ranks(ring.groups, body)
