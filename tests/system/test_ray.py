"""Trainings on a cluster of three nodes of Ray's on this machine. Minutes: only with GRADSYNC_LONG_TESTS=all."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.netlab.cluster import Cluster, why_no_cluster
from tests.support.groups import ROOT, environment
from tests.support.ray_cluster import RayCluster, ray_cluster
from tests.support.ray_hosts import PORT, ray_on_hosts

pytest.importorskip("paddle")
pytest.importorskip("ray.train", exc_type=ImportError, reason="Ray is not installed (pip install '.[ray]')")
pytestmark = [
    pytest.mark.system,
    pytest.mark.longest,
    pytest.mark.timeout(600),
]
PROGRAMS = "tests/programs"
BUILT_IN = ("--steps", "5")
CNN = (f"{PROGRAMS}/cnn.py",)
SERVED = ("ps.run", "--servers", "2")
RING = ("collective.run",)


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as found:
        yield found


def start(*command: object) -> subprocess.Popen[str]:
    told = {**environment(), "PYTHONWARNINGS": "ignore"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *map(str, command)], env=told, cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    )


def run(*command: object, code: int = 0) -> tuple[str, str]:
    """What a command of Python's has written, and said on stderr."""
    with start(*command) as process:
        out, err = process.communicate(timeout=560)
    assert process.returncode == code, out + err
    return out, err


def digest_of(*command: object) -> str:
    out, _ = run("-m", *command)
    found = re.findall(r"(?:digest|sha256) ([0-9a-f]{64})", out)
    assert len(found) == 1, out
    return str(found[0])


def test_a_trainer_of_rays_ends_with_the_bits_of_our_launcher_also_after_losses() -> None:
    ours = digest_of(*RING, *CNN)
    out, _ = run(f"{PROGRAMS}/on_ray.py")
    assert json.loads(out.splitlines()[-1]) == dict.fromkeys(("ring", "ps", "after a kill", "after a lost node"), ours)


def test_shards_of_ray_data_checkpoints_and_a_servers_figures_are_rays() -> None:
    out, _ = run(f"{PROGRAMS}/on_ray_data.py")
    told = json.loads(out.splitlines()[-1])
    assert told["seen"] == {"ps": 64, "ring": 64}  # 2 epochs of 64 rows on 2 ranks
    assert told["kept"] == {"ps": ["model.pdparams"], "ring": ["model.pdparams"]}
    assert told["figures"]["ray_gradsync_steps_total"] == 8


def test_launchers_on_a_cluster_end_with_the_bits_of_one_host(cluster: RayCluster) -> None:
    on_ray = ("--engine", "ray", "--address", cluster.address, "--strategy", "SPREAD", "--nranks", 3)
    for what in (CNN, BUILT_IN):
        ours = digest_of(*RING, "--nranks", 3, *what)
        assert {digest_of(*scheme, *on_ray, *what) for scheme in (RING, SERVED)} == {ours}


def test_output_codes_and_refusals_are_those_of_one_host(cluster: RayCluster, tmp_path: Path) -> None:
    on_ray = ("-m", *RING, "--engine", "ray", "--address", cluster.address)
    script = tmp_path / "fails.py"
    script.write_text(
        "import sys, paddle.distributed as dist\ndist.init_parallel_env()\nprint('said by', dist.get_rank())\n"
        "if dist.get_rank() == 1:\n    sys.exit(9)\nprint('why', file=sys.stderr)\ndist.barrier()\n"
    )
    out, err = run(*on_ray, script, code=9)
    assert out == "said by 0\n"
    first, *rest = err.splitlines()
    assert first == "why"
    assert re.fullmatch(r"collective.run: ProcessFailed: rank 1 ended with exit code 9 on node [\d.]+", rest[0])
    assert rest[1:] == ["  | (last lines of its output)", "  | said by 1"]
    run(*on_ray, "--log-dir", tmp_path / "logs", script, code=9)
    assert (tmp_path / "logs" / "workerlog.1").read_text() == "said by 1\n"
    _, err = run(*on_ray, "--nranks", 7, "--timeout", 2, *BUILT_IN, code=2)
    assert re.fullmatch(
        r"collective.run: UsageError: Ray has had no room for 7 ranks of 1 CPU and 500 MB each \(PACK\) for 2 s "
        r"\(--timeout\): 6 CPU and [\d,]+ MB are free; start fewer, or lower --cpus-each or --memory-each\n",
        err,
    )


