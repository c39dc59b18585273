"""Replaces ranks and servers that have died or stalled, while the others keep their processes and roll back in memory.

    some have died, the others wait  ->  the dead are started again  ->  these join  ->  all are given the word  ->  on

Where ranks meet at servers, these come first: those that live are given the word at once, those that have died are
started again; when all of them listen, the dead ranks are.

What the others do meanwhile: common/system/next_epoch.py. Who dies or freezes before it has joined is started once
more. Where this does not work, all are started again (restarts.py): somebody has kept no step boundary yet, or cannot
go on, or another one dies before all go on again, or a launcher.

Of several hosts the first one's launcher decides; those of the others do as it says (following.py). If one is lost, the
others' launchers meet again with that of the host that takes its place (hosts.py), which starts all its ranks. Only if
their copies (common/sync/copies.py) are there, and only while all train; else all are started again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from common.commit.kept_parts import HOLDS
from common.credentials.derived import SECRET_BYTES
from common.errors import PeerError
from common.launch.child import MISSING, Child, ProcessFailed
from common.launch.crew import Crew, CrewHere, lost
from common.launch.hosts import Place
from common.launch.job import Job
from common.launch.ranks import abstract_address
from common.launch.servers import Servers
from common.system.next_epoch import Word, word_in

__all__ = ["Replacing"]

LOOK_S = 0.1  # between two looks at what ranks have noted, while none has died
DYING_S = 0.5  # from the end of a killed process's connections until it is seen to have died
JOINING_S = 1.5  # that who is not in a complete group yet has to hear that another one has died


@dataclass
class Replacing:
    """Of a job on this host, or of one whose first host this is.

    Args:
        start: starts a rank of this host that meets the others at that place, or at servers with these addresses.
        patience: seconds for which who takes another's place may be frozen before it joins.
        wait_limit: seconds within which all must have noticed that one has died; who has not is replaced too. So is who
            is frozen then; one that only computes may take long. At least `patience`.
        servers: at which the ranks meet; None: they meet by themselves.
        others: the ranks of other hosts.
        place: where ranks meet by themselves; "": at one of this host's, each time a new one.
        hosts: this one's place among them; None: there is no other.
        first: where ranks meet at first, or the servers' addresses: who is killed before their group is complete is
            started again while the others wait there. "": then all are.
    """

    job: Job
    start: Callable[[int, str], None]
    patience: float
    servers: Servers | None = None
    others: Sequence[Crew] = ()
    place: str = ""
    hosts: Place | None = None
    first: str = ""
    wait_limit: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _noticed_at: float | None = None  # that something is wrong; None: nothing is
    _stalled: list[str] = field(default_factory=list)  # names of those that were killed for it
    _replaced: Sequence[str] | None = None  # names of those that were started again; None: nothing is mended now
    _word: Word | None = None  # for the others, once those have joined
    _frozen_at: dict[str, float] = field(default_factory=dict)  # since when those are that have not
    _gave_up: bool = False
    _cut_short: bool = False  # nobody can tell who was started again
    _looked_at: float = 0.0
    _told_of_the_busy: bool = False
    _failed_again_at: float | None = None  # since when some wait once more while others are started

    def __post_init__(self) -> None:
        self._here = CrewHere(self.job, self.start, self.first, self.clock)
        self._crews: list[Crew] = [self._here, *self.others]
        life = self.job.life
        if life.is_mended:  # within it the last launcher died
            word = word_in(self.job.word_file)
            self._cut_short = word is None or word.epoch < life.number or not word.rendezvous
            self._replaced, self._noticed_at = (), self.clock()

    def look(self) -> bool:
        """Whether the job is being mended, so that whoever failed is not to be told of.

        Raises:
            ProcessFailed: a rank has stalled, and it is not; or it was, until the launcher before this one died.
            RecoveryFailed: no restart is left.
        """
        if self._cut_short:
            raise ProcessFailed("the launcher died while it started others again", PeerError.exit_code, joined=True)
        for crew in self._crews:
            crew.hear()
        ranks = [rank for crew in self._crews for rank in crew.children]
        dead = any(rank.code for rank in ranks)
        if self._gave_up:
            return self._here.leave(self._noticed_at)
        if any(crew.gave_up for crew in self.others):
            return self._give_up()
        calm = self._noticed_at is None and not (dead or (self.others and self._here.is_over))
        if calm and self.clock() < self._looked_at + LOOK_S:
            return False
        self._looked_at = self.clock()
        waiting = [rank for rank in ranks if rank.code is None and rank.waits_for() > self.job.life.number]
        wrong = self._replaced is not None or dead or bool(waiting)
        if self._noticed_at is None and not waiting and self._others_live() and self._here.start_over():
            return True
        if (gone := self._who_is_gone()) and (wrong or not self._here.has_met):
            if self.hosts is None or self._replaced is not None or not self._here.has_met:
                return self._give_up(gone)
            for crew in self.others:
                if crew.gone:
                    crew.bury()
        if not wrong:
            return bool(self.others) and self._here.is_over and self._waits_for_others()
        if self._replaced is not None:
            return self._go_on(ranks, waiting)
        if self._noticed_at is None:
            self._noticed_at = self.clock()
        return self._gather(ranks, waiting)

    def _others_live(self) -> bool:
        return self._replaced is None and all(rank.code is None for crew in self.others for rank in crew.children)

    def _waits_for_others(self) -> bool:
        """Whether ranks of other hosts have not ended yet: if one fails now, all begin anew."""
        left = [crew for crew in self.others if not crew.is_over]
        if any(crew.gone for crew in left):
            return self._give_up(self._who_is_gone())
        if left:
            return True
        for crew in self.others:
            crew.dismiss()
        return False

    def _who_is_gone(self) -> str:
        return next((gone for crew in self.others if (gone := crew.gone)), "")

    def _gather(self, ranks: Sequence[Child], waiting: Sequence[Child]) -> bool:
        """Wait until all that live have noticed, and replace the others."""
        assert self._noticed_at is not None
        if any(rank.code == 0 or not self._has_left(rank, crew) for crew in self._crews for rank in crew.children):
            is_dying = not any(rank.code for rank in ranks) and self.clock() < self._noticed_at + DYING_S
            return is_dying or self._give_up()
        if any(rank.name.startswith("rank") and (rank.code or 0) > 0 and not rank.is_in_group() for rank in ranks):
            return self._give_up()  # by an error of its own
        early = [rank for rank in ranks if is_on_its_way(rank) and not rank.is_frozen()]
        missing = [rank for rank in ranks if rank.code is None and rank not in [*waiting, *early]]
        awaited = self.clock() - self._noticed_at
        for rank in missing:
            if rank.is_frozen() or awaited > self._patience_with(rank):
                self._stalled.append(rank.name)
                self._kill(rank)
        if missing and awaited > self.patience and not self._told_of_the_busy:
            self._told_of_the_busy = True
            self.job.life.say(f"{who_of(missing)} busy; the others wait for as long as --wait-limit says")
        if missing:
            return True
        self._told_of_the_busy = False
        failure = self._failure(ranks, waiting)
        dead = [rank for rank in ranks if rank.code is not None]
        if not any(rank.name.startswith("rank") for rank in [*waiting, *early]):
            return self._give_up()  # what all ranks have alike is gone with them
        return self._replace(failure, [rank.name for rank in dead], early)

    def _has_left(self, rank: Child, crew: Crew) -> bool:
        """Whether who takes its place finds what it had alone, with its launcher or with a rank of another host."""
        holds = f"{HOLDS} {rank.name.removeprefix('rank ')}"
        living = (other for each in self._crews for other in each.children if other.code is None)
        return crew.has_kept(rank) or any(holds in other.told.splitlines() for other in living)

    def _patience_with(self, rank: Child) -> float:
        """How long to wait for it to notice that another one has died."""
        if not rank.name.startswith("rank") or rank.is_in_group():
            return max(self.patience, self.wait_limit)
        return JOINING_S

    def _kill(self, rank: Child) -> None:
        next(crew for crew in self._crews if rank in crew.children).kill(rank)

    def _first_failure(self) -> ProcessFailed | None:
        """Of all hosts; who only reports another's comes last, before it who has missed another."""

        def blame(each: ProcessFailed) -> tuple[bool, bool, float]:
            return each.exit_code == PeerError.exit_code, bool(MISSING.search(each.cause)), each.since or 0.0

        failures = [failure for crew in self._crews if (failure := crew.failure())]
        return min(failures, key=blame, default=None)

    def _failure(self, ranks: Sequence[Child], waiting: Sequence[Child]) -> ProcessFailed:
        """What has happened: who died of itself, or what the others say of who stalled."""
        first = self._first_failure()
        if first and (any(rank.code and rank.name not in self._stalled for rank in ranks) or not waiting):
            return first
        silent = " and ".join(rank.name for rank in ranks if rank.code)
        words = f"{silent} was frozen or silent; {waiting[0].name} says: {waiting[0].why_it_waits()}"
        return ProcessFailed(words, PeerError.exit_code, since=self._noticed_at, joined=True)

    def _replace(self, failure: ProcessFailed, names: Sequence[str], early: Sequence[Child] = ()) -> bool:
        """
        Args:
            early: live, but have not begun to join: they must know that there is another group to be waited for.
        """
        job = self.job
        if not job.life.replace(failure, names):
            return self._give_up()
        job.secret = secrets.token_hex(SECRET_BYTES) if job.all_ranks_here else ""
        place = "" if self.servers else self.place or abstract_address("ring")
        self._word = Word(job.life.number, place, job.secret)
        self._replaced, self._frozen_at, self._failed_again_at = names, {}, None
        gone = [crew for crew in self.others if crew.gone]
        for crew in self._crews:
            crew.end(failure, names, job.life.number, meet=bool(gone))
        if gone:
            self._meet_again(failure.cause)
        if self.servers is None:
            if early:
                self._give(replace(self._word, rendezvous=""))
            self._start_ranks(place)
            return True
        self.servers.forget_addresses()
        self._give(self._word)
        for name in names:
            if name.startswith("server"):
                self.servers.start(int(name.removeprefix("server ")))
        return True

    def _meet_again(self, cause: str) -> None:
        """
        Raises:
            RecoveryFailed: nobody has come in the place of a host that is gone.
        """
        assert self.hosts
        self.hosts.meet_again(self.job.life.number, cause)
        for host, crew in enumerate(self.others, 1):
            crew.meet_again(self.hosts.stream(host), self.job.life.number)

    def _start_ranks(self, place: str) -> None:
        for crew in self._crews:
            crew.start(self._replaced or (), place)

    def _give(self, word: Word) -> None:
        for crew in self._crews:
            crew.give(word)

    def _go_on(self, ranks: Sequence[Child], waiting: Sequence[Child]) -> bool:
        """Let the others meet who was started again, as soon as that one is ready to, and see them all go on."""
        assert self._replaced is not None
        steps = [pair for rank in ranks if (pair := rank.went_on(self.job.life.number))]
        if len(steps) == len(ranks):
            back_to = steps[0][0]
            for crew in self._crews:
                crew.went_on(back_to, max(made for _, made in steps) - back_to)
            self._replaced, self._stalled, self._noticed_at = None, [], None
            return True  # whatever has happened since is looked at next
        if waiting and not any(rank.code for rank in ranks):  # has someone been killed once more?
            self._failed_again_at = self.clock() if self._failed_again_at is None else self._failed_again_at
            if self.clock() < self._failed_again_at + DYING_S:
                return True
        if waiting or any(rank.code for rank in ranks if self._word is None or rank.name not in self._replaced):
            return self._give_up()
        if self._word is None:
            return True
        new = [rank for rank in ranks if rank.name in self._replaced]
        listening = self.servers is not None and not self._word.rendezvous  # also those that live are to
        servers = [rank for rank in ranks if rank.name.startswith("server") and rank not in new] if listening else []
        frozen = self._of_a_frozen([*new, *servers, *filter(is_on_its_way, ranks)])
        if any(server.code for server in servers):
            return self._give_up(frozen=frozen)
        if failure := frozen or (self._first_failure() if any(rank.code for rank in new) else None):
            return self._replace(failure, self._replaced)
        if self.servers and not self._word.rendezvous:
            if addresses := self.servers.addresses():
                self._word = replace(self._word, rendezvous=",".join(addresses))
                self._start_ranks(self._word.rendezvous)
        elif all(rank.has_joined() for rank in new if rank.name.startswith("rank")):
            self._give(self._word)
            self._word = None
        return True

    def _of_a_frozen(self, awaited: Sequence[Child]) -> ProcessFailed | None:
        """Kill whoever has been frozen for so long; while nobody hears of it, only its state tells."""
        now = self.clock()
        self._frozen_at = {rank.name: self._frozen_at.get(rank.name, now) for rank in awaited if rank.is_frozen()}
        late = [rank for rank in awaited if now > self._frozen_at.get(rank.name, now) + self.patience]
        for rank in late:
            self._kill(rank)
        if not late:
            return None
        what = "listened" if late[0].name.startswith("server") else "joined"
        words = f"{late[0].name} was frozen for {self.patience:g} s before it {what}"
        return ProcessFailed(words, PeerError.exit_code, joined=True)

    def _give_up(self, gone: str = "", *, frozen: ProcessFailed | None = None) -> bool:
        """
        Args:
            gone: which launcher is, in words.
            frozen: that a server was, which was killed.
        """
        self._gave_up, failure = True, frozen or self._first_failure() or lost(gone)
        for crew in self._crews:
            crew.give_up(failure)
        if frozen:
            raise frozen
        return self._here.leave(self._noticed_at)


def is_on_its_way(rank: Child) -> bool:
    """Whether it lives, and has not begun to join its first group."""
    return rank.code is None and rank.name.startswith("rank") and not rank.has_joined()


def who_of(ranks: Sequence[Child]) -> str:
    return f"{' and '.join(rank.name for rank in ranks)} {'are' if len(ranks) > 1 else 'is'} alive, but"
