"""The ring's schedule against tables written out by hand, and what makes it right for any number of ranks."""

from __future__ import annotations

import pytest

from collective.algorithms.schedule import all_gather_steps, pipeline, reduce_scatter_steps
from common.tensors.canonical_order import canonical_ranks

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
