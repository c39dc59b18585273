"""The parameter-server synchronizer: the contract of all synchronizers."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")

from ps.store.modes import Mode
from tests.support.server_jobs import BETWEEN, ENCRYPTED, EVERYWHERE, job
from tests.support.synchronizer_contract import BETWEEN_RANKS, CHECKS, Check, check_overlap_changes_no_bits, name_of
from tests.support.thorough import and_long

FEW = [(3, 2, "mixed")]  # clients and servers have shown that planes are alike
everywhere = pytest.mark.parametrize(("nranks", "servers", "plane"), and_long(FEW, [*ENCRYPTED, *EVERYWHERE]))
between_ranks = pytest.mark.parametrize(("nranks", "servers", "plane"), and_long(FEW, [*ENCRYPTED, *BETWEEN]))


@everywhere
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_contract(check: Check, nranks: int, servers: int, plane: str) -> None:
    with job(nranks, servers, plane) as make:
        check(make, nranks)


@between_ranks
@pytest.mark.parametrize("check", [*CHECKS, *BETWEEN_RANKS], ids=name_of)
def test_contract_under_ssp_with_a_bound_of_zero(check: Check, nranks: int, servers: int, plane: str) -> None:
    if "without_an_optimizer" in check.__name__:
        pytest.skip("mode ssp needs the optimizer when the training begins")
    with job(nranks, servers, plane, mode=Mode("ssp", 0)) as make:
        check(make, nranks)


@between_ranks
@pytest.mark.parametrize("check", BETWEEN_RANKS, ids=name_of)
def test_contract_between_ranks(check: Check, nranks: int, servers: int, plane: str) -> None:
    with job(nranks, servers, plane) as make:
        check(make, nranks)


@everywhere
def test_overlap_changes_no_bits(nranks: int, servers: int, plane: str) -> None:
    with job(nranks, servers, plane) as overlapping, job(nranks, servers, plane, overlap=False) as waiting:
        check_overlap_changes_no_bits(overlapping, waiting, nranks)
