"""A node of Ray's on each of several emulated hosts, with Ray's token authentication."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from benchmarks.netlab.cluster import Cluster
from tests.support.ray_cluster import ANY_MEMORY, CORES, STORE_BYTES

__all__ = ["PORT", "ray_on_hosts", "started"]

PORT = 6379
STARTED = "Ray runtime started."
LIMIT_S = 60.0
END_S = 10.0


@contextmanager
def ray_on_hosts(hosts: Cluster, folder: Path) -> Iterator[dict[str, str]]:
    """The environment of its drivers; host 0 has the head."""
    token = folder / "ray-token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    told = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), **ANY_MEMORY}
    with ExitStack() as stack:
        for host in range(len(hosts.links)):
            stack.enter_context(started(hosts, host, folder / f"node-{host}", told))
        yield told


@contextmanager
def started(hosts: Cluster, host: int, log: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """One node."""
    head = f"{hosts.address(0)}:{PORT}"
    where = ["--address", head] if host else ["--head", "--port", str(PORT), "--include-dashboard", "false"]
    command = [
        *hosts.within(host),
        *(str(Path(sys.executable).with_name("ray")), "start", "--block", *where),
        *("--node-ip-address", hosts.address(host), "--num-cpus", str(CORES)),
        *("--object-store-memory", str(STORE_BYTES), "--disable-usage-stats"),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + LIMIT_S
        while STARTED not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield
    finally:
        parts = [] if process.poll() is not None else psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        _, slow = psutil.wait_procs(parts, END_S)
        for each in slow:  # the dashboard's agents take long at times, and `ray start` waits for them
            each.kill()
        process.wait(END_S)
