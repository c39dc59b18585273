"""Restarts: what is started again, how often, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import PeerStalled, PeerUnreachable, RecoveryFailed, UsageError
from common.launch.child import Child, ProcessFailed
from common.launch.restarts import Life, RestartFlags, supervise
from common.network import reach
from common.network.proofs import CLOSED
from common.system.leftovers import Session

KILLED = ("rank 1 was killed by SIGKILL", 137)


def killed(since: float | None = None, cause: str = KILLED[0]) -> ProcessFailed:
    return ProcessFailed(f"{cause}\n  | its output", KILLED[1], by_signal=True, since=since)


class Job:
    """A job whose lives end as is said, each after ten seconds, but for the last, which ends well."""

    def __init__(self, *ends: Exception) -> None:
        self.ends, self.epochs, self.time = list(ends), [0] * 0, 0.0

    def live(self, life: Life) -> None:
        self.epochs.append(life.number)
        self.time += 1
        if life.number:
            life.whole()
        self.time += 9
        if self.ends:
            raise self.ends.pop(0)

    def run(self, most: int, window: float = 0.0, **more: Any) -> None:
        flags = RestartFlags(max_restarts=most, restart_window=window)
        supervise(flags, self.live, prog="ps.run", clock=lambda: self.time, **more)


def test_a_job_that_ends_well_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job()
    job.run(3)
    assert job.epochs == [0]
    assert capsys.readouterr().err == ""


def test_each_failure_each_recovery_and_their_sum_are_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(killed(since=9.0), killed(since=20.0, cause="server 0 was killed by SIGSEGV"))
    job.run(3)
    assert job.epochs == [0, 1, 2]
    assert capsys.readouterr().err.splitlines() == [
        "ps.run: rank 1 was killed by SIGKILL, 9.0 s after its start; the others ended within 1.0 s; "
        "starting all again (restart 1 of 3)",
        "ps.run: recovered: the group is complete again, 2.0 s after that (epoch 1)",
        "ps.run: server 0 was killed by SIGSEGV, 10.0 s after its start; the others ended within 0.0 s; "
        "starting all again (restart 2 of 3)",
        "ps.run: recovered: the group is complete again, 1.0 s after that (epoch 2)",
        "ps.run: complete after 2 restarts, which took 3.0 s: "
        "rank 1 was killed by SIGKILL; server 0 was killed by SIGSEGV",
    ]


def test_ranks_that_are_replaced_are_told_of_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job()

    def live(life: Life) -> None:
        job.epochs.append(life.number)
        for names, cause, step, replayed in (
            (["rank 1"], KILLED[0], 3, 1),
            (["rank 0", "rank 2"], "rank 0 was killed by SIGKILL", 7, 0),
            ([], "rank 0 says: PeerStalled: rank 1", 9, 0),
        ):
            job.time += 5
            assert life.replace(killed(cause=cause), names)
            job.time += 2
            life.went_on(step, replayed)
            life.look([])  # that the group is whole again is not told of twice
            job.epochs.append(life.number)

    supervise(RestartFlags(max_restarts=3), live, prog="collective.run", clock=lambda: job.time)
    assert job.epochs == [0, 1, 2, 3]
    assert [line.removeprefix("collective.run: ") for line in capsys.readouterr().err.splitlines()] == [
        "rank 1 was killed by SIGKILL, 5.0 s after its start; rank 1 is started again (restart 1 of 3), "
        "the others go on",
        "recovered: all go on after step 3, 1 step replayed, 2.0 s after that (epoch 1)",
        "rank 0 was killed by SIGKILL, 12.0 s after its start; rank 0 and rank 2 are started again (restart 2 of 3), "
        "the others go on",
        "recovered: all go on after step 7, 0 steps replayed, 2.0 s after that (epoch 2)",
        "rank 0 says: PeerStalled: rank 1, 19.0 s after its start; all live, and meet again (restart 3 of 3)",
        "recovered: all go on after step 9, 0 steps replayed, 2.0 s after that (epoch 3)",
        "complete after 3 restarts (3 of a part, 1 step replayed), which took 6.0 s: rank 1 was killed by SIGKILL; "
        "rank 0 was killed by SIGKILL; rank 0 says: PeerStalled: rank 1",
    ]


def test_a_second_failure_before_the_group_is_whole_again_adds_to_the_time_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = Job()

    def live(life: Life) -> None:
        assert life.replace(killed(), ["rank 1"])
        job.time += 5
        assert life.replace(killed(), ["rank 1"])
        job.time += 2
        life.went_on(3, 0)

    supervise(RestartFlags(max_restarts=3), live, prog="collective.run", clock=lambda: job.time)
    *_, recovered, summary = capsys.readouterr().err.splitlines()
    assert "2.0 s after that (epoch 2)" in recovered
    assert "complete after 2 restarts (2 of a part, 0 steps replayed), which took 7.0 s: " in summary


def test_a_rank_is_not_replaced_when_no_restart_is_left_or_none_would_help() -> None:
    def live(life: Life) -> None:
        assert not life.replace(ProcessFailed("rank 0 ended with exit code 2", 2, joined=True), ["rank 0"])
        assert life.number == 0
        for _ in range(2):
            life.replace(killed(), ["rank 1"])

    with pytest.raises(RecoveryFailed, match=r"1 restart did not help \(--max-restarts 1\); last, rank 1 was killed"):
        supervise(RestartFlags(max_restarts=1), live, prog="collective.run")
    assert not Life().replace(killed(), ["rank 1"])


def test_all_are_started_again_in_the_epoch_after_that_of_a_replaced_rank() -> None:
    epochs = [0] * 0

    def live(life: Life) -> None:
        epochs.append(life.number)
        if len(epochs) == 1:
            life.replace(killed(), ["rank 1"])
            raise killed()

    supervise(RestartFlags(max_restarts=2), live, prog="collective.run")
    assert epochs == [0, 2]


def test_without_restarts_a_failure_stays_what_it_is() -> None:
    failure = killed()
    with pytest.raises(ProcessFailed) as caught:
        Job(failure).run(0)
    assert caught.value is failure


def test_restarts_that_are_used_up_tell_the_last_failure() -> None:
    job = Job(*(killed() for _ in range(3)))
    with pytest.raises(RecoveryFailed) as caught:
        job.run(2)
    assert job.epochs == [0, 1, 2]
    assert caught.value.exit_code == 6
    assert str(caught.value) == (
        "2 restarts did not help (--max-restarts 2); last, rank 1 was killed by SIGKILL\n  | its output"
    )


def test_their_first_line_says_why_the_last_one_failed() -> None:
    failure = ProcessFailed(
        "rank 1 ended with exit code 1\n  | ValueError: no",
        1,
        cause="rank 1 ended with exit code 1: ValueError: no",
        joined=True,
    )
    with pytest.raises(RecoveryFailed) as caught:
        Job(killed(), failure).run(1)
    line, *rest = str(caught.value).splitlines()
    assert line == "1 restart did not help (--max-restarts 1); last, rank 1 ended with exit code 1: ValueError: no"
    assert rest == ["  | ValueError: no"]


def test_within_a_window_only_its_restarts_count() -> None:
    job = Job(*(killed() for _ in range(5)))
    job.run(2, 15.0)
    assert job.epochs == [0, 1, 2, 3, 4, 5]
    with pytest.raises(RecoveryFailed, match=r"\(--max-restarts 1 --restart-window 15\)"):
        Job(killed(), killed()).run(1, 15.0)


@pytest.mark.parametrize(
    "failure",
    [
        ProcessFailed("rank 0 ended with exit code 2", 2, joined=True),
        ProcessFailed("rank 0 ended with exit code 3", 3, joined=True),
        ProcessFailed("rank 0 ended with exit code 1", 1),
        ProcessFailed("rank 0 ended", 1, joined=True, cause="rank 0 ended: mine: NonFiniteGradient: rank 0, a"),
        UsageError("never joined"),
    ],
    ids=["usage", "certificate", "before it joined", "not finite", "of the launcher"],
)
def test_what_would_happen_again_ends_the_job_at_once(failure: Exception) -> None:
    job = Job(failure)
    with pytest.raises(type(failure)) as caught:
        job.run(3)
    assert caught.value is failure
    assert job.epochs == [0]


@pytest.mark.parametrize(
    "failure",
    [
        ProcessFailed("rank 0 ended with exit code 1", 1, joined=True),
        ProcessFailed("rank 0 ended with exit code 4", 4),
        ProcessFailed("rank 0 was killed by SIGKILL", 137, by_signal=True),
    ],
    ids=["an error within the training", "another's death", "killed before it joined"],
)
def test_what_may_not_happen_again_is_tried_again(failure: Exception) -> None:
    job = Job(failure)
    job.run(1)
    assert job.epochs == [0, 1]


def test_who_was_killed_between_two_meetings_may_come_again() -> None:
    """Its next life found it among those that meet already; a host whose own rank that was not has lost nobody."""
    cause = "rank 1 ended with exit code 2: collective.trainer: RendezvousError: rank 1 joined twice; give every rank"
    job = Job(ProcessFailed("rank 1", 2, joined=True, cause=cause))
    job.run(1)
    assert job.epochs == [0, 1]


@pytest.mark.parametrize(
    "who",
    [
        "RendezvousError: rank 0 at gradsync-53aafb",
        "PeerUnreachable: rank 1 cannot exchange data with server 0 over TCP: its data port 127.0.0.1:8601",
    ],
)
@pytest.mark.parametrize(
    "why",
    [
        f"did not let rank 1 in ({CLOSED})",
        "was not reached within 30 s (Connection refused)",
        "was not reached within 0.5 s (Connection reset by peer)",
    ],
)
def test_who_called_one_that_was_killed_meanwhile_may_come_again(who: str, why: str) -> None:
    """Also where no launcher has seen that yet, as on another host."""
    cause = f"rank 1 ended with exit code 2: mine.py:2: {who} {why}"
    job = Job(ProcessFailed("rank 1", 2, joined=True, cause=cause))
    job.run(1)
    assert job.epochs == [0, 1]


@pytest.mark.parametrize("again", [False, True])
def test_what_follows_from_a_kill_before_the_group_is_complete_takes_no_further_restart(
    again: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """But once: then it is a failure of its own."""
    cause = "rank 1 ended with exit code 2: mine.py:2: RendezvousError: rank 1 joined twice; give every rank"
    late = ProcessFailed("rank 1", 2, joined=True, cause=cause)
    epochs: list[int] = []

    def live(life: Life) -> None:
        epochs.append(life.number)
        if not life.number:
            assert life.start_over(killed(), ["rank 1"])
        if again or not life.number:
            raise late

    def run() -> None:
        supervise(RestartFlags(max_restarts=1), live, prog="ps.run", clock=lambda: 0.0)

    if again:
        with pytest.raises(RecoveryFailed, match="1 restart did not help"):
            run()
    else:
        run()
        assert "ps.run: complete after 1 restart, which took " in capsys.readouterr().err
    assert epochs == [0, 1]


def test_where_a_link_was_cut_all_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "is_cut_off", lambda host: host == "10.0.0.2")
    error = reach.told_apart(PeerStalled("rank 1 was silent"), "rank 1", "10.0.0.2", 30.0)
    cause = f"rank 0 ended with exit code 2: mine.py: {type(error).__name__}: {error}"
    job = Job(ProcessFailed("rank 0", error.exit_code, joined=True, cause=cause))
    job.run(1)
    assert job.epochs == [0, 1]


@pytest.mark.parametrize(
    "words",
    [
        "1 of 2 ranks joined within 5 s; missing: rank 1: not started, or too slow",
        "rank 1, 2 did not connect to rank 0 within 5 s",
        "rank 0 at gradsync-53aafb did not let rank 1 in (timed out)",
    ],
)
def test_a_rank_that_is_missing_after_a_failure_may_come_next_time(words: str) -> None:
    """Such as one that froze while another one's place was taken."""
    cause = f"rank 0 ended with exit code 2: collective.trainer: RendezvousError: {words}"
    missing = ProcessFailed("rank 0", 2, joined=True, cause=cause)
    job = Job(killed(), missing)
    job.run(2)
    assert job.epochs == [0, 1, 2]
    with pytest.raises(ProcessFailed) as caught:
        Job(missing).run(2)
    assert caught.value is missing, "it was asked for what cannot work"

    def live(life: Life) -> None:
        if life.number == 0:
            assert life.replace(killed(), ["rank 0"])
            raise missing

    supervise(RestartFlags(max_restarts=2), live, prog="collective.run")


