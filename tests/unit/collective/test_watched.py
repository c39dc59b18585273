"""Values that are not finite are noticed while a large array is averaged, or just before."""

from __future__ import annotations

import numpy as np
import pytest

from collective.algorithm import Watch
from collective.shared_memory.in_place import IN_ONE_CALL
from collective.synchronizer import RingSynchronizer
from common.sync.guard import Guard
from common.tensors.arena import Arena, Layout
from tests.support.groups import assert_same_bits, on_ranks, opened, reduced, sample

SIZE = (IN_ONE_CALL >> 2) + 5_000
AT = SIZE - 1  # in the last rank's chunk


class Notes(Watch):
    """What it is told, and the array at that time."""

    def __init__(self, array):
        self.array, self.before, self.seen = array, None, []

    def look(self):
        self.before = self.array.copy()

    def saw(self, rank, elements):
        self.seen.append((rank, elements.start <= AT < elements.stop, not np.isfinite(self.array[elements]).all()))


def values_of(rank):
    values = sample(rank, SIZE, "float32").copy()
    values[AT] = np.inf if rank == 0 else 1
    return values


def watched(groups, is_shared):
    """(what each was told, the mean)."""

    def body(group):
        array = group.empty(SIZE) if is_shared(group.rank) else np.empty(SIZE, np.float32)
        for _ in range(2):
            array[...] = values_of(group.rank)
            notes = Notes(array)
            group.all_reduce(array, watch=notes)
        return notes, array.copy()

    return on_ranks(groups, body)


@pytest.mark.parametrize("nranks", [2, 3])
def test_arrays_of_the_groups_memory_are_watched_by_who_adds_them(nranks):
    with opened("shm", nranks) as groups:
        found = watched(groups, lambda _: True)
    mean = reduced([values_of(rank) for rank in range(nranks)], "mean")
    for rank, (notes, array) in enumerate(found):
        assert_same_bits(array, mean)
        assert notes.before is None
        assert notes.seen == ([(0, True, True)] if rank == nranks - 1 else [])


@pytest.mark.parametrize(
    ("backend", "nranks", "is_shared"),
    [
        ("shm", 2, lambda rank: rank == 0),
        ("shm", 3, lambda rank: rank > 0),
        ("shm", 2, lambda _: False),
        ("tcp", 2, lambda _: True),
    ],
    ids=["one of two elsewhere", "one of three elsewhere", "all elsewhere", "tcp"],
)
def test_others_are_looked_at_before_they_change(backend, nranks, is_shared):
    with opened(backend, nranks) as groups:
        found = watched(groups, is_shared)
    mean = reduced([values_of(rank) for rank in range(nranks)], "mean")
    for rank, (notes, array) in enumerate(found):
        assert_same_bits(array, mean)
        assert_same_bits(notes.before, values_of(rank))
        assert notes.seen == []


def test_a_guard_that_only_warns_names_rank_and_parameter(capsys):
    layout = Layout.of([("first", (SIZE,)), ("second", (7,)), ("third", (SIZE,))])

    def body(group):
        synchronizer = RingSynchronizer(group)
        arena = Arena(layout, buckets=layout.plan(), empty=synchronizer.empty)
        arena.parameters.fill(0)
        synchronizer.guard = Guard(arena, group.rank, refuses=False)
        synchronizer.attach(arena, None)
        for step in range(3):
            arena.gradients.fill(1)
            if (step, group.rank) == (1, 1):
                arena.gradient(layout.slots[2])[0] = np.nan
            for bucket in range(len(arena.buckets)):
                synchronizer.mark_ready(bucket)
            synchronizer.finish(0.0)
        synchronizer._thread.close()

    with opened("shm", 2) as groups:
        on_ranks(groups, body)
    assert capsys.readouterr().err == (
        "gradsync: rank 1's gradient of parameter third is not finite at step 1; "
        "the program goes on (--non-finite error stops it)\n"
    )
