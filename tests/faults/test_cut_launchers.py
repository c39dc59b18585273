"""Row 5 with `--max-restarts`: the link between two hosts' launchers is cut. The one that does not decide ends what it
has started, so that no two epochs live. Whole again in time, the job goes on, or begins anew from the last commit, with
the bits of the undisturbed run; else both say so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytest.importorskip("paddle")

from benchmarks.netlab.cluster import Cluster, why_no_cluster
from common.commit.folder import CommitFolder
from common.credentials.credentials import variable_of
from common.errors import RecoveryFailed
from tests.faults.jobs import SCHEMES, Once
from tests.support import warm
from tests.support.commands import JOB, digest_in, is_running, until
from tests.support.groups import ROOT

pytestmark = pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster() or "-")
TIMEOUT_S = 6.0
LIMIT_S = 60.0
STEPS, COMMIT_EVERY = 1000, 100
TRAINING = [*JOB, "--steps", STEPS]
MEMBERS = {"ps.server", "ps.trainer", "collective.trainer"}
LAUNCHERS = {"ps": ["ps.run", "--servers", 1], "collective": ["collective.run"]}


@dataclass
class Launchers:
    """Of a job of two hosts with a rank each."""

    cluster: Cluster
    folder: Path
    processes: list[subprocess.Popen[bytes]]

    @property
    def commits(self) -> CommitFolder:
        return CommitFolder(self.folder / "commits")

    def said(self, host: int) -> str:
        return out_of(self.folder, host).read_text()

    def heard(self) -> str:
        return "; ".join(map(self.said, range(2)))

    def members(self, host: int) -> list[psutil.Process]:
        """The ranks and servers of a host."""
        found = psutil.Process(self.processes[host].pid).children(recursive=True)
        return [each for each in found if MEMBERS & set(each.cmdline())]

    def codes(self) -> list[int]:
        return [each.wait(LIMIT_S) for each in self.processes]


def out_of(folder: Path, host: int) -> Path:
    return folder / f"out of {host}"


@pytest.fixture
def launchers(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launchers]:
    """When the first commit is there."""
    monkeypatch.setenv(variable_of("insecure"), "1")
    job = [*LAUNCHERS[scheme], "--ips", "10.77.0.1,10.77.0.2", "--nranks", 2, *TRAINING, "--timeout", TIMEOUT_S]
    job += ["--max-restarts", 1, "--json", tmp_path / "record.json"]
    job += ["--checkpoint-dir", tmp_path / "commits", "--commit-every", COMMIT_EVERY]
    with Cluster([0, 0]) as cluster:
        of = Launchers(cluster, tmp_path, [])
        for host in range(2):
            command = [*cluster.within(host), sys.executable, "-m", *map(str, job), "--log-dir", str(tmp_path / "logs")]
            with out_of(tmp_path, host).open("wb") as out:
                of.processes.append(
                    subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=os.environ)
                )
        try:
            until(lambda: of.commits.steps(), "a commit")
            yield of
        finally:
            for each in of.processes:
                each.kill()
                each.wait()


def undisturbed(folder: Path) -> str:
    record = folder / "undisturbed.json"
    command = [sys.executable, "-m", "collective.run", "--nranks", 2, *TRAINING, "--json", record]
    done = warm.run(list(map(str, command)), timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return digest_in(record)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_launchers_that_meet_again_go_on_in_one_epoch(
    scheme: str, launchers: Launchers, once: Once, tmp_path: Path
) -> None:
    """The first host's processes may live on, if they had noticed and the copies of the other's are with them."""
    before = [launchers.members(host) for host in range(2)]
    launchers.cluster.unplug(1)
    until(lambda: all("(restart 1 of 1)" in launchers.said(host) for host in range(2)), "a word", launchers.heard)
    assert not any(map(is_running, before[1])), "two epochs may live"
    launchers.cluster.plug(1)
    assert launchers.codes() == [0, 0], launchers.heard()
    assert [len(each) for each in before] == [1 + (scheme == "ps"), 1]
    assert "; starting all again (restart 1 of 1)" in launchers.said(1)
    for host in range(2):
        assert "recovered: " in launchers.said(host)
        assert "(epoch 1)" in launchers.said(host)
    assert digest_in(tmp_path / "record.json") == once("training of launchers", lambda: undisturbed(tmp_path))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_launchers_that_do_not_meet_again_say_so_and_leave_nothing(launchers: Launchers) -> None:
    before = [each for host in range(2) for each in launchers.members(host)]
    launchers.cluster.unplug(1)
    assert launchers.codes() == [RecoveryFailed.exit_code] * 2, launchers.heard()
    assert "RecoveryFailed: the launcher of host 1 was silent for " in launchers.said(0)
    assert "; then the launchers of all hosts did not meet: " in launchers.said(0)
    assert "missing: host 1: " in launchers.said(0)
    assert "then the launchers of all hosts did not meet: nobody answered at 10.77.0.1:8601" in launchers.said(1)
    until(lambda: not any(map(is_running, before)), "the end of all processes")
