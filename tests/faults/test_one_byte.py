"""Row 13: a message of one byte that nobody can decode, of a member without a seat, ends his call and nothing else."""

from __future__ import annotations

import re
import time
from pathlib import Path

import grpc
import pytest

pytest.importorskip("paddle")

from common.credentials.credentials import Credentials, find
from common.credentials.token import make_token
from common.network import rendezvous
from ps.planes.methods import JOIN, SESSION
from tests.faults.jobs import LAUNCHERS, Start
from tests.support.channels import ENDS
from tests.support.commands import DEADLINE_S, JOB, Started, digest_in, until
from tests.support.groups import free_port
from tests.support.ports import ports_of

UNDECODABLE = b"\x0a"
STEPS = 300
REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.CANCELLED)


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Credentials:
    """Of the job's, though he has no seat in it."""
    make_token(tmp_path / "token")
    monkeypatch.setenv("GRADSYNC_TOKEN_FILE", str(tmp_path / "token"))
    return find()


def say(address: str, method: str, member: Credentials) -> grpc.StatusCode:
    """How the call ends."""
    shown, options = member.grpc_channel_credentials(), [ENDS, *member.grpc_channel_options()]
    with grpc.secure_channel(address, shown, options=options) as channel:
        try:
            list(channel.stream_stream(method)(iter([UNDECODABLE]), timeout=DEADLINE_S))
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def test_at_servers(start: Start, member: Credentials, tmp_path: Path) -> None:
    """While they wait, while they train, and they end with the training."""
    command = [*LAUNCHERS["ps"], *JOB, "--steps", STEPS, "--json"]
    start(*command, tmp_path / "alone.json").ended_well()
    job, log = start(*command, tmp_path / "told.json", "--log-dir", tmp_path), tmp_path / "serverlog.0"
    (address,) = until(lambda: log.exists() and re.findall(r"listens on (\S+)", log.read_text()), "the server")
    said, ends, slowest = 0, set[grpc.StatusCode](), (0.0, "")
    while job.process.poll() is None and said < 200:
        for method in (JOIN, SESSION):
            begin = time.monotonic()
            ends.add(say(address, method, member))
            slowest = max(slowest, (time.monotonic() - begin, f"{method} of round {said}"))
        said += 1
    assert said > 1, slowest
    over = grpc.StatusCode.UNAVAILABLE
    assert ends <= {grpc.StatusCode.OK, *REFUSALS, over}, slowest
    job.ended_well()
    assert digest_in(tmp_path / "told.json") == digest_in(tmp_path / "alone.json")


def test_where_ranks_meet(start: Start, member: Credentials) -> None:
    place = f"127.0.0.1:{free_port()}"
    ranks = [start("collective.trainer", "--rendezvous", place, *JOB, "--steps", 5, "--rank", 0)]
    until(lambda: listens(ranks[0], place), "rank 0")
    for _ in range(5):
        assert say(place, rendezvous.METHOD, member) in REFUSALS
    ranks.append(start("collective.trainer", "--rendezvous", place, *JOB, "--steps", 5, "--rank", 1))
    for each in ranks:
        each.ended_well()


def listens(rank: Started, place: str) -> bool:
    return place in map(str, ports_of([rank.process.pid]))
