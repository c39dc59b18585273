"""What has started this process, and as which of how many: one table of engines, read from the environment.

Whoever stands further up in the table was started further in: torchrun or Open MPI within a step of Slurm, ranks of our
launchers within any.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

from common.errors import UsageError
from common.launch.ranks import FIRST_PORT, paddle_environment
from common.system.addresses import address_of
from common.system.sigterm import ENGINE_VARIABLE

__all__ = ["ENGINES", "PORT", "RENDEZVOUS_VARIABLE", "TASKS_VARIABLE", "Engine", "Task", "task_from"]

Environment = Mapping[str, str]
Source = str | Callable[[Environment], str]  # a variable, or what makes it out of several; "": not told

RENDEZVOUS_VARIABLE = "GRADSYNC_RENDEZVOUS"  # where all meet, whatever an engine says
TASKS_VARIABLE = "GRADSYNC_TASKS"  # how many there are, where an engine does not say
PORT = 8600  # where a job has an address of its own
PORTS = range(20000, 30000)  # where jobs share hosts, each takes one by its number: below those that systems give away


@dataclass(frozen=True)
class Task:
    """One of the processes that an engine has started together.

    Args:
        engine: its name, for people.
        because: the variables that say so, for people.
        index, count: which task this is, and of how many.
        local, here: which of its host's, and of how many.
        endpoints: a name for each task in Paddle's form, its host and a port; nobody listens there. Hosts of which the
            engine does not tell have made-up names.
        meeting: where all can meet, and task 0 can listen: HOST:PORT, or a socket of this host; "": nobody says.
    """

    engine: str
    because: str
    index: int
    count: int
    local: int
    here: int
    endpoints: tuple[str, ...]
    meeting: str

    @property
    def placed(self) -> bool:
        """A launcher has told it Paddle's variables: it is a rank, and no task that may become one."""
        return self.engine == PADDLE.name

    @property
    def hosts(self) -> int:
        """How many there are, as far as is known."""
        return len({endpoint.rpartition(":")[0] for endpoint in self.endpoints})

    def environment(self, rank: int, nranks: int) -> dict[str, str]:
        """What a launcher would tell it as that rank, of the last `nranks` tasks."""
        local = rank if self.hosts == 1 else self.local
        told = paddle_environment(rank, self.endpoints[-nranks:], nnodes=self.hosts, local=local)
        return {**told, ENGINE_VARIABLE: self.engine}

    def __str__(self) -> str:
        return f"task {self.index} of {self.count} of {self.engine} ({self.because})"


@dataclass(frozen=True)
class Engine:
    """A row of the table: where each column of a Task comes from.

    Args:
        because: variables to be shown; by default those of index and count.
        job: tells jobs of one host apart.
        place: HOST:PORT where tasks of several hosts meet.
        hosts: of every task, separated by commas.
        endpoints: likewise, with ports.
    """

    name: str
    index: Source
    count: Source
    local: Source = ""
    here: Source = ""
    because: tuple[str, ...] = ()
    job: Source = ""
    place: Source = ""
    hosts: Source = ""
    endpoints: Source = ""

    def task(self, env: Environment) -> Task | None:
        """None: this engine has not started this process.

        Raises:
            UsageError: it contradicts itself.
        """
        if not (said(self.index, env) and said(self.count, env)):
            return None
        names = self.because or tuple(name for name in (self.index, self.count) if isinstance(name, str))
        because = ", ".join(f"{name}={env.get(name, '')}" for name in names)
        index, count = self._number(self.index, env), self._number(self.count, env)
        if not 0 <= index < count:
            raise UsageError(f"{self.name}: rank {index} is outside 0..{count - 1} ({because})")
        here = self._number(self.here, env, 1)
        endpoints = self._endpoints(env, count, here)
        local = self._number(self.local, env, 0)
        meeting = env.get(RENDEZVOUS_VARIABLE) or self._meeting(env, alone=here == count, endpoints=endpoints)
        return Task(self.name, because, index, count, local, here, endpoints, meeting)

    def _number(self, source: Source, env: Environment, default: int = 0) -> int:
        text = said(source, env) or str(default)
        if not text.isdecimal():
            what = source if isinstance(source, str) else ", ".join(self.because)
            raise UsageError(f"{self.name}: {what} must be a whole number (got {text!r})")
        return int(text)

    def _endpoints(self, env: Environment, count: int, here: int) -> tuple[str, ...]:
        if told := tuple(filter(None, said(self.endpoints, env).split(","))):
            if len(told) != count:
                raise UsageError(f"{self.endpoints} names {len(told)} ranks, {self.count} says {count}")
            return told
        hosts = said(self.hosts, env).split(",")
        if len(hosts) != count:
            hosts = ["127.0.0.1"] * count if here == count else [f"host-{index // here}" for index in range(count)]
        return tuple(address_of(host, FIRST_PORT + hosts[:i].count(host)) for i, host in enumerate(hosts))

    def _meeting(self, env: Environment, *, alone: bool, endpoints: tuple[str, ...]) -> str:
        if not (alone or len({endpoint.rpartition(":")[0] for endpoint in endpoints}) == 1):
            return said(self.place, env)
        job = said(self.job, env)
        if not job:
            return f"127.0.0.1:{PORT}"
        kind = "" if self is PADDLE else f"{self.name.lower().replace(' ', '-')}-"
        return f"unix-abstract:gradsync-{os.getuid()}-{kind}{re.sub('[^A-Za-z0-9.]+', '-', job)}"


