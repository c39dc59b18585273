"""A spare host's launcher takes the place of one that is lost, with its ranks, and the bits are those of the
undisturbed run; four launchers on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytest.importorskip("paddle")

from common.system.fault_points import FAULT_VARIABLE
from tests.support.commands import JOB, Started, digest_in, until
from tests.support.groups import free_port
from tests.support.warm import COLD_VARIABLE

pytestmark = pytest.mark.processes
STEPS = 20


@pytest.mark.parametrize(
    "command",
    [pytest.param("collective.run", marks=pytest.mark.long), pytest.param("ps.run", marks=pytest.mark.longest)],
)
def test_a_spare_host_takes_the_place_of_one_that_is_lost(
    command: str, tmp_path: Path, start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher and its ranks are killed. A second spare one is not needed."""
    record, undisturbed = tmp_path / "record.json", tmp_path / "undisturbed.json"
    done = start("collective.run", *JOB, "--steps", STEPS, "--nranks", 2, "--json", undisturbed)
    monkeypatch.setenv(COLD_VARIABLE, "1")
    monkeypatch.setenv(FAULT_VARIABLE, "backward:1:12:stop")
    flags = [*JOB, "--steps", STEPS, "--json", record, "--nnodes", 2, "--nproc-per-node", 1, "--timeout", 5]
    flags += ["--master", f"127.0.0.1:{free_port()}", "--max-restarts", 1, "--spares", 2]
    flags += ["--checkpoint-dir", tmp_path / "commits", "--commit-every", 2]
    first, second = (start(command, *flags, "--node-rank", index) for index in (0, 1))
    spare = start(command, *flags, "--node-rank", 2)
    until(lambda: any(map(is_stopped, psutil.Process(second.process.pid).children())), "the frozen rank")
    further = start(command, *flags, "--node-rank", 3)
    until(lambda: "this is spare host 3" in further.err, "the second spare host")
    second.process.kill()
    assert first.code == 0, first.err
    assert spare.code == further.code == 0, spare.err + further.err
    assert "the launcher of host 1 is gone: spare host 2 takes its place\n" in first.err
    assert "; rank 1 is started again (restart 1 of 1), the others go on\n" in first.err
    assert "recovered: all go on after step 1" in first.err
    assert "complete after 1 restart (1 of a part, " in first.err
    assert spare.err.startswith(
        "this is spare host 2: it waits until one of the 2 hosts is lost, other than the first, and takes its place "
        "(--spares)\nthis host takes the place of host 1, which is gone\n"
        f"{command}: this host joins a job that has lost one, in epoch 1\n"
    )
    assert further.err.splitlines()[1:] == ["the job is over: spare host 3 was not needed"]
    assert done.code == 0
    assert digest_in(record) == digest_in(undisturbed)


def is_stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED
