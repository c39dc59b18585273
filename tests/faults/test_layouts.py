"""Row 11: ranks whose parameters differ are all told by name, before anything of them has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("paddle")

from tests.faults.jobs import LAUNCHERS, SCHEMES, Start

PROGRAM = """
import sys
import paddle
import paddle.distributed as dist

class Net(paddle.nn.Layer):
    def __init__(self, what):
        super().__init__()
        def first():
            self.add_sublayer("a", paddle.nn.Linear(3, 5 if what == "shape" else 4))
        def second():
            self.add_sublayer("c" if what == "name" else "b", paddle.nn.Linear(2, 2))
        for make in (second, first) if what == "order" else (first, second):
            make()
        if what == "dtype":
            self.to(dtype="float64")

dist.init_parallel_env()
net = Net(sys.argv[1] if dist.get_rank() else "")
before = [each.numpy().tobytes() for each in net.parameters()]
try:
    paddle.DataParallel(net)
finally:
    assert before == [each.numpy().tobytes() for each in net.parameters()]
    print("unchanged", flush=True)
"""
TEXTS = {
    "shape": ["a.weight", "[3, 4]", "[3, 5]"],
    "dtype": ["a.weight", "float64"],
    "name": ["b.weight", "c.weight"],
    "order": ["a.weight", "b.weight"],
}


@pytest.mark.parametrize("what", TEXTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_layout(scheme: str, what: str, start: Start, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    job = start(*LAUNCHERS[scheme], "--log-dir", tmp_path, tmp_path / "program.py", what)
    assert job.code == 2, job.err
    for rank in range(2):
        said = (tmp_path / f"workerlog.{rank}").read_text().splitlines()
        assert said[0] == "unchanged"
        assert "LayoutMismatch: " in said[-1]
        assert [text for text in TEXTS[what] if text not in said[-1]] == []
