"""Row 11: a gradient that is not finite on one rank is named on all, and changes no rank's parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("paddle")

from common.errors import NonFiniteGradient
from tests.faults.jobs import LAUNCHERS, SCHEMES, Start
from tests.faults.kills import PLANE_FLAG, PLANES

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
