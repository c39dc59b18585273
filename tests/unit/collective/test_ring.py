"""The ring's schedule against tables written out by hand, what makes it right for any number of ranks, and the
messages that it sends."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from collective import call_tags
from collective.algorithms.ring import RingAlgorithm
from collective.algorithms.schedule import all_gather_steps, pipeline, reduce_scatter_steps
from collective.call_tags import OPERATIONS, Tag
from collective.transports.threads import connect_threads
from common.errors import PeerLost
from common.tensors.canonical_order import canonical_ranks
from common.tensors.reduction import Reduction
from tests.support.groups import on_threads

# [nranks][rank] -> (chunk sent, chunk received) at each step
REDUCE_SCATTER = {
    1: [[]],
    2: [[(1, 0)], [(0, 1)]],
    3: [
        [(2, 1), (1, 0)],
        [(0, 2), (2, 1)],
        [(1, 0), (0, 2)],
    ],
    4: [
        [(3, 2), (2, 1), (1, 0)],
        [(0, 3), (3, 2), (2, 1)],
        [(1, 0), (0, 3), (3, 2)],
        [(2, 1), (1, 0), (0, 3)],
    ],
    5: [
        [(4, 3), (3, 2), (2, 1), (1, 0)],
        [(0, 4), (4, 3), (3, 2), (2, 1)],
        [(1, 0), (0, 4), (4, 3), (3, 2)],
        [(2, 1), (1, 0), (0, 4), (4, 3)],
        [(3, 2), (2, 1), (1, 0), (0, 4)],
    ],
}
ALL_GATHER = {
    1: [[]],
    2: [[(0, 1)], [(1, 0)]],
    3: [
        [(0, 2), (2, 1)],
        [(1, 0), (0, 2)],
        [(2, 1), (1, 0)],
    ],
    4: [
        [(0, 3), (3, 2), (2, 1)],
        [(1, 0), (0, 3), (3, 2)],
        [(2, 1), (1, 0), (0, 3)],
        [(3, 2), (2, 1), (1, 0)],
    ],
    5: [
        [(0, 4), (4, 3), (3, 2), (2, 1)],
        [(1, 0), (0, 4), (4, 3), (3, 2)],
        [(2, 1), (1, 0), (0, 4), (4, 3)],
        [(3, 2), (2, 1), (1, 0), (0, 4)],
        [(4, 3), (3, 2), (2, 1), (1, 0)],
    ],
}
PHASES = [reduce_scatter_steps, all_gather_steps]
NRANKS = range(1, 18)


def table_of(phase, nranks):
    return [list(phase(rank, nranks)) for rank in range(nranks)]


@pytest.mark.parametrize("nranks", REDUCE_SCATTER)
def test_reduce_scatter_follows_the_table(nranks):
    assert table_of(reduce_scatter_steps, nranks) == REDUCE_SCATTER[nranks]


@pytest.mark.parametrize("nranks", ALL_GATHER)
def test_all_gather_follows_the_table(nranks):
    assert table_of(all_gather_steps, nranks) == ALL_GATHER[nranks]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("nranks", NRANKS)
def test_what_a_rank_receives_is_what_its_left_neighbour_sends(phase, nranks):
    table = table_of(phase, nranks)
    for rank in range(nranks):
        left = table[(rank - 1) % nranks]
        assert [receive for _, receive in table[rank]] == [send for send, _ in left]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("nranks", NRANKS)
def test_every_rank_sends_all_chunks_but_one_and_receives_all_but_one(phase, nranks):
    for steps in table_of(phase, nranks):
        assert len(steps) == nranks - 1
        for column in (0, 1):
            assert len({step[column] for step in steps}) == nranks - 1


@pytest.mark.parametrize("nranks", NRANKS)
def test_reduce_scatter_visits_the_ranks_in_the_canonical_order(nranks):
    table = table_of(reduce_scatter_steps, nranks)
    for chunk in range(nranks):
        senders = [r for step in range(nranks - 1) for r in range(nranks) if table[r][step][0] == chunk]
        assert (*senders, chunk) == canonical_ranks(chunk, nranks)


@pytest.mark.parametrize("nranks", NRANKS)
def test_a_chunk_is_sent_on_only_after_it_was_received(nranks):
    """In reduce-scatter a rank starts with its own copy; in all-gather with the one chunk that it completed."""
    for rank in range(nranks):
        scatter, gather = list(reduce_scatter_steps(rank, nranks)), list(all_gather_steps(rank, nranks))
        assert [send for send, _ in scatter[1:]] == [receive for _, receive in scatter[:-1]]
        assert [send for send, _ in gather] == [rank, *(receive for _, receive in gather)][:-1]
        assert not scatter or scatter[-1][1] == rank


def test_the_pipeline_of_three_steps_and_four_pieces():
    assert list(pipeline(3, 4)) == [
        [(0, 0)],
        [(0, 1), (1, 0)],
        [(0, 2), (1, 1), (2, 0)],
        [(0, 3), (1, 2), (2, 1)],
        [(1, 3), (2, 2)],
        [(2, 3)],
    ]


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_the_pipeline_takes_every_piece_through_every_step_in_order(steps, pieces):
    ticks = [tick for tick in pipeline(steps, pieces) if tick]
    at = {pair: i for i, tick in enumerate(ticks) for pair in tick}
    assert sum(map(len, ticks)) == len(at) == steps * pieces
    assert all(at[step + 1, piece] > at[step, piece] for step, piece in at if step + 1 < steps)


LABEL = (3, 5, 7)
PIECE = 16  # elements
MAX = Reduction.of("max", np.dtype(np.float32), 3)
REDUCED, FLOATS = OPERATIONS * MAX.number, OPERATIONS * np.dtype(np.float32).num
CALLS = {  # and the phases of its messages
    "all_reduce": (
        lambda ring, flat: ring.all_reduce(flat, MAX, LABEL),
        [call_tags.ALL_REDUCE + REDUCED, call_tags.GATHERING + REDUCED],
    ),
    "reduce_scatter": (lambda ring, flat: ring.reduce_scatter(flat, MAX, LABEL), [call_tags.REDUCE_SCATTER + REDUCED]),
    "all_gather": (lambda ring, flat: ring.all_gather(flat.reshape(3, -1), LABEL), [call_tags.ALL_GATHER + FLOATS]),
    "gather_chunks": (lambda ring, flat: ring.gather_chunks(flat, LABEL), [call_tags.GATHER_CHUNKS + FLOATS]),
}


def tags_sent(call, count):
    """The tags, as they arrive, of what rank 1 of 3 sends."""
    transports = connect_threads(3)
    for transport in transports:
        transport.piece_bytes = PIECE * 4
    with patch.object(transports[1], "send", wraps=transports[1].send) as send:
        on_threads(3, lambda rank: call(RingAlgorithm(transports[rank]), np.zeros(count, np.float32)))
    sent = [each.args for each in send.call_args_list]
    assert all(array.size == PIECE for _, array, _ in sent)
    return [Tag.unpack(tag.pack()) for _, _, tag in sent]


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_every_piece_is_sent_once_and_says_what_it_is(name, pieces):
    call, phases = CALLS[name]
    expected = [Tag(*LABEL, phase, step, k) for phase in phases for step in (0, 1) for k in range(pieces)]
    assert sorted(tags_sent(call, 3 * PIECE * pieces)) == sorted(expected)


def test_a_broadcast_is_sent_piece_by_piece_and_says_whose_it_is():
    found = tags_sent(lambda ring, flat: ring.broadcast(flat, 1, LABEL), 3 * PIECE)
    assert found == [Tag(*LABEL, call_tags.BROADCAST + FLOATS, 1, number) for number in range(3)]


def test_who_leaves_without_a_reason_has_not_failed():
    here, gone = map(RingAlgorithm, connect_threads(2))
    gone.close()
    with pytest.raises(PeerLost, match=r"^rank 1 finished while rank 0 still needed it$"):
        here.broadcast(np.zeros(3), 1, LABEL)
