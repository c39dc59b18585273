"""Spare hosts, here threads: who waits, who takes the place of whom, and who is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from common.errors import PeerLost, PeerUnreachable, RendezvousError
from common.launch.lobby import Lobby, Visit
from common.launch.spare_host import SpareHost
from common.network.message_stream import MessageStream
from common.network.rendezvous import Membership
from tests.support.groups import free_port

LIMIT_S = 20.0


class Hosts:
    """Three hosts, of which two visit the first, and as many spare ones as come."""

    def __init__(self, stack: ExitStack, pool: ThreadPoolExecutor) -> None:
        self._stack, self.pool, self.address = stack, pool, f"127.0.0.1:{free_port()}"
        self.lobby = stack.enter_context(Lobby(self.address, 3, silence=LIMIT_S, spares=2))
        self.visits = {host: self.visit(host) for host in (1, 2)}

    def visit(self, host: int) -> Visit:
        return self._stack.enter_context(Visit(self.address, host, 3, silence=LIMIT_S))

    def spare(self, number: int, count: int = 3, patience: float = LIMIT_S) -> SpareHost:
        host = SpareHost(self.address, number, count, silence=LIMIT_S, patience=patience)
        return self._stack.enter_context(host)

    def waiting(self, number: int) -> tuple[SpareHost, Future[int]]:
        """A spare, and the place that it will have."""
        spare = self.spare(number)
        place = self.pool.submit(spare.wait_for_place)
        until(lambda: number in self.lobby._spares._waiting or place.done())
        return spare, place

    def meet(self, *hosts: Lobby | Visit, note: bytes = b"0") -> list[Future[Membership]]:
        return [self.pool.submit(each.meet, f"at {i}", note, LIMIT_S) for i, each in enumerate(hosts)]

    def meet_all(self) -> None:
        for met in self.meet(self.lobby, *self.visits.values()):
            met.result()

    def lose(self, host: int) -> None:
        stream = self.lobby._streams[host]
        self.visits.pop(host).close()
        until(lambda: stream.gone)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with ThreadPoolExecutor(8) as pool, ExitStack() as stack:
        hosts = Hosts(stack, pool)
        yield hosts
        hosts.lobby.close()  # spares that wait hear of it


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_spares_take_the_places_of_hosts_that_are_gone(hosts: Hosts, capfd: pytest.CaptureFixture[str]) -> None:
    first, place = hosts.waiting(3)
    second, further = hosts.waiting(4)
    hosts.meet_all()
    hosts.lose(1)
    met = hosts.meet(hosts.lobby, hosts.visits[2], note=b"1")
    assert place.result(LIMIT_S) == 1
    met += hosts.meet(first)
    assert [each.result(LIMIT_S).notes for each in met] == [(b"1", b"0", b"1")] * 3
    assert not further.done()
    hosts.lose(2)
    met = hosts.meet(hosts.lobby, first)
    assert further.result(LIMIT_S) == 2
    for each in [*met, *hosts.meet(second)]:
        each.result(LIMIT_S)
    said = capfd.readouterr().err
    waits = "it waits until one of the 3 hosts is lost, other than the first, and takes its place (--spares)\n"
    for number, host in ((3, 1), (4, 2)):
        assert f"this is spare host {number}: {waits}" in said
        assert f"the launcher of host {host} is gone: spare host {number} takes its place\n" in said
        assert f"this host takes the place of host {host}, which is gone\n" in said


def test_a_spare_that_has_died_gets_no_place_and_one_that_dies_then_is_followed_by_the_next(hosts: Hosts) -> None:
    dead = hosts.spare(3)
    dead._come_in(LIMIT_S)  # without a thread, which would come back
    until(lambda: 3 in hosts.lobby._spares._waiting)
    gone = hosts.lobby._spares._waiting[3]
    hosts.meet_all()
    dead.close()
    until(lambda: gone.gone)
    first, place = hosts.waiting(3)
    hosts.lose(1)
    met = hosts.meet(hosts.lobby, hosts.visits[2])
    assert place.result(LIMIT_S) == 1
    second, further = hosts.waiting(4)
    first.close()
    assert further.result(LIMIT_S) == 1
    for each in [*met, *hosts.meet(second)]:
        each.result(LIMIT_S)


def test_no_place_is_given_of_a_host_that_is_late_or_has_come_again(hosts: Hosts) -> None:
    _, place = hosts.waiting(3)
    met = hosts.meet(hosts.lobby, hosts.visits[1])
    until(lambda: 1 in hosts.lobby._newcomers)
    for each in [*met, *hosts.meet(hosts.visits[2])]:  # the job's first meeting
        each.result(LIMIT_S)
    hosts.lose(1)
    hosts.visits[1] = hosts.visit(1)
    hosts.visits[1]._come_in(LIMIT_S)
    hosts.meet_all()
    assert not place.done()


def test_who_comes_again_when_its_place_was_given_is_told_so(hosts: Hosts) -> None:
    first, place = hosts.waiting(3)
    hosts.meet_all()
    hosts.lose(1)
    met = hosts.meet(hosts.lobby, hosts.visits[2])
    assert place.result(LIMIT_S) == 1
    text = (
        "^spare host 3 has taken the place of host 1, which was gone; to be a spare in turn, this one needs "
        "--node-rank 3$"
    )
    with pytest.raises(RendezvousError, match=text):
        hosts.visit(1).meet("again", b"0", LIMIT_S)
    for each in [*met, *hosts.meet(first)]:
        each.result(LIMIT_S)
    _, again = hosts.waiting(3)
    assert not again.done()


def test_a_host_that_was_only_silent_when_its_place_was_given_is_told_so(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, place = hosts.waiting(3)
    hosts.meet_all()
    monkeypatch.setattr(hosts.lobby._streams[1], "_silence", -1.0)
    met = hosts.meet(hosts.lobby, hosts.visits[2])
    assert place.result(LIMIT_S) == 1
    with pytest.raises(RendezvousError, match=r"^spare host 3 has taken the place of host 1, which was gone; "):
        hosts.visits[1].meet("again", b"0", LIMIT_S)
    for each in [*met, *hosts.meet(first)]:
        each.result(LIMIT_S)


@pytest.mark.parametrize(
    ("number", "count", "text"),
    [
        (3, 3, "spare host 3 is there already; give every host its own --node-rank"),
        (4, 2, "spare host 4 was started with nnodes 2, the job with 3; give all the same --nnodes"),
        (
            5,
            3,
            "the first host has --spares 2, so a spare host may be --node-rank 3..4 (got 5); give all hosts the same",
        ),
    ],
)
def test_who_cannot_be_a_spare(number: int, count: int, text: str, hosts: Hosts) -> None:
    hosts.waiting(3)
    with pytest.raises(RendezvousError) as caught:
        hosts.spare(number, count).wait_for_place()
    assert str(caught.value).startswith(text)


def test_where_no_spare_was_asked_for_none_may_come() -> None:
    address = f"127.0.0.1:{free_port()}"
    with (
        Lobby(address, 2, silence=LIMIT_S),
        SpareHost(address, 2, 2, silence=LIMIT_S, patience=LIMIT_S) as spare,
        pytest.raises(RendezvousError, match=r"^the first host has --spares 0, so a spare host may be none \(got 2\);"),
    ):
        spare.wait_for_place()


def test_a_spare_that_was_not_needed_ends_well(hosts: Hosts, capfd: pytest.CaptureFixture[str]) -> None:
    _, place = hosts.waiting(3)
    hosts.meet_all()
    hosts.lobby.close()
    with pytest.raises(SystemExit) as caught:
        place.result(LIMIT_S)
    assert caught.value.code == 0
    assert "the job is over: spare host 3 was not needed\n" in capfd.readouterr().err


def test_a_first_host_that_is_lost_while_a_spare_comes_is_waited_for(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    come_in, lost = SpareHost._come_in, [PeerLost("host 0 was lost while joining the launchers")]

    def come_in_later(spare: SpareHost, timeout: float) -> MessageStream:
        if lost:
            raise lost.pop()
        return come_in(spare, timeout)

    monkeypatch.setattr(SpareHost, "_come_in", come_in_later)
    hosts.waiting(3)
    assert 3 in hosts.lobby._spares._waiting


def test_where_the_first_host_is_lost_a_spare_waits_for_the_next_as_long_as_others_do(hosts: Hosts) -> None:
    _, place = hosts.waiting(3)
    short = hosts.spare(4, patience=0.2)
    gives_up = hosts.pool.submit(short.wait_for_place)
    until(lambda: 4 in hosts.lobby._spares._waiting)
    hosts.lobby._server.stop(grace=None).wait()  # without a word
    with pytest.raises((PeerUnreachable, PeerLost)):
        gives_up.result(LIMIT_S)
    with Lobby(hosts.address, 3, silence=LIMIT_S, spares=2) as another:
        until(lambda: 3 in another._spares._waiting)
        assert not place.done()
    with pytest.raises(SystemExit):
        place.result(LIMIT_S)
