"""Row 14: a stranger with the protocol in hand is refused at every port of a job, which the kernel lists, and changes
nothing: on one host and on several, while the members meet and while they train."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from benchmarks.netlab.cluster import why_no_cluster
from common.credentials.token import make_token
from tests.faults.jobs import SCHEMES, Start
from tests.faults.places import PLACES, Place, place_named
from tests.faults.stranger import IDENTITIES
from tests.support.commands import JOB, Started, digest_in, until
from tests.support.groups import free_port
from tests.support.ports import GONE, ports_of

pytestmark = pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster() or "-")
STEPS = {"ps": 1200, "collective": 20}  # of a ring only the start has ports
REFUSED = {"refused", "UNAVAILABLE", "UNAUTHENTICATED", "UNAUTHENTICATED UNIMPLEMENTED"}  # it has not all methods
KINDS = {"ps": {"gRPC", "door", "desk", "metrics"}, "collective": {"gRPC", "door"}}


WHERE = {"127.0.0.1", "10.77.0.1"}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with place_named(request.param) as found:
        yield found


@dataclass
class Visited:
    """A job of two members, and the strangers who come to the first one and its server."""

    start: Start
    home: Path
    place: Place
    scheme: str
    strangers: list[Started] = field(default_factory=list)

    def member(self, *command: object, host: int) -> Started:
        return self.start(*command, through=self.place.host(host))

    def first_ones(self) -> tuple[list[Started], partial[Started]]:
        """The members that have ports, and how to start the one that all wait for."""
        where, record = self.place.addresses[0], self.home / "visited.json"
        flags = [*JOB, "--steps", STEPS[self.scheme], "--token-file", self.home / "token", "--nranks", 2]
        if self.scheme == "ps":
            port = free_port()
            own = ["--host", where, "--port", port, "--metrics-port", 0, "--nranks", 2, "--token-file", flags[-3]]
            server = self.member("ps.server", *own, host=0)
            until(lambda: "listens on" in server.out, "the server")
            trainer = ["ps.trainer", "--servers", f"{where}:{port}", "--data-plane", "tcp", *flags]
            ranks = [self.member(*trainer, "--rank", 0, "--json", record, host=0)]
            return [server, *ranks], partial(self.member, *trainer, "--rank", 1, host=1)
        trainer = ["collective.trainer", "--rendezvous", f"{where}:{free_port()}", "--backend", "tcp", *flags]
        ranks = [self.member(*trainer, "--rank", 0, "--json", record, host=0)]
        return ranks, partial(self.member, *trainer, "--rank", 1, host=1)

    def come(self, members: list[Started]) -> list[Started]:
        """A stranger on the members' host, and one on his own if there is one; they have nearly done."""
        pids = [each.process.pid for each in members if each.process.poll() is None]
        hosts = {self.place.host(0), self.place.host(2)}
        come = [self.start("tests.faults.stranger", self.home, *pids, through=host) for host in hosts]
        for each in come:
            until(lambda each=each: "nearly done" in each.out or each.process.poll() is not None, "the strangers")
        self.strangers += come
        return come


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_port_refuses_a_stranger(scheme: str, place: Place, start: Start, tmp_path: Path) -> None:
    make_token(tmp_path / "token")
    heard = tmp_path / "heard"
    launcher = {"ps": ["ps.run", "--servers", 1], "collective": ["collective.run"]}[scheme]
    alone = start(*launcher, "--nranks", 2, *JOB, "--steps", STEPS[scheme], "--json", tmp_path / "alone.json")
    alone.ended_well()
    job = Visited(start, tmp_path, place, scheme)
    eavesdropper = job.member("tests.faults.overheard", heard, host=0)
    until(lambda: "listens" in eavesdropper.out, "who listens")
    members, last = job.first_ones()
    ports = {"ps": 4, "collective": 3}[scheme]
    until(lambda: len(ports_of([each.process.pid for each in members])) >= ports, "the ports of the first ones")
    until(lambda: said_to(heard), "what rank 0 says", lambda: "\n".join(each.err for each in (eavesdropper, *members)))
    job.come(members)
    members.append(last())
    if scheme == "ps":
        until(lambda: len(said_to(heard)) > 1, "data connections")
        job.come(members)
    for each in members:
        assert each.code == 0, each.err
        assert (tmp_path / "token").read_text().strip() not in each.out + each.err
    assert digest_in(tmp_path / "visited.json") == digest_in(tmp_path / "alone.json")
    found, replayed = set[str](), set[str]()
    for each in job.strangers:
        assert each.code == 0, each.err
        for port, told in json.loads(each.out.splitlines()[-1]).items():
            kind = told.pop("kind")
            found |= {kind} - {GONE}
            replayed |= {port} if "what was overheard" in told else set()
            assert set(told.values()) <= REFUSED, (port, kind, told)
            assert kind != "gRPC" or set(told) >= {*IDENTITIES, "no certificate"}
            assert kind != "metrics" or port.startswith("127.0.0.1:")
    doors_look_like_grpc = len(place.addresses) > 1 and scheme == "ps"
    assert found == KINDS[scheme] - ({"door"} if doors_look_like_grpc else set())
    assert len(replayed) >= {"ps": 2, "collective": 1}[scheme]


def said_to(heard: Path) -> dict[str, str]:
    """By listener."""
    said: dict[str, str] = json.loads(heard.read_text()) if heard.exists() else {}
    return {where: data for where, data in said.items() if where.partition(":")[0] in WHERE}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_hosts_are_not_listened_to_without(scheme: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRADSYNC_TOKEN", "GRADSYNC_TOKEN_FILE", "GRADSYNC_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    first = {
        "ps": ["ps.server", "--host", "0.0.0.0"],
        "collective": ["collective.trainer", "--rendezvous", "0.0.0.0:8600"],
    }
    start(*first[scheme]).refused("refusing to listen on 0.0.0.0 without credentials", "--token-file", "--insecure")
