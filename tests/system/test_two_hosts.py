"""Two hosts, as network namespaces of this machine: two ranks on each, under both schemes and Paddle's launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.netlab.cluster import Cluster, why_no_cluster
from common.credentials.token import make_token, new_token
from tests.support import warm
from tests.support.groups import ROOT

pytest.importorskip("paddle")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster() or "-"),
]

FLAGS = ["--model", "mlp:16", "--dataset", "synthetic", "--steps", "3", "--batch-size", "8", "--nranks", "4"]
LIMIT_S = 100
NOTICE_S = 20  # far below the 30 s that a silent peer would be given


@pytest.fixture(autouse=True)
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hosts' one secret: by a variable, where no test gives the flag."""
    make_token(tmp_path / "token")
    monkeypatch.setenv("GRADSYNC_TOKEN_FILE", str(tmp_path / "token"))
    return tmp_path / "token"


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces, 10.77.0.1 and 10.77.0.2, joined by a link without a limit."""
    with Cluster([0, 0]) as cluster:
        first, second = cluster.names
        yield first, second


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
    flags = [*FLAGS, "--rendezvous", "10.77.0.1:8600", "--json", str(folder / "ring.json")]
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
        where = ["--host", f"10.77.0.{number}", "--shard", f"{number - 1}/2", "--nranks", "4"]
        processes.append(start(host, "-m", "ps.server", *where))
    flags = [*FLAGS, "--servers", "10.77.0.1:8500,10.77.0.2:8500", "--json", str(folder / "ps.json")]
    processes += [start(hosts[rank // 2], "-m", "ps.trainer", "--rank", str(rank), *flags) for rank in range(4)]
    all_end_well(processes)
    return str(json.loads((folder / "ps.json").read_text())["parameters_sha256"])


@pytest.mark.long
def test_both_schemes_end_in_the_same_bits(hosts: tuple[str, str], tmp_path: Path) -> None:
    assert ring(hosts, tmp_path) == servers(hosts, tmp_path)


SUMS = """
import json, sys
import numpy as np
import collective
rank, algorithm, checksum = int(sys.argv[1]), *sys.argv[2:]
with collective.connect(rank, 4, "10.77.0.1:8600", algorithm=algorithm, checksum=checksum) as group:
    sums = []
    for size in (17, 1_000_003):
        for array in (np.empty(size, np.float32), group.empty(size)):
            array[...] = np.random.default_rng(rank).standard_normal(size)
            group.all_reduce(array)
            sums.append(int(array.view(np.uint32).sum(dtype=np.uint64)))
    group.barrier()
print(json.dumps([group.algorithm, *sums]))
"""


def test_ranks_learn_who_shares_their_host_and_every_way_gives_the_same_bits(hosts: tuple[str, str]) -> None:
    used, sums = [], set()
    for algorithm, checksum in (("auto", "auto"), ("auto", "off"), ("direct", "on"), ("ring", "auto")):
        command = ["-c", SUMS]
        processes = [start(hosts[rank // 2], *command, str(rank), algorithm, checksum) for rank in range(4)]
        for output in all_end_well(processes):
            name, *found = json.loads(output)
            used.append(name)
            sums.add(tuple(found))
    assert used == ["hierarchical"] * 8 + ["direct"] * 4 + ["ring"] * 4
    assert len(sums) == 1


def test_hosts_that_are_not_alike_take_the_usual_way(hosts: tuple[str, str]) -> None:
    """Three ranks on one, one on the other."""
    processes = [start(hosts[rank // 3], "-c", SUMS, str(rank), "auto", "auto") for rank in range(4)]
    assert [json.loads(output)[0] for output in all_end_well(processes)] == ["direct"] * 4


PROGRAM = ROOT / "tests" / "programs" / "many_ways.py"
WORKER = ROOT / "benchmarks" / "training" / "script_worker.py"  # gives Paddle's names the scheme's functions
LAUNCHERS = {"collective": ["collective.run"], "ps": ["ps.run", "--servers", "2"]}
HOSTS = {
    "--ips": lambda index: ["--ips", "10.77.0.1,10.77.0.2"],
    "--master": lambda index: ["--master", "10.77.0.1:8650", "--nnodes", "2", "--node-rank", str(index)],
}


def launch(hosts: tuple[str, str], scheme: str, how: str, *rest: str) -> list[subprocess.Popen[str]]:
    """The launcher on both hosts, the second one first."""
    module, *flags = LAUNCHERS[scheme]
    return [start(hosts[index], "-m", module, *flags, *HOSTS[how](index), "--nranks", "4", *rest) for index in (1, 0)]


def program(scheme: str, folder: Path) -> list[str]:
    return [str(WORKER), scheme, str(folder / "r"), str(PROGRAM)]


def digests(folder: Path) -> set[str]:
    """Of the parameters that the program had on each of four ranks."""
    return {json.loads((folder / f"r.{rank}.json").read_text())["parameters_sha256"] for rank in range(4)}


def run_on_one_host(*flags: str) -> None:
    done = warm.run([sys.executable, "-m", "collective.run", *flags], timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def training_on_one_host(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What four ranks on one host end with in the built-in training."""
    record = tmp_path_factory.mktemp("one-host") / "ring.json"
    run_on_one_host(*FLAGS, "--json", str(record))
    return str(json.loads(record.read_text())["parameters_sha256"])


