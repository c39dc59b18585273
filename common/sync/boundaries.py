"""The last two step boundaries of a rank, to which its group can go back when one of its processes has died.

    what all ranks have alike   (parameters, the optimizer's state)   in each process
    what a rank has alone       (random states, BatchNorm statistics, its slice of the optimizer's state)
                                in memory that outlives it: common/commit/kept_parts.py; of several hosts also
                                on another one: copies.py

No rank ends a step to which another one has not contributed, so all stand at the same boundary or one apart: two are
enough. The survivors give the process that takes the place of the dead, or of one of a lost host, what it lacks. Where
one has made nothing yet, all begin again, in the processes that live.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.commit.kept_parts import BEGINNING, KeptParts, begins_here, kept_here
from common.commit.parts import Part, from_buffers, to_buffers
from common.errors import GradSyncError, PeerError, PeerUnreachable, RecoveryFailed, UsageError
from common.sync.copies import MOST, copies_here
from common.sync.synchronizer import Synchronizer
from common.system.next_epoch import begin_epoch, has_begun_without_this, is_mended, note_going_on, note_waiting
from common.system.process import restarts

__all__ = ["Boundaries", "Boundary", "join_first"]

NONE = -1


@dataclass(frozen=True)
class Boundary:
    """A rank's state after so many steps.

    Args:
        own: what this rank has alone.
        common: what all have alike.
    """

    step: int
    own: Part
    common: Part


class Boundaries:
    """Those of one rank; without a launcher that holds memory for it, or a group that could be joined again, none. A
    context manager.

    Args:
        wait_limit: how long to wait for the launcher's word, in seconds.
        open_kept: opens the memory that the launcher holds.
        clock, pause: by which it waits.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        wait_limit: float,
        *,
        open_kept: Callable[[], KeptParts | None] = kept_here,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._synchronizer, self._wait_limit = synchronizer, wait_limit
        self._clock, self._pause = clock, pause
        self._kept = open_kept() if synchronizer.can_rejoin else None
        self._copies = copies_here(synchronizer) if synchronizer.can_rejoin else None
        self._common: dict[int, Part] = {}
        self._made = 0  # steps, when last seen
        self._why = ""  # the group has failed

    @property
    def are_kept(self) -> bool:
        return self._kept is not None

    def __enter__(self) -> Boundaries:
        return self

    def __exit__(self, *_: object) -> None:
        if self._kept:
            self._kept.close()

    def keep(self, step: int, own: Part, common: Part) -> None:
        """After so many steps. The arrays must not change any more.

        Raises:
            PeerLost, PeerStalled: of the ranks with which this one exchanges copies; it has kept the boundary even so.
        """
        if self._kept is None:
            return
        self._common[step] = common
        for old in sorted(self._common)[:-MOST]:
            del self._common[old]
        content = to_buffers(own)
        self._kept.write(step, content)
        self._made = step
        if self._copies:
            self._copies.exchange(step, content)

    def keep_none(self) -> None:
        """This step's boundary is none to go back to; raises as `keep`. Some rank may have kept it, and wait."""
        if self._copies:
            self._copies.exchange(0, ())

    def forget(self) -> None:
        """Keep none any more: whoever dies from now on is not replaced while this rank goes on."""
        if self._kept:
            self._kept.clear()
            self._kept.close()
        self._kept, self._copies, self._common = None, None, {}

    def leave(self, error: GradSyncError) -> None:
        """Close the group that has failed so; this rank can go on in another one.

        Raises:
            GradSyncError: that error, where it cannot.
        """
        if not (self._common or (self._kept and self._kept.at_beginning)):
            raise error
        self._why = f"{type(error).__name__}: {error}"
        self._synchronizer.leave(self._why)

    def rejoin(self) -> None:
        """After `leave`, when nothing else can fail any more: let the launcher know, block until it has replaced who
        is missing, and join the group of the next epoch.

        Raises:
            RecoveryFailed: the launcher said nothing, or the group did not come together.
        """
        place = wait_for_word(
            self._synchronizer.rank, self._wait_limit, self._why, clock=self._clock, pause=self._pause
        )
        try:
            self._synchronizer.rejoin(place)
        except (PeerError, UsageError) as exc:
            raise RecoveryFailed(f"the group of epoch {restarts()} did not come together: {exc}") from exc

    def agree(self) -> Boundary | None:
        """The newest boundary that all ranks have; called by all, on a new group. None: all are at the beginning, as
        in the first one.

        Raises:
            RecoveryFailed: there is none.
        """
        if self._kept is None:
            return None
        own, begins = self._kept.steps(), self._kept.at_beginning
        if not (own or (self._copies and restarts()) or (begins and is_mended())):
            return None
        mine = [step for step in own if step in self._common] if self._common else own
        held = self._copies.steps if self._copies else []
        row = [len(self._common), *of_most(mine), *of_most(held), BEGINNING if begins else NONE]
        rows = self._synchronizer.all_gather(np.array(row, np.int64))
        found = [sorted({*row.tolist()} - {NONE}) for row in rows[:, 1 : 1 + MOST]]
        beginning = {*rows[:, -1].tolist()} == {BEGINNING}
        if not any(found):
            return None
        lacking = [rank for rank, steps in enumerate(found) if not steps and self._copies]
        for rank in lacking:
            assert self._copies
            found[rank] = sorted({*rows[self._copies.holder_of(rank), 1 + MOST : -1].tolist()} - {NONE})
        shared = set.intersection(*map(set, found))
        if beginning and not shared:
            self._kept.forget_after(BEGINNING)
            self._common = {}
            return None
        if not shared or not rows[:, 0].any():
            kept = "; ".join(f"rank {rank}: {steps}" for rank, steps in enumerate(found))
            raise RecoveryFailed(f"there is no step boundary that all ranks have ({kept})")
        step = max(shared)
        self._forget_after(step)
        if self._copies:
            if content := self._copies.hand_back(step, lacking):
                self._kept.write(step, [content])
            self._copies.exchange(step, [self._kept.read(step)])  # who holds one may have come anew
        common = self._common.get(step)
        if not rows[:, 0].all():
            common = self._given(int(np.flatnonzero(rows[:, 0])[0]), common)
        assert common
        self._common[step] = common
        return Boundary(step, from_buffers(self._kept.read(step)), common)

    def gone_back(self, step: int) -> None:
        """This rank is at that boundary again, or at the beginning, and goes on."""
        note_going_on(step, max(self._made, step))
        self._made = step

    def _forget_after(self, step: int) -> None:
        assert self._kept
        self._kept.forget_after(step)
        self._common = {kept: part for kept, part in self._common.items() if kept <= step}

    def _given(self, root: int, common: Part | None) -> Part:
        """What rank `root` has, which `common` is on ranks that have it too."""
        content = b"".join(to_buffers(common)) if common and self._synchronizer.rank == root else b""
        size = int(self._synchronizer.all_gather(np.array([len(content)], np.int64))[root, 0])
        words: npt.NDArray[np.int32] = np.zeros(-(-size // 4), np.int32)
        words.view(np.uint8)[: len(content)] = np.frombuffer(content, np.uint8)
        self._synchronizer.broadcast(words, root)
        return common or from_buffers(words.view(np.uint8)[:size].tobytes())


def join_first(
    join: Callable[[str], Synchronizer],
    rank: int,
    wait_limit: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Synchronizer:
    """In the first group that is complete; where somebody dies before it is, who lives goes on to the next.

    Args:
        join: joins the group that meets there; "": as it was started with.
        wait_limit, clock, pause: as of Boundaries.

    Raises:
        PeerError, PeerUnreachable: nobody starts the dead again.
    """
    begins, place = begins_here(), ""
    while True:
        why = "others have begun the next epoch"
        if not (begins and has_begun_without_this()):
            try:
                return join(place)
            except (PeerError, PeerUnreachable) as exc:
                if not begins:
                    raise
                why = f"{type(exc).__name__}: {exc}"
        place = wait_for_word(rank, wait_limit, why, clock=clock, pause=pause)


def wait_for_word(
    rank: int,
    wait_limit: float,
    why: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Let the launcher know that this rank's group has failed so, and block until it says where the next one meets.

    Args:
        wait_limit: in seconds.

    Raises:
        RecoveryFailed: it said nothing.
    """
    note_waiting(why)
    word = begin_epoch(f"rank {rank}", wait_limit, clock=clock, pause=pause)
    if word is None:
        raise RecoveryFailed(f"the launcher gave no word to go on within {wait_limit:g} s (--wait-limit)")
    return word.rendezvous


def of_most(steps: list[int]) -> list[int]:
    """The last MOST, and as often as there are fewer NONE."""
    return [*steps[-MOST:], *[NONE] * MOST][:MOST]
