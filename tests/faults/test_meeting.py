"""Rows 10 and 12: ranks that are not of one group, or of one version and configuration, are all told which differs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from common import __version__
from tests.faults.jobs import LAUNCHERS, SCHEMES, TOGETHER_S, Start, end_together, started_ranks
from tests.faults.other_version import VERSION
from tests.support.commands import Started, until

schemes = pytest.mark.parametrize("scheme", SCHEMES)
TIMEOUT_S = 2


def all_refused(processes: list[Started], *texts: str) -> None:
    end_together(processes)
    for each in processes:
        each.refused(*texts)


@pytest.mark.quick
@schemes
def test_wrong_nranks(scheme: str, start: Start) -> None:
    ranks = started_ranks(start, scheme, 2, ["--rank", 0], ["--rank", 1, "--nranks", 3])
    all_refused(ranks, "RendezvousError", "rank 1 was started with nranks 3, the group with 2")


@schemes
def test_a_rank_that_comes_twice(scheme: str, start: Start) -> None:
    ranks = started_ranks(start, scheme, 3, *(["--rank", rank] for rank in (0, 1, 1)))
    all_refused(ranks, "RendezvousError", "rank 1 joined twice; give every rank its own --rank")


@schemes
def test_a_rank_out_of_range(scheme: str, start: Start) -> None:
    *others, outsider = started_ranks(start, scheme, 2, ["--rank", 0], ["--rank", 2])
    end_together([*others, outsider])
    outsider.refused("UsageError", "rank 2 is outside 0..1")
    for each in others:
        each.refused("RendezvousError", "rank 2 is outside 0..1")


@schemes
def test_a_missing_rank_without_a_launcher(scheme: str, start: Start) -> None:
    limit = ["--timeout", TIMEOUT_S]
    begun = time.monotonic()
    waiting = started_ranks(start, scheme, 3, *(["--rank", rank, *limit] for rank in (0, 2)), server_flags=limit)
    first = end_together(waiting)
    assert first - begun < TIMEOUT_S + TOGETHER_S  # and the start of the processes
    for each in waiting:
        each.refused("RendezvousError", "of 3 ranks joined within", "missing: rank 1")


LEAVER = """
import os, sys
import {scheme} as dist
from pathlib import Path
if os.environ["PADDLE_TRAINER_ID"] == "1":
    while not list(Path(sys.argv[1]).glob("*")):
        pass
    Path(sys.argv[1], "gone").touch()
    sys.exit(int(sys.argv[2]))
Path(sys.argv[1], "here").touch()
dist.init_parallel_env()
"""


@pytest.mark.parametrize("code", [0, 3])
@schemes
def test_a_missing_rank_that_a_launcher_knows_of(scheme: str, code: int, start: Start, tmp_path: Path) -> None:
    """It has ended, well or not, before it joined: rank 0 waits for it no longer."""
    (tmp_path / "leaver.py").write_text(LEAVER.format(scheme=scheme))
    (tmp_path / "met").mkdir()
    job = start(*LAUNCHERS[scheme], tmp_path / "leaver.py", tmp_path / "met", code)
    until(lambda: (tmp_path / "met" / "gone").exists(), "the end of rank 1")
    gone = time.monotonic()
    assert job.code == (3 if code else 2)
    assert time.monotonic() - gone < TOGETHER_S
    assert ("rank 1 ended with exit code 3" if code else "rank 1 ended with exit code 0 without joining") in job.err


@schemes
def test_another_version(scheme: str, start: Start) -> None:
    ranks = started_ranks(start, scheme, 2, ["--rank", 0], ["--rank", 1], through={1: "tests.faults.other_version"})
    end_together(ranks)
    for each in ranks:
        each.refused("VersionMismatch", VERSION, __version__, "install one version")


DIFFER = {
    "optimizer": (["--optimizer", "sgd"], ["--optimizer", "adam"]),
    "learning rate": (["--lr", "0.1"], ["--lr", "0.2"]),
    "model": (["--model", "mlp:9"], ["--model", "mlp:10"]),
}


@pytest.mark.parametrize("what", DIFFER)
@schemes
def test_another_configuration(scheme: str, what: str, start: Start) -> None:
    mine, others = DIFFER[what]
    ranks = started_ranks(start, scheme, 2, ["--rank", 0, *mine], ["--rank", 1, *others])
    all_refused(ranks, "LayoutMismatch", "rank 0", "rank 1")


@schemes
def test_another_mode_or_backend(scheme: str, start: Start) -> None:
    flag, mine, others = {"ps": ("--mode", "sync", "ssp"), "collective": ("--backend", "shm", "tcp")}[scheme]
    ranks = started_ranks(start, scheme, 2, ["--rank", 0, flag, mine], ["--rank", 1, flag, others])
    all_refused(ranks, mine, others)