@pytest.mark.parametrize("scheme", [RING, SERVED], ids=["ring", "ps"])
def test_a_killed_rank_and_a_killed_node_are_named_and_nothing_is_left(
    scheme: tuple[str, ...], cluster: RayCluster, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    on_ray = ("-m", *scheme, "--engine", "ray", "--address", cluster.address, "--strategy", "SPREAD", "--nranks", 3)
    for deed, said in (
        (lambda: os.kill(pid_of(tmp_path, 1), signal.SIGKILL), r"rank 1 was killed by SIGKILL on node [\d.]+"),
        (cluster.lose_a_node, r"(rank|server) \d was lost on node [\d.]+: Ray no longer reaches it"),
    ):
        for file in tmp_path.iterdir():
            file.unlink()
        with start(*on_ray, f"{PROGRAMS}/long_on_ray.py", tmp_path) as process:
            wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)), 120)
            ranks = [pid_of(tmp_path, rank) for rank in range(3)]
            deed()
            _, err = process.communicate(timeout=60)
        line, *more = err.splitlines()
        assert re.match(rf"{scheme[0]}: ProcessFailed: {said}", line), err
        assert all(each.startswith("  | ") for each in more), err
        assert process.returncode == 137
        wait_until(lambda ranks=ranks: not any(map(psutil.pid_exists, ranks)))


def test_a_job_that_loses_a_node_is_started_again_on_the_others(
    cluster: RayCluster, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    on_ray = ("--engine", "ray", "--address", cluster.address, "--strategy", "SPREAD", "--nranks", 3)
    with start("-m", *RING, *on_ray, "--max-restarts", 1, f"{PROGRAMS}/long_on_ray.py", tmp_path, 200) as process:
        wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)), 120)
        cluster.lose_a_node()
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    lost, recovered, complete = err.splitlines()
    assert re.search(r"rank \d was lost on node [\d.]+: Ray no longer .*; starting all again \(restart 1 of 1\)", lost)
    assert "recovered: the group is complete again" in recovered
    assert "complete after 1 restart" in complete


@pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster() or "-")
def test_three_hosts_with_rays_token_end_with_the_bits_of_one(tmp_path: Path) -> None:
    head = f"10.77.0.1:{PORT}"
    job = ("--engine", "ray", "--address", head, "--strategy", "SPREAD", "--nranks", "3", *BUILT_IN)
    with Cluster([125e6] * 3) as hosts, ray_on_hosts(hosts, tmp_path) as token:
        digests = {digest_on(hosts, token, *scheme, *job) for scheme in (RING, SERVED)}
        fitted = on_head(hosts, token, f"{PROGRAMS}/on_ray.py", head)
        refused = on_head(hosts, {"RAY_AUTH_MODE": "disabled"}, "-m", *RING, *job)
    assert digests == {digest_of(*RING, "--nranks", 3, *BUILT_IN)}
    assert fitted.returncode == 0, fitted.stdout + fitted.stderr
    assert json.loads(fitted.stdout.splitlines()[-1]) == dict.fromkeys(("ring", "ps"), digest_of(*RING, *CNN))
    assert refused.returncode == 2
    assert re.search(
        r"collective.run: PeerUnreachable: no cluster of Ray's can be used .* set RAY_AUTH_MODE", refused.stderr
    )


def on_head(hosts: Cluster, variables: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    """A program of Python's on the first host."""
    told = {**environment(), "PYTHONWARNINGS": "ignore", **variables}
    line = [*hosts.within(0), sys.executable, *command]
    return subprocess.run(line, env=told, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def digest_on(hosts: Cluster, token: dict[str, str], *command: str) -> str:
    done = on_head(hosts, token, "-m", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall("sha256 ([0-9a-f]{64})", done.stdout)[0]


def pid_of(folder: Path, rank: int) -> int:
    return int((folder / str(rank)).read_text())