@pytest.fixture(scope="module")
def program_on_one_host(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Likewise in a user's program."""
    folder = tmp_path_factory.mktemp("one-host")
    run_on_one_host("--nranks", "4", *program("collective", folder))
    (digest,) = digests(folder)
    return digest


@pytest.mark.parametrize(  # the others below
    ("scheme", "how"), [pytest.param("collective", "--ips", marks=pytest.mark.long), ("ps", "--master")]
)
def test_launchers_on_both_hosts_train_as_on_one(
    scheme: str, how: str, hosts: tuple[str, str], tmp_path: Path, training_on_one_host: str
) -> None:
    _, output = all_end_well(launch(hosts, scheme, how, *FLAGS[:-2], "--json", str(tmp_path / "record.json")))
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["nranks"], record["backend"]) == (4, {"collective": "tcp", "ps": "shm"}[scheme])
    assert record["parameters_sha256"] == training_on_one_host
    assert training_on_one_host in output


@pytest.mark.longest
@pytest.mark.parametrize(("scheme", "how"), [("collective", "--master"), ("ps", "--ips")])
def test_launchers_on_both_hosts_run_a_program_as_on_one(
    scheme: str, how: str, hosts: tuple[str, str], tmp_path: Path, program_on_one_host: str
) -> None:
    outputs = all_end_well(launch(hosts, scheme, how, *program(scheme, tmp_path)))
    assert digests(tmp_path) == {program_on_one_host}
    assert [re.findall("RESULT ([0-9])", output) for output in outputs] == [["2"], ["0"]]  # each host's first rank


@pytest.mark.parametrize("how", ["another token", "none"])
def test_a_host_without_the_token_is_refused_and_told(
    how: str, hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host waits on; the second one ends at once."""
    flags = ["-m", "collective.run", "--master", "10.77.0.1:8650", "--nnodes", "2", *FLAGS]
    first = start(hosts[0], *flags, "--node-rank", "0")
    told = {"another token": {"GRADSYNC_TOKEN": new_token()}, "none": {"GRADSYNC_INSECURE": "1"}}[how]
    monkeypatch.delenv("GRADSYNC_TOKEN_FILE")
    second = start(hosts[1], *flags, "--node-rank", "1", **told)
    try:
        output = second.communicate(timeout=NOTICE_S)[0]
        assert second.returncode == 2
        assert "CredentialsRefused: who listens at 10.77.0.1:8651" in output
        assert first.poll() is None
    finally:
        for launcher in (first, second):
            launcher.kill()
            launcher.communicate()


ENDLESS = """
import pathlib, sys
import {scheme} as dist
dist.init_parallel_env()
pathlib.Path(sys.argv[1], str(dist.get_rank())).touch()
while True:
    dist.barrier()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("scheme", "lost"),
    [
        ("ps", 0),
        ("collective", 1),
        pytest.param("ps", 1, marks=pytest.mark.longest),
        pytest.param("collective", 0, marks=pytest.mark.longest),
    ],
)
def test_a_killed_launcher_is_noticed_on_the_other_host(
    scheme: str, lost: int, hosts: tuple[str, str], tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS.format(scheme=scheme))
    (tmp_path / "ready").mkdir()
    launchers = launch(hosts, scheme, "--ips", str(tmp_path / "endless.py"), str(tmp_path / "ready"))[::-1]
    try:
        wait_until(lambda: len(list((tmp_path / "ready").iterdir())) == 4, limit=LIMIT_S)
        launchers[lost].kill()
        output = launchers[1 - lost].communicate(timeout=NOTICE_S)[0]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.communicate()
    assert launchers[1 - lost].returncode == 4, output
    culprit = "(rank [01]|server [01] at 10.77.0.1:860[01])" if lost == 0 else "rank [23]"
    assert re.search(f"PeerLost: {culprit} (died|was lost)", output), output
    assert output.count("PeerLost") == 1, output


@pytest.mark.long
def test_paddles_launcher_with_a_node_on_each_host(hosts: tuple[str, str], tmp_path: Path) -> None:
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
                str(WORKER),
                "collective",
                str(tmp_path / "r"),
                str(PROGRAM),
            ],
            POD_IP=f"10.77.0.{number}",
        )
        for number, host in enumerate(hosts, 1)
    ]
    all_end_well(processes)
    records = [json.loads((tmp_path / f"r.{rank}.json").read_text()) for rank in range(4)]
    assert len({record["parameters_sha256"] for record in records}) == 1
