"""A cluster of Ray's of three nodes on this machine, in a process of its own: says its address, loses a node if it is
told so, and ends with its standard input."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.groups import ROOT, environment

__all__ = ["ANY_MEMORY", "RayCluster", "ray_cluster"]

STORE_BYTES = 100_000_000  # of each node's objects
CORES = 2
ANY_MEMORY = {"RAY_memory_monitor_refresh_ms": "0"}  # nobody is ended for what others use of this machine's


class RayCluster:
    """The test's side."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._hear()

    def lose_a_node(self) -> None:
        """Kill the last one; returns once that is done."""
        assert self._process.stdin
        self._process.stdin.write("kill\n")
        self._process.stdin.flush()
        assert self._hear() == "killed"

    def _hear(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    command = [sys.executable, "-m", "tests.support.ray_cluster"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield RayCluster(process)
        finally:
            process.communicate(timeout=60)


def main() -> None:
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_AUTH_MODE": "disabled", **ANY_MEMORY}
    node = {"num_cpus": CORES, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        others = [cluster.add_node(**node) for _ in range(2)]
        print(cluster.address, flush=True)
        for line in sys.stdin:
            assert line == "kill\n"
            cluster.remove_node(others.pop(), allow_graceful=False)
            print("killed", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
