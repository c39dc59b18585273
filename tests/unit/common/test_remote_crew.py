"""What a launcher knows of the ranks of another host, as they are reported."""

from __future__ import annotations

from typing import Any

from common.errors import PeerError
from common.launch.child import Child, ProcessFailed
from common.launch.crew_messages import RankReport, Report, reports_in, send
from common.launch.remote_crew import RemoteCrew
from common.network.message_stream import MessageStream
from tests.support.line import Line

LIMIT_S = 20.0


def test_what_is_reported_of_the_dead_is_not_taken_for_who_comes_in_its_place() -> None:
    stream: Any = Line()
    crew = RemoteCrew(stream, [3], 0)
    dead = RankReport("rank 3", 0, -9, frozen=False, keeps=True, notes="waits 1 x\n")

    def told(report: Report) -> Child:
        send(stream, report)
        crew.hear()
        return crew.children[0]

    assert told(Report(0, [dead])).code == -9
    assert told(Report(7, [RankReport("rank 3", 0, None, frozen=False, keeps=True, notes="")])).code == -9
    crew.end(ProcessFailed("it died", PeerError.exit_code), ["rank 3"], 1)
    stream.take()
    assert told(Report(0, [dead])).code is None
    assert told(Report(0, [RankReport("rank 3", 1, None, frozen=False, keeps=True, notes="4\n")])).has_joined()


def test_what_cannot_be_read_ends_the_stream() -> None:
    stream = MessageStream("the launcher of host 1", LIMIT_S)
    stream.read([b'{"life": 0}', b'{"life": "no"}'])
    assert not reports_in(stream, 0)
    assert stream.gone == "the launcher of host 1 is gone"
    stream = MessageStream("the launcher of host 1", LIMIT_S)
    stream._come.append(b'{"life": "no"}')
    assert not reports_in(stream, 0)
    assert stream.gone == "the launcher of host 1 sent what cannot be read: Expected `int`, got `str` - at `$.life`"
