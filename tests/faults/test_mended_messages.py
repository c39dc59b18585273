"""Row 7, of a program of a user's own under `--max-restarts`: after a message that is lost, comes twice, after the next
one, or from an epoch before, the job ends with the bits of the undisturbed run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from benchmarks.faults.interceptor import STRUCK
from tests.faults.jobs import LAUNCHERS, Once, Start
from tests.faults.kills import PLANE_FLAG
from tests.support.commands import Started

PROGRAM = """
import hashlib
import sys
import numpy as np
import paddle
import paddle.distributed as dist
import {scheme} as scheme
from benchmarks.faults.interceptor import Interceptor
from common.system.process import restarts

dist.init_parallel_env()
if sys.argv[2:] and restarts() == 0 and dist.get_rank() == 1:
    Interceptor(sys.argv[2], sys.argv[3], 5).__enter__()
paddle.seed(3)
net = paddle.DataParallel(paddle.nn.Linear(8, 3))
optimizer = paddle.optimizer.Adam(parameters=net.parameters())
data = list(np.random.default_rng(1).random((64, 8), np.float32))
sampler = paddle.io.DistributedBatchSampler(data, batch_size=4, shuffle=True)
loader = paddle.io.DataLoader(data, batch_sampler=sampler)
state = scheme.TrainingState(model=net, optimizer=optimizer, sampler=sampler, checkpoint_dir=sys.argv[1])
for epoch, batch in state.steps(loader, epochs=2):
    net(batch).square().sum().backward()
    optimizer.step()
    optimizer.clear_grad()
digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in net.parameters())).hexdigest()
print("digest", digest, flush=True)
"""
CASES = [
    ("ps", "tcp", "gradients", "lost"),
    ("ps", "tcp", "gradients", "overtaken"),
    ("ps", "grpc", "gradients", "doubled"),
    ("ps", "grpc", "commit", "of an old epoch"),
    ("ps", "shm", "commit", "doubled"),
    ("collective", "tcp", "all_reduce", "lost"),
    ("collective", "tcp", "all_reduce", "doubled"),
    ("collective", "tcp", "all_reduce", "overtaken"),
    ("collective", "tcp", "all_reduce", "of an old epoch"),
]


def train(start: Start, folder: Path, scheme: str, plane: str, *fault: str) -> tuple[Started, Sequence[str]]:
    """The job, when it is over, and the digests of its ranks."""
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM.format(scheme=scheme))
    flags = ["--max-restarts", 1, "--timeout", 3, "--log-dir", folder / "logs", PLANE_FLAG[scheme], plane]
    job = start(*LAUNCHERS[scheme], *flags, folder / "program.py", folder / "commits", *fault)
    assert job.code == 0, job.err
    logs = [file.read_text() for file in sorted((folder / "logs").glob("workerlog.*"))]
    if fault:
        assert f"{STRUCK}{' '.join(fault)}" in logs[1]
    return job, [re.findall(r"^digest (\w+)$", log, re.MULTILINE)[-1] for log in logs]


@pytest.mark.parametrize(
    ("scheme", "plane", "kind", "fate"),
    [pytest.param(*each, marks=[pytest.mark.quick] if each == CASES[0] else []) for each in CASES],
)
def test_a_job_whose_message_went_wrong_is_mended(
    scheme: str, plane: str, kind: str, fate: str, start: Start, once: Once, tmp_path: Path
) -> None:
    job, digests = train(start, tmp_path / "struck", scheme, plane, kind, fate)
    assert "complete after 1 restart" in job.err
    expected = once("mended messages", lambda: train(start, tmp_path / "plain", "collective", "tcp")[1][0])
    assert digests == [expected] * 2
