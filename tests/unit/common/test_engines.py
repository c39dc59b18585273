"""What has started a process: a row of the table, a test."""

from __future__ import annotations

import os
import socket

import pytest

from common.errors import UsageError
from common.launch.adopting import adopt, adopted
from common.launch.engines import ENGINES, hosts_of, task_from
from common.launch.hosts import HostsConfig
from common.launch.settings import placement_from, servers_among, told_by_engine
from common.launch.tasks import place_of, task_here

ME = f"unix-abstract:gradsync-{os.getuid()}"
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[08,11]",
    "SLURM_JOB_ID": "171",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "9",  # the job's, not the step's
    "SLURM_NODELIST": "n[01-30]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "1255145473",
    "OMPI_MCA_orte_hnp_uri": "1255145472.0;tcp://10.0.0.7,192.168.0.7:40001;tcp6://[fd00::2]:33615",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.3",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
PADDLE_JOB = {"PADDLE_JOB_ID": "mnist", "PADDLE_NNODES": "3", "PADDLE_MASTER": "mnist-worker-0:36543"}
ROWS = [  # environment, engine, (index, count, local, here), hosts, meeting
    (
        {
            "PADDLE_TRAINER_ID": "1",
            "PADDLE_TRAINERS_NUM": "2",
            "PADDLE_TRAINER_ENDPOINTS": "h1:6170,h2:6170",
            "PADDLE_LOCAL_RANK": "0",
        },
        "Paddle's launcher or ours",
        (1, 2, 0, 1),
        "h1 h2",
        "h1:6170",
    ),
    (TORCHRUN, "torchrun", (1, 2, 1, 2), "127.0.0.1 127.0.0.1", f"{ME}-torchrun-29500"),
    (
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        "torchrun",
        (1, 2, 0, 1),
        "host-0 host-1",
        "10.0.0.3:29501",
    ),
    (OPEN_MPI, "Open MPI", (3, 4, 3, 4), " ".join(["127.0.0.1"] * 4), f"{ME}-open-mpi-1255145473"),
    (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        "Open MPI",
        (3, 4, 1, 2),
        "host-0 host-0 host-1 host-1",
        "10.0.0.7:25473",
    ),
    (
        {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
        "MPI",
        (0, 2, 0, 2),
        "127.0.0.1 127.0.0.1",
        "127.0.0.1:8600",
    ),
    (SLURM, "Slurm", (2, 3, 0, 1), "n08 n08 n11", "n08:21712"),
    ({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "3"}, "Slurm", (2, 3, 0, 1), "n08 n08 n11", "n08:21712"),
    (
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n08"},
        "Slurm",
        (2, 3, 0, 3),
        "n08 n08 n08",
        f"{ME}-slurm-171.2",
    ),
    (
        {**PADDLE_JOB, "HOSTNAME": "mnist-worker-2"},
        "Kubeflow PaddleJob",
        (2, 3, 0, 1),
        "host-0 host-1 host-2",
        "mnist-worker-0:36543",
    ),
    (
        {**PADDLE_JOB, "HOSTNAME": "mnist-worker-0", "GRADSYNC_SERVERS": "1", "PADDLE_MASTER": "mnist-master-0:36543"},
        "Kubeflow PaddleJob",
        (1, 3, 0, 1),
        "host-0 host-1 host-2",
        "mnist-master-0:36543",
    ),
    (
        {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "t-node-0-0.t", "PET_MASTER_PORT": "29500"},
        "Kubeflow Trainer",
        (1, 2, 0, 1),
        "host-0 host-1",
        "t-node-0-0.t:29500",
    ),
    (
        {"JOB_COMPLETION_INDEX": "3", "GRADSYNC_TASKS": "4"},
        "Kubernetes Indexed Job",
        (3, 4, 0, 1),
        "host-0 host-1 host-2 host-3",
        "ring-0.ring.jobs.svc.cluster.local:8600",
    ),
]


@pytest.fixture(autouse=True)
def pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "ring-3.ring.jobs.svc.cluster.local")


@pytest.mark.parametrize(("env", "engine", "numbers", "hosts", "meeting"), ROWS)
def test_an_engine_is_read(
    env: dict[str, str], engine: str, numbers: tuple[int, ...], hosts: str, meeting: str
) -> None:
    task = task_from(env)
    assert task is not None
    assert (task.engine, (task.index, task.count, task.local, task.here)) == (engine, numbers)
    assert [endpoint.rpartition(":")[0] for endpoint in task.endpoints] == hosts.split()
    assert len(set(task.endpoints)) == task.count
    assert task.meeting == meeting
    assert getattr(task_from({**env, "GRADSYNC_RENDEZVOUS": "h:1"}), "meeting", None) == "h:1"


