"""A Slurm of two nodes on this machine, for tests: munged, slurmctld and two slurmd, in a folder of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NODES", "Slurm", "slurm", "why_no_slurm"]

HOST = socket.gethostname().partition(".")[0]
NODES = ("127.0.0.2", "127.0.0.3")  # names that are addresses of this machine
DAEMONS = ("munged", "slurmctld", "slurmd")
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))
START_S = 30.0
END_S = 5.0
CONFIG = """
ClusterName=gradsync
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
MailProg=/bin/true
KillWait=5
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=main Nodes=ALL Default=YES
"""


def why_no_slurm() -> str:
    """Why there can be none here; "" if there can."""
    missing = [name for name in (*DAEMONS, "srun", "sbatch") if shutil.which(name, path=PATH) is None]
    if missing:
        return f"there is no {missing[0]} (apt-get install slurmctld slurmd slurm-client munge)"
    if os.geteuid() != 0:
        return "slurmd needs root"
    return ""


@dataclass(frozen=True)
class Slurm:
    """One that runs.

    Args:
        environment: with which its commands find it.
    """

    environment: dict[str, str]

    def run(self, *command: object, limit: float = 100.0, **variables: str) -> subprocess.CompletedProcess[str]:
        """What a command of its, srun or sbatch, says."""
        return subprocess.run(
            [*map(str, command)],
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start one, and end it and all its jobs."""
    for name in ("munge", "state"):
        (folder / name).mkdir()
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(folder=folder, nodes=NODES, host=HOST, ports=free_ports(3)))
    running = Slurm({**os.environ, "SLURM_CONF": str(config)})
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        program = shutil.which(command[0], path=PATH) or command[0]
        with (folder / f"{command[0]}.out").open("ab") as out:
            daemons.append(
                subprocess.Popen([program, *command[1:]], env=running.environment, stdout=out, stderr=subprocess.STDOUT)
            )

    try:
        start("munged", "--foreground", "--force", *munges_files(folder / "munge"))
        start("slurmctld", "-D", "-c")
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        wait_for_nodes(running, folder)
        try:
            yield running
        finally:
            running.run("scancel", "--full", "--user=root")
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(END_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def munges_files(folder: Path) -> list[str]:
    """Its flags, with a key of its own."""
    key = folder / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return [f"--{flag}={folder / name}" for flag, name in files.items()]


def wait_for_nodes(running: Slurm, folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while (states := running.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()) != ["idle", "idle"]:
        if time.monotonic() > deadline:
            logs = "".join(path.read_text(errors="replace")[-500:] for path in folder.glob("*.log"))
            raise TimeoutError(f"Slurm's nodes are {states} after {START_S:g} s\n{logs}")
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Ports that nobody had a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