UNREACHABLE = "mine.py:2: PeerUnreachable: nobody answered at 127.0.0.1:8601 within 8 s; is it started, and is the"


def test_nobody_that_answers_may_be_one_that_the_job_has_lost_or_that_is_frozen() -> None:
    def missed() -> ProcessFailed:
        return ProcessFailed("rank 1", 2, joined=True, cause=f"rank 1 ended with exit code 2: {UNREACHABLE}")

    job = Job(killed(), missed())
    job.run(2)
    assert job.epochs == [0, 1, 2]
    first, at_first = missed(), missed()
    first.blame(["rank 0"])
    job = Job(first)
    job.run(1)
    assert job.epochs == [0, 1]
    with pytest.raises(ProcessFailed) as caught:
        Job(at_first).run(2)
    assert caught.value is at_first, "the address may be wrong"


def test_hosts_go_on_at_the_greatest_epoch_that_one_of_them_proposes() -> None:
    job, asked = Job(killed(), killed()), [0] * 0
    job.run(2, agree=lambda epoch: asked.append(epoch) or epoch + 3)  # type: ignore[func-returns-value]
    assert asked == [1, 5]
    assert job.epochs == [0, 4, 8]


def test_hosts_that_do_not_meet_again_are_told_of() -> None:
    def agree(_: int) -> int:
        raise PeerUnreachable("nobody answered")

    with pytest.raises(RecoveryFailed) as caught:
        Job(killed()).run(2, agree=agree)
    assert str(caught.value) == (
        "rank 1 was killed by SIGKILL; then the launchers of all hosts did not meet: nobody answered"
    )


