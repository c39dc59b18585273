"""The launchers of several hosts, here threads: how they meet again and again, and notice that one is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from common.errors import PeerUnreachable, PortInUse, RendezvousError
from common.launch.lobby import Lobby, Visit
from common.network.message_stream import MessageStream
from common.network.rendezvous import Membership
from tests.support.groups import free_port

LIMIT_S = 20.0


class Hosts:
    """A lobby of three hosts, and those who visit it."""

    def __init__(self, stack: ExitStack, pool: ThreadPoolExecutor, silence: float = LIMIT_S) -> None:
        self._stack, self._pool, self.address = stack, pool, f"127.0.0.1:{free_port()}"
        self.lobby = stack.enter_context(Lobby(self.address, 3, silence=silence))
        self.visits = {host: self.visit(host, silence) for host in (1, 2)}

    def visit(self, host: int, silence: float = LIMIT_S) -> Visit:
        return self._stack.enter_context(Visit(self.address, host, 3, silence=silence))

    def meet(self, note: bytes = b"0") -> list[Membership]:
        all_of_them = [self.lobby, *self.visits.values()]
        met = [self._pool.submit(each.meet, f"host-{i}", note, LIMIT_S) for i, each in enumerate(all_of_them)]
        return [each.result() for each in met]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with ThreadPoolExecutor(4) as pool, ExitStack() as stack:
        yield Hosts(stack, pool)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_they_meet_again_and_again_and_keep_their_streams(hosts: Hosts) -> None:
    for note in (b"0", b"1"):
        met = hosts.meet(note)
        assert [each.addresses for each in met] == [("host-0", "host-1", "host-2")] * 3
        assert [each.notes for each in met] == [(note,) * 3] * 3
    stream, visit = hosts.lobby.stream(1), hosts.visits[1].stream(0)
    hosts.meet()
    assert hosts.lobby.stream(1) is stream
    assert hosts.visits[1].stream(0) is visit
    assert not stream.gone


def test_what_they_tell_each_other_comes_in_order(hosts: Hosts) -> None:
    hosts.meet()
    here, there = hosts.lobby.stream(2), hosts.visits[2].stream(0)
    for sender, receiver in ((here, there), (there, here)):
        sent = [b"%d" % number for number in range(50)]
        for message in sent:
            sender.send(message)
        come: list[bytes] = []
        until(lambda: len(come.__iadd__(receiver.take())) == len(sent))  # noqa: B023 - it is called at once
        assert come == sent
    assert not hosts.lobby.stream(1).take()


def test_either_notices_that_the_other_is_gone_and_a_new_one_takes_its_place(hosts: Hosts) -> None:
    hosts.meet()
    lost = hosts.lobby.stream(1)
    hosts.visits[1].close()
    until(lambda: lost.gone)
    assert lost.gone == "the launcher of host 1 is gone"
    assert not hosts.lobby.stream(2).gone
    hosts.visits[1] = hosts.visit(1)
    hosts.meet()
    assert hosts.lobby.stream(1) is not lost
    assert not hosts.lobby.stream(1).gone
    there = hosts.visits[2].stream(0)
    hosts.lobby.close()
    until(lambda: there.gone)
    assert there.gone == "the launcher of host 0 is gone"


def test_where_the_first_one_is_lost_the_others_meet_with_the_one_in_its_place(hosts: Hosts) -> None:
    hosts.meet()
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(hosts.visits[host].meet, f"host-{host}", b"7", LIMIT_S) for host in (1, 2)]
        hosts.lobby.close()
        with Lobby(hosts.address, 3, silence=LIMIT_S) as another:
            assert another.meet("another", b"0", LIMIT_S).notes == (b"0", b"7", b"7")
            assert [each.result().addresses for each in met] == [("another", "host-1", "host-2")] * 2


def test_who_comes_while_all_are_there_waits_in_vain_and_harms_nobody(hosts: Hosts) -> None:
    hosts.meet()
    stranger = hosts.visit(1)
    text = rf"the launchers of this job did not meet within .* s: that of host 0, at {hosts.address}, goes on without"
    with pytest.raises(PeerUnreachable, match=text):
        stranger.meet("another", b"0", 0.1)
    assert not hosts.lobby.stream(1).gone
    stranger.close()
    hosts.meet()
    assert not hosts.lobby.stream(1).gone


def test_a_launcher_whose_first_host_was_silent_for_too_long_comes_over_another_connection(hosts: Hosts) -> None:
    hosts.meet()
    before = [visit.stream(0) for visit in hosts.visits.values()]
    before[0]._lapsed = True
    hosts.meet()
    after = [visit.stream(0) for visit in hosts.visits.values()]
    assert after[0] is not before[0]
    assert after[1] is before[1]
    assert not any(hosts.lobby.stream(host).gone for host in hosts.visits)


def test_a_meeting_at_which_one_is_missing_fails_for_all_and_the_next_one_may_do(hosts: Hosts) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(hosts.visits[1].meet, "host-1", b"0", LIMIT_S)
        with pytest.raises(RendezvousError, match=r"2 of 3 hosts joined within 0.3 s; missing: host 2"):
            hosts.lobby.meet("host-0", b"0", 0.3)
        with pytest.raises(RendezvousError, match="missing: host 2"):
            other.result()
    assert hosts.meet()[0].addresses == ("host-0", "host-1", "host-2")


def test_a_port_in_use(hosts: Hosts) -> None:
    with pytest.raises(PortInUse):
        Lobby(hosts.address, 2, silence=LIMIT_S)


def test_who_is_silent_for_too_long_counts_as_gone_until_it_is_heard_again() -> None:
    now = [0.0]
    stream = MessageStream("the launcher of host 1", 5.0, clock=lambda: now[0])
    now[0] = 5.0
    assert not stream.gone
    assert not stream.has_lapsed
    now[0] = 6.0
    assert stream.gone == "the launcher of host 1 was silent for 6 s"

    def received() -> Iterator[bytes]:
        yield b""
        assert not stream.gone
        assert stream.has_lapsed
        assert not stream.take()

    stream.read(received())
    assert stream.gone == "the launcher of host 1 is gone"


def test_signs_of_life_are_sent_while_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.network.message_stream.SIGN_S", 0.001)
    stream = MessageStream("the launcher of host 1", LIMIT_S)
    outgoing = stream.outgoing()
    assert next(outgoing) == b""
    stream.send(b"word")
    assert next(outgoing) == b"word"
    stream.end("over")
    assert not [*outgoing]
