"""Row 11: a gradient that is not finite on one rank is named on all, and changes no rank's parameters, nor what a
server has of the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("paddle")

from common.errors import NonFiniteGradient
from common.sync.guard import Guard
from common.tensors.optimizers import Adam
from ps.client.client import Client
from ps.coordinator.servicer import ParameterServer
from ps.synchronizer import ServerSynchronizer
from tests.faults.jobs import LAUNCHERS, SCHEMES, Start
from tests.faults.kills import PLANE_FLAG, PLANES
from tests.support.groups import on_threads
from tests.support.sessions import failure_of, serving
from tests.support.synchronizer_guards import step
from tests.support.synchronizer_steps import new_arena

PROGRAM = """
import sys
import paddle
import paddle.distributed as dist

dist.init_parallel_env()
net = paddle.DataParallel(paddle.nn.Linear(4, 3))
optimizer = paddle.optimizer.Adam(parameters=net.parameters())
for step in range(4):
    before = [each.numpy().tobytes() for each in net.parameters()]
    x = paddle.full([2, 4], float(sys.argv[1]) if step == 2 and dist.get_rank() == 1 else 1.0)
    try:
        net(x).sum().backward()
        optimizer.step()
    except Exception:
        assert before == [each.numpy().tobytes() for each in net.parameters()]
        print("unchanged at step", step, flush=True)
        raise
    optimizer.clear_grad()
"""


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(("scheme", "plane"), [(scheme, plane) for scheme in SCHEMES for plane in PLANES[scheme]])
def test_a_gradient_that_is_not_finite(scheme: str, plane: str, value: str, start: Start, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    flags = ["--non-finite", "error", "--log-dir", tmp_path, PLANE_FLAG[scheme], plane]
    job = start(*LAUNCHERS[scheme], *flags, tmp_path / "program.py", value)
    assert job.code == NonFiniteGradient.exit_code, job.err
    for rank in range(2):
        said = (tmp_path / f"workerlog.{rank}").read_text()
        assert "unchanged at step 2" in said, said
        assert "NonFiniteGradient: rank 1's gradient of parameter weight is not finite at step 2 " in said, said


def state_of(server: ParameterServer) -> list[bytes]:
    """Its parameters, and all that its optimizer keeps."""
    store = server._coordinator._registration.store
    assert store
    arrays = store.optimizer_slice().arrays
    assert arrays
    return [store.parameters.tobytes(), *(arrays[kind].tobytes() for kind in sorted(arrays))]


@pytest.mark.parametrize("plane", PLANES["ps"])
def test_it_changes_nothing_of_a_server(plane: str) -> None:
    with serving(2) as (server,):

        def on_rank(rank: int) -> tuple[list[bytes], list[bytes]]:
            with ServerSynchronizer(Client([server.address], rank, 2, data_plane=plane)) as synchronizer:
                arena = new_arena(synchronizer)
                synchronizer.guard = Guard(arena, rank, refuses=True)
                synchronizer.attach(arena, Adam())
                step(synchronizer, arena, 0, {})
                before = state_of(server)
                with pytest.raises(NonFiniteGradient):
                    step(synchronizer, arena, 1, {"middle": float("nan")} if rank == 1 else {})
                return before, state_of(server)

        for before, after in on_threads(2, on_rank):
            assert after == before
        failure_of(server)
