"""Messages between trainers: the contract of all messengers, over the session that each has with the first server."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")

from tests.support.messenger_contract import CHECKS, Check, name_of
from tests.support.server_jobs import job
from tests.support.thorough import and_long

JOBS = and_long([(2, 1, "shm"), (4, 2, "mixed")], [(2, 2, "grpc"), (3, 1, "tcp"), (3, 2, "shm")])


@pytest.mark.parametrize(("nranks", "servers", "plane"), JOBS)
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_contract(check: Check, nranks: int, servers: int, plane: str) -> None:
    with job(nranks, servers, plane) as make:
        check(make, nranks)