def test_every_engine_has_a_row_here() -> None:
    assert {engine.name for engine in ENGINES} == {row[1] for row in ROWS}


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "1", "WORLD_SIZE": "2"},  # anybody's names
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script itself
        {"JOB_COMPLETION_INDEX": "1"},  # nobody says of how many: a job of its own
        {"PADDLE_NNODES": "2", "PADDLE_MASTER": "h:1", "HOSTNAME": "a-worker-1"},  # of Paddle's launcher, by hand
    ],
)
def test_what_starts_one_process_is_no_engine(env: dict[str, str]) -> None:
    assert task_from(env) is None


def test_the_engine_that_was_started_further_in_counts() -> None:
    outer = {**SLURM, **OPEN_MPI}
    assert str(task_from(outer)) == "task 3 of 4 of Open MPI (OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4)"
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "8", **SLURM}  # Slurm has started its proxies only
    assert getattr(task_from(hydra), "engine", "") == "MPI"
    assert getattr(task_from({**outer, "PADDLE_TRAINERS_NUM": "2"}), "placed", False)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({**SLURM, "SLURM_PROCID": "3"}, r"Slurm: rank 3 is outside 0\.\.2 \(SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=3\)"),
        ({"PET_NNODES": "1:4", "PET_NODE_RANK": "0"}, r"Trainer: PET_NNODES must be a whole number \(got '1:4'\)"),
    ],
)
def test_an_engine_that_contradicts_itself_is_named(env: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        task_from(env)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[01-03,7],login", ["n01", "n02", "n03", "n7", "login"]),
        ("r[1-2]n[9-10]-x", ["r1n9-x", "r1n10-x", "r2n9-x", "r2n10-x"]),
    ],
)
def test_slurms_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert hosts_of(text) == hosts


def test_the_first_tasks_serve() -> None:
    env = {**OPEN_MPI, "GRADSYNC_SERVERS": "1"}
    place = placement_from(env)
    assert (place.rank, place.nranks, len(place.endpoints), place.servers, place.rendezvous) == (2, 3, 3, (), "")
    place = placement_from({**env, "OMPI_COMM_WORLD_RANK": "0"})
    assert (place.rank, place.nranks) == (0, 3)
    task = task_from(env)
    assert task is not None
    assert servers_among(task, {"GRADSYNC_SERVERS": "10.0.0.1:8500"}) == 0
    with pytest.raises(UsageError, match="GRADSYNC_SERVERS=4 leaves none of 4 tasks to train"):
        placement_from({**env, "GRADSYNC_SERVERS": "4"})


def test_a_launcher_is_one_of_several_tasks_unless_its_flags_start_ranks_here() -> None:
    assert getattr(task_here(HostsConfig(), None, environment=SLURM), "index", None) == 2
    assert task_here(HostsConfig(), 3, environment=SLURM) is not None
    assert task_here(HostsConfig(nproc_per_node=2), 2, environment=SLURM) is None
    assert task_here(HostsConfig(nnodes=2, node_rank=1, master="n08:8600"), None, environment=SLURM) is None
    alone = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert task_here(HostsConfig(), 4, environment=alone) is None
    with pytest.raises(UsageError, match=r"--nranks 4 contradicts Slurm, which has started 3 tasks \(SLURM_PROCID=2.*"):
        task_here(HostsConfig(), 4, environment=SLURM)
    with pytest.raises(UsageError, match="--nranks 3 contradicts Slurm, which has started 3 tasks, 1 of them servers"):
        task_here(HostsConfig(), 3, servers=1, environment=SLURM)
    with pytest.raises(UsageError, match="--log-dir is for ranks that a launcher starts; this is task 2 of 3 of Slurm"):
        task_here(HostsConfig(), None, refused={"trace": None, "log-dir": "logs"}, environment=SLURM)


def test_tasks_that_cannot_meet_are_told_so() -> None:
    task = task_from({"PMI_RANK": "0", "PMI_SIZE": "2"})
    assert task is not None
    with pytest.raises(UsageError, match=r"task 0 of 2 of MPI .* on several hosts, .* set GRADSYNC_RENDEZVOUS"):
        place_of(task)


def test_a_program_that_imports_a_scheme_is_told_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**SLURM})
    monkeypatch.setattr("common.launch.adopting._adopted", None)
    assert (told_by_engine().rank, told_by_engine().nranks) == (2, 3)
    assert adopt() is adopted()
    names = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_LOCAL_RANK", "PADDLE_NNODES", "GRADSYNC_ENGINE")
    assert [os.environ[name] for name in names] == ["2", "3", "0", "2", "Slurm"]
    place = placement_from()
    assert (place.rank, place.nranks, place.rendezvous) == (2, 3, "n08:21712")
    assert adopt() is None  # it has its place now, as its children have
    monkeypatch.setattr(os, "environ", {})
    assert adopt() is None
    assert (told_by_engine().rank, told_by_engine().nranks) == (0, 2)