@pytest.mark.parametrize(
    ("most", "window", "text"),
    [
        (-1, 0.0, r"--max-restarts must be at least 0 \(got -1\)"),
        (1, -1.0, r"--restart-window must be a number of seconds, at least 0 \(got -1.0\)"),
        (1, float("nan"), "--restart-window must be"),
        (0, 5.0, "--restart-window needs --max-restarts"),
    ],
)
def test_flags_that_cannot_be(most: int, window: float, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        RestartFlags(max_restarts=most, restart_window=window)


@pytest.fixture
def child(tmp_path: Path) -> Callable[[str], Child]:
    def make(name: str) -> Child:
        process: Any = SimpleNamespace(poll=lambda: None)
        return Child(name, process, Session(0, None), None, tmp_path, tmp_path / name)

    return make


@pytest.mark.parametrize(("done", "ended", "code"), [(True, -9, 0), (False, -9, -9), (True, 1, 1), (True, None, None)])
def test_who_is_killed_when_it_has_done_all_has_ended_well(
    done: bool, ended: int | None, code: int | None, child: Callable[[str], Child]
) -> None:
    rank = child("rank 0")
    rank.joined.write_text("2\ncomplete\n" + "done\n" * done)
    vars(rank.process)["poll"] = lambda: ended
    assert rank.code == code


def test_a_life_is_whole_once_the_group_of_all_ranks_is_complete(child: Callable[[str], Child]) -> None:
    seen: list[int] = []
    children: Sequence[Child] = [child("server 0"), child("rank 0"), child("rank 1")]
    life, first = Life(2, lambda: seen.append(1)), Life(0, lambda: seen.append(0))
    children[1].joined.write_text("2\ncomplete\n")
    children[2].joined.write_text("2\n")
    life.look(children)
    assert seen == []
    children[2].joined.write_text("2\ncomplete\n")
    for _ in range(2):
        life.look(children)
        first.look(children)  # nobody was waiting for it
    assert seen == [1]
