"""Two hosts, as network namespaces of this machine: two ranks on each, under both schemes and Paddle's launcher."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("paddle")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
    ),
]

FLAGS = ["--model", "mlp:16", "--dataset", "synthetic", "--steps", "3", "--batch-size", "8", "--nranks", "4"]
LIMIT_S = 100


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces, 10.77.0.1 and 10.77.0.2, joined by a link; taken down at the end."""
    names = f"gs{os.getpid()}a", f"gs{os.getpid()}b"
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


def start(host: str, *command: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
    )


def all_end_well(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What each printed; every process is gone afterwards."""
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return outputs


def ring(hosts: tuple[str, str], folder: Path) -> str:
    flags = [*FLAGS, "--rendezvous", "10.77.0.1:8600", "--insecure", "--json", str(folder / "ring.json")]
    all_end_well(
        [start(hosts[rank // 2], "-m", "collective.trainer", "--rank", str(rank), *flags) for rank in (3, 0, 1, 2)]
    )
    record = json.loads((folder / "ring.json").read_text())
    assert record["backend"] == "tcp"
    return str(record["parameters_sha256"])


def servers(hosts: tuple[str, str], folder: Path) -> str:
    """One server on each host."""
    processes = []
    for number, host in enumerate(hosts, 1):
        where = ["--host", f"10.77.0.{number}", "--shard", f"{number - 1}/2", "--nranks", "4", "--insecure"]
        processes.append(start(host, "-m", "ps.server", *where))
    flags = [*FLAGS, "--servers", "10.77.0.1:8500,10.77.0.2:8500", "--json", str(folder / "ps.json")]
    processes += [start(hosts[rank // 2], "-m", "ps.trainer", "--rank", str(rank), *flags) for rank in range(4)]
    all_end_well(processes)
    return str(json.loads((folder / "ps.json").read_text())["parameters_sha256"])


def test_both_schemes_end_in_the_same_bits(hosts: tuple[str, str], tmp_path: Path) -> None:
    assert ring(hosts, tmp_path) == servers(hosts, tmp_path)


def test_paddles_launcher_with_a_node_on_each_host(hosts: tuple[str, str], tmp_path: Path) -> None:
    program = Path(__file__).parent / "programs" / "many_ways.py"
    worker = Path(__file__).parent.parent / "benchmarks" / "script_worker.py"
    command = [
        "-m",
        "paddle.distributed.launch",
        "--master",
        "10.77.0.1:8700",
        "--nnodes",
        "2",
        "--nproc_per_node",
        "2",
    ]
    processes = [
        start(
            host,
            *[
                *command,
                "--log_dir",
                str(tmp_path / host),
                str(worker),
                "collective",
                str(tmp_path / "r"),
                str(program),
            ],
            GRADSYNC_INSECURE="1",
            POD_IP=f"10.77.0.{number}",
        )
        for number, host in enumerate(hosts, 1)
    ]
    all_end_well(processes)
    records = [json.loads((tmp_path / f"r.{rank}.json").read_text()) for rank in range(4)]
    assert len({record["parameters_sha256"] for record in records}) == 1
