"""The rows of sweep.json: times, bandwidths, and how near each comes to what the machine allows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Protocol

from msgspec.structs import replace

from benchmarks.netlab.config import ClusterConfig
from benchmarks.operations.link import link_bytes
from benchmarks.operations.measured import Measured
from benchmarks.records.sweep import Row, ServerMemory
from benchmarks.stats.interval import interval
from common.system.process_memory import ProcessMemory

__all__ = ["Asked", "row_of", "rows_of"]

BETWEEN_HOSTS = ("ps-tcp", "ps-grpc", "ps-tcp-tls", "ps-grpc-tls")
MARGIN = 100e6  # bytes that a server may use beside its data
LIMITS = {  # of a backend and its variants, as in shm-copied
    "shm": "memory-limit",
    "tcp": "loopback-limit",
    "nccl": "nccl-raw",
    "torch-nccl": "nccl-raw",
    **dict.fromkeys(("ps", "ray", "torch-rpc"), "round-limit"),
}


class Asked(Protocol):
    """The flags of a sweep that its rows depend on."""

    @property
    def op(self) -> str: ...

    @property
    def bytes(self) -> list[int]: ...

    @property
    def servers(self) -> int: ...

    @property
    def cluster(self) -> ClusterConfig: ...


def rows_of(measured: Measured, backends: Sequence[str], nranks: int, asked: Asked) -> list[Row]:
    """The link's row first, if there is one; then size by size."""
    rows = []
    rate = 0.0
    if asked.cluster.hosts is not None:
        nbytes = link_bytes(asked.cluster)
        times = measured.medians.get(("link", nbytes))
        if times is None:  # interrupted before the end of the first round
            return []
        rows.append(row_of("link", nranks, nbytes, times, 0, None))
        rate = nbytes / median(times)

    def bound(backend: str, nbytes: int) -> float | None:
        """The least time, in seconds."""
        if backend in BETWEEN_HOSTS and rate:
            return asked.cluster.round_seconds(nbytes, rate, nranks, asked.servers)
        if rate and asked.op == "broadcast":
            return asked.cluster.broadcast_seconds(nbytes, rate, nranks)
        if rate:
            return asked.cluster.ring_seconds(nbytes, rate, nranks)
        limit = measured.medians.get((LIMITS.get(backend, LIMITS.get(backend.partition("-")[0], "")), nbytes))
        return median(limit) if limit else None

    for nbytes in asked.bytes:
        for backend in backends:
            key = (backend, nbytes)
            if key in measured.medians:  # else it failed
                limit, times, wrong = bound(backend, nbytes), measured.medians[key], measured.wrong[key]
                row = row_of(backend, nranks, nbytes, times, wrong, limit, op=asked.op)
                if nbytes == max(asked.bytes) and (memory := measured.memory.get(backend)):
                    used = memory_of_server(memory, backend, nranks, nbytes, asked.servers)
                    row = replace(row, server_memory=used)
                rows.append(row)
    return rows


def memory_of_server(memory: ProcessMemory, backend: str, nranks: int, nbytes: int, servers: int) -> ServerMemory:
    """In MB, above that after imports. Its limit: the parameters, one buffer of gradients (between hosts one for
    each rank), and 100 MB; SGD keeps nothing."""
    buffers = nranks if backend in BETWEEN_HOSTS else 1
    limit = (1 + buffers) * nbytes / servers + MARGIN
    return ServerMemory(pss=memory.pss / 1e6, own=memory.own / 1e6, limit=limit / 1e6)


def row_of(
    backend: str,
    nranks: int,
    nbytes: int,
    times: Sequence[float],
    wrong: int,
    limit: float | None,
    *,
    op: str = "all_reduce",
) -> Row:
    """Bandwidths as nccl-tests defines them: algbw = bytes/time, busbw = algbw x 2(N-1)/N, of a broadcast algbw.

    Args:
        times: the median of each round, in seconds.
        limit: the least time there can be, in seconds, if it is known.
    """
    middle, in_ms = median(times), [1e3 * each for each in times]
    factor = 1.0 if op == "broadcast" else 2 * (nranks - 1) / nranks
    low, high = interval(in_ms)
    return Row(
        backend=backend,
        nranks=nranks,
        bytes=nbytes,
        time_ms=1e3 * middle,
        time_ms_interval=(low, high),
        time_ms_rounds=in_ms,
        algbw_gb_s=nbytes / middle / 1e9,
        busbw_gb_s=nbytes / middle / 1e9 * factor,
        of_limit=limit / middle if limit else None,
        wrong=wrong,
    )