def said(source: Source, env: Environment) -> str:
    return env.get(source, "") if isinstance(source, str) else source(env)


def first_endpoint(env: Environment) -> str:
    """Paddle's launcher keeps it free."""
    return env.get("PADDLE_TRAINER_ENDPOINTS", "").partition(",")[0]


def beside_master(env: Environment) -> str:
    """torchrun itself listens at the master's port."""
    taken = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return address_of(env["MASTER_ADDR"], int(env["MASTER_PORT"]) + taken)


def torch_rank(env: Environment) -> str:
    """These names are everybody's; torchrun's come together."""
    return env.get("RANK", "") if env.get("MASTER_ADDR") and env.get("MASTER_PORT", "").isdecimal() else ""


def beside_mpirun(env: Environment) -> str:
    """On mpirun's own host, which runs rank 0 as a rule: NUMBER;tcp://HOST,HOST:PORT;..."""
    uri = re.search(r";tcp4?://([^,:;\[\]]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    return address_of(uri[1], port_of(env.get("PMIX_NAMESPACE", "0"))) if uri else ""


def pmi_rank(env: Environment) -> str:
    """Slurm has PMI's variables beside its own, which tell more."""
    theirs = env.get("PMI_RANK", ""), env.get("PMI_SIZE", "")
    return "" if theirs == (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS")) else theirs[0]


def slurm_hosts(env: Environment) -> str:
    """As srun places tasks unless told otherwise: one host is filled after the other."""
    each = slurm_tasks_each(env)
    hosts = hosts_of(env.get("SLURM_STEP_NODELIST", ""))
    return ",".join(host for host, tasks in zip(hosts, each, strict=False) for _ in range(tasks))


def slurm_here(env: Environment) -> str:
    each, node = slurm_tasks_each(env), env.get("SLURM_NODEID", "")
    return str(each[int(node)]) if node.isdecimal() and int(node) < len(each) else ""


def slurm_tasks_each(env: Environment) -> list[int]:
    """
    >>> slurm_tasks_each({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"})
    [2, 2, 2, 1]
    """
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


def slurm_place(env: Environment) -> str:
    """The step's first host, where task 0 is."""
    hosts = hosts_of(env.get("SLURM_STEP_NODELIST", ""))
    number = env.get("SLURM_JOB_ID", "0") + env.get("SLURM_STEP_ID", "0")
    return address_of(hosts[0], port_of(number)) if hosts else ""


def hosts_of(text: str) -> list[str]:
    """The hosts of a list as Slurm writes it.

    >>> hosts_of("node[01-03,7],login")
    ['node01', 'node02', 'node03', 'node7', 'login']
    """
    found = []
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        parts = [numbers_of(part[1:-1]) if part.startswith("[") else [part] for part in re.split(r"(\[[^\]]*\])", name)]
        found += ["".join(each) for each in product(*parts)]
    return found


def numbers_of(text: str) -> list[str]:
    """Of "01-03,7", as texts of equal width within a range."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return found


def port_of(number: str) -> int:
    """A port for the job of that number."""
    return PORTS[int(number) % len(PORTS)] if number.isdecimal() else PORTS[0]


def paddle_job_index(env: Environment) -> str:
    """Kubeflow tells pods apart by name only: JOB-worker-3; with servers, JOB-master-0 is one."""
    pod = re.search(r"-(worker|master)-(\d+)$", env.get("HOSTNAME", ""))
    if not pod or "PADDLE_JOB_ID" not in env:
        return ""
    servers = env.get("GRADSYNC_SERVERS", "0") if pod[1] == "worker" else "0"
    return str(int(pod[2]) + (int(servers) if servers.isdecimal() else 0))


def indexed_job_place(_: Environment) -> str:
    """Pods of an Indexed Job are called JOB-INDEX, and have names beside each other in its headless service."""
    first, dot, service = socket.getfqdn().partition(".")
    job = re.sub(r"-\d+$", "", first)
    return f"{job}-0{dot}{service}:{PORT}"


def kubeflow_place(env: Environment) -> str:
    host, port = env.get("PET_MASTER_ADDR", ""), env.get("PET_MASTER_PORT", "")
    return f"{host}:{port}" if host and port else ""


PADDLE = Engine(
    "Paddle's launcher or ours",
    index=lambda env: env.get("PADDLE_TRAINER_ID", "0") if env.get("PADDLE_TRAINERS_NUM") else "",
    count="PADDLE_TRAINERS_NUM",
    local="PADDLE_LOCAL_RANK",
    because=("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    endpoints="PADDLE_TRAINER_ENDPOINTS",
    job=first_endpoint,
    place=first_endpoint,
)
ENGINES = (
    PADDLE,
    Engine(
        "torchrun",
        index=torch_rank,
        count="WORLD_SIZE",
        local="LOCAL_RANK",
        here="LOCAL_WORLD_SIZE",
        because=("RANK", "WORLD_SIZE"),
        job="MASTER_PORT",
        place=beside_master,
    ),
    Engine(
        "Open MPI",
        index="OMPI_COMM_WORLD_RANK",
        count="OMPI_COMM_WORLD_SIZE",
        local="OMPI_COMM_WORLD_LOCAL_RANK",
        here="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=lambda env: env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_orte_hnp_uri", ""),
        place=beside_mpirun,
    ),
    Engine(
        "MPI",
        index=pmi_rank,
        count="PMI_SIZE",
        local="MPI_LOCALRANKID",
        here="MPI_LOCALNRANKS",
        because=("PMI_RANK", "PMI_SIZE"),
    ),
    Engine(
        "Slurm",
        index="SLURM_PROCID",
        count="SLURM_STEP_NUM_TASKS",
        local="SLURM_LOCALID",
        here=slurm_here,
        job=lambda env: f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}",
        hosts=slurm_hosts,
        place=slurm_place,
    ),
    Engine(
        "Kubeflow PaddleJob",
        index=paddle_job_index,
        count="PADDLE_NNODES",
        because=("HOSTNAME", "PADDLE_NNODES"),
        place="PADDLE_MASTER",
    ),
    Engine("Kubeflow Trainer", index="PET_NODE_RANK", count="PET_NNODES", place=kubeflow_place),
    Engine("Kubernetes Indexed Job", index="JOB_COMPLETION_INDEX", count=TASKS_VARIABLE, place=indexed_job_place),
)


def task_from(environment: Environment | None = None) -> Task | None:
    """What the engine that has started this process says of it; None: none of the table has.

    Raises:
        UsageError: it contradicts itself.
    """
    env = os.environ if environment is None else environment
    return next((task for engine in ENGINES if (task := engine.task(env)) is not None), None)
