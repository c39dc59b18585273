"""Programs under real engines: Open MPI, and a Slurm that is set up here. Each starts Python anew for every rank."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from common.credentials.token import make_token
from tests.support.groups import ROOT, environment
from tests.support.slurm import NODES, Slurm, slurm, why_no_slurm

pytest.importorskip("paddle")
pytestmark = [pytest.mark.system, pytest.mark.long]

LIMIT_S = 110
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe")
UNCHANGED = """
import paddle
import paddle.distributed as dist

dist.init_parallel_env()
paddle.seed(7)
model = paddle.DataParallel(paddle.nn.Linear(4, 3))
optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
for step in range(3):
    x = paddle.to_tensor([[1.0 + dist.get_rank(), step, 2.0, 3.0]])
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.clear_grad()
numbers = [float(value) for value in model.parameters()[0].numpy().ravel()]
print(f"<{dist.get_rank()} of {dist.get_world_size()}: {numbers}>", flush=True)
"""
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="there is no mpirun (apt-get install openmpi-bin)"
)
needs_slurm = pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm() or "-")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with the unchanged program, and with those that import a scheme."""
    (tmp_path / "unchanged.py").write_text(UNCHANGED)
    for scheme in ("collective", "ps"):
        changed = UNCHANGED.replace("import paddle.distributed as dist", f"import {scheme} as dist")
        (tmp_path / f"{scheme}_by_import.py").write_text(changed.replace("paddle.DataParallel", "dist.DataParallel"))
    return tmp_path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def run(command: Sequence[object], **variables: str) -> str:
    told = {**environment(), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **variables}
    done = subprocess.run(
        [*map(str, command)], env=told, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def parameters_of(output: str, nranks: int) -> str:
    """What all ranks ended with, each once."""
    said = re.findall(r"<(\d+) of (\d+): (.*?)>", output)
    assert sorted(int(rank) for rank, _, _ in said) == list(range(nranks)), output
    assert {int(of) for _, of, _ in said} == {nranks}
    assert len({numbers for _, _, numbers in said}) == 1
    return said[0][2]


@needs_mpi
def test_mpirun_starts_four_ranks_of_a_program_that_imports_a_scheme(programs: Path) -> None:
    parameters_of(run([*MPIRUN, "-n", 4, sys.executable, programs / "collective_by_import.py"]), 4)


@needs_mpi
def test_under_mpirun_the_first_task_serves_and_the_bits_are_those_of_our_launcher(programs: Path) -> None:
    ours = run([sys.executable, "-m", "collective.run", "--nranks", 2, programs / "unchanged.py"])
    served = run([*MPIRUN, "-n", 3, "-x", "GRADSYNC_SERVERS=1", sys.executable, programs / "ps_by_import.py"])
    assert f"<0 of 2: {parameters_of(served, 2)}>" in ours


@needs_slurm
def test_srun_starts_ranks_on_two_nodes(cluster: Slurm, programs: Path) -> None:
    make_token(programs / "token")
    srun = ["srun", f"--chdir={ROOT}", "--nodes=2"]
    told = {"GRADSYNC_TOKEN_FILE": str(programs / "token"), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    ended = []
    for more in (
        ["--ntasks=2", sys.executable, "-m", "collective.run", programs / "unchanged.py"],
        ["--ntasks=3", sys.executable, "-m", "ps.run", "--servers", "1", programs / "unchanged.py"],
    ):
        done = cluster.run(*srun, *more, **told)
        assert done.returncode == 0, done.stdout + done.stderr
        ended.append(parameters_of(done.stdout, 2))
    assert len({*ended}) == 1
    doctor = cluster.run(*srun, "--ntasks=2", sys.executable, "-m", "benchmarks", "doctor", COLUMNS="300", **told)
    assert re.search(rf"engine +ok +task 1 of 2 of Slurm .*on 2 host\(s\); they meet at {NODES[0]}:2\d+", doctor.stdout)


@needs_slurm
def test_a_batch_script_runs_a_step_and_a_failed_rank_is_named(cluster: Slurm, programs: Path) -> None:
    (programs / "fails.py").write_text(
        UNCHANGED + "\nif dist.get_rank() == 1:\n    raise SystemExit(9)\ndist.barrier()\n"
    )
    script = programs / "train.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --ntasks=2 --nodes=1\nsrun {sys.executable} -m collective.run fails.py\n")
    done = cluster.run(
        *("sbatch", "--wait", f"--chdir={programs}", "--output=out", script),
        PYTHONPATH=str(ROOT),
        PYTHONWARNINGS="ignore",
    )
    out = (programs / "out").read_text()
    assert done.returncode in (4, 9), out  # of the rank that failed, or of the one that lost it
    assert "Slurm has started 2 tasks of fails.py: each is one rank" in out
    parameters_of(out, 2)
    assert re.search(r"fails\.py:\d+: PeerLost: rank 1 ", out), out
