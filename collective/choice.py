"""Which backend and algorithm a group takes: pure functions of what is asked for and where the ranks are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from collective.algorithms.hierarchical import neighbours, ranks_each
from common.errors import UsageError, choose

__all__ = ["ALGORITHMS", "BACKENDS", "MeetingPlace", "Topology", "choose_backend", "topology_of"]

BACKENDS = ("auto", "shm", "tcp", "nccl", "nccl-ring")
MOST_DIRECT = 32  # ranks that have a data connection each with each, unless algorithm direct is asked for
ALGORITHMS = ("auto", "ring", "direct", "hierarchical")

# What a backend takes for what is asked for. The first is taken that fits: a hierarchy needs hosts that are alike.
TAKEN: dict[tuple[str, str], tuple[str, ...]] = {
    ("shm", "auto"): ("direct",),
    ("shm", "direct"): ("direct",),
    ("tcp", "auto"): ("hierarchical", "direct"),
    ("tcp", "direct"): ("direct",),
    ("tcp", "ring"): ("ring",),
    ("tcp", "hierarchical"): ("hierarchical",),
    ("nccl", "auto"): ("nccl",),  # NCCL's own
    ("nccl", "ring"): ("ring",),
    ("nccl-ring", "auto"): ("ring",),
    ("nccl-ring", "ring"): ("ring",),
}


@dataclass(frozen=True)
class MeetingPlace:
    """Where ranks meet: the host's part of a rendezvous, and whether that is this host."""

    host: str
    local: bool

    @classmethod
    def of(cls, rendezvous: str) -> MeetingPlace:
        """
        >>> MeetingPlace.of("[::1]:8600"), MeetingPlace.of("unix-abstract:x").local
        (MeetingPlace(host='::1', local=True), True)
        """
        host = rendezvous.rpartition(":")[0].strip("[]")
        return cls(host, rendezvous.startswith("unix") or host in ("127.0.0.1", "localhost", "::1"))


@dataclass(frozen=True)
class Topology:
    """With whom a rank is connected, and how."""

    algorithm: str
    local: Sequence[int] = ()  # ranks, itself among them, with which it shares memory
    linked: Sequence[int] = ()  # ranks with which it exchanges data over TCP


def choose_backend(backend: str, algorithm: str, device: str, place: MeetingPlace) -> str:
    """What `auto` means, or the backend itself.

    Raises:
        UsageError: backend, algorithm, device and place do not go together.
    """
    if backend == "gloo":
        raise UsageError("backend gloo is Paddle's own: leave it out, shared memory or TCP are chosen by themselves")
    choose("backend", backend, BACKENDS)
    choose("algorithm", algorithm, ALGORITHMS)
    on_gpu = device.startswith("gpu:")
    if backend == "auto":
        backend = "nccl" if on_gpu else "shm" if place.local and algorithm != "ring" else "tcp"
    if backend == "shm" and not place.local:
        raise UsageError(f"backend shm needs all ranks on one host, the rendezvous is at {place.host}; use tcp")
    if (backend, algorithm) not in TAKEN:
        raise UsageError(refusal(backend, algorithm))
    if backend in ("shm", "tcp") and on_gpu:
        raise UsageError(f"backend {backend} works on the host's memory, not on {device}; use nccl or nccl-ring")
    return backend


def refusal(backend: str, algorithm: str) -> str:
    """Why the two do not go together."""
    if backend != "shm":
        return f"algorithm {algorithm} is for the host's memory (backend is {backend}); use auto or ring"
    what = "for ranks of several hosts" if algorithm == "hierarchical" else "for tcp and nccl"
    return f"algorithm {algorithm} is {what} (backend is {backend}); use direct"


def topology_of(backend: str, algorithm: str, rank: int, hosts: Sequence[str]) -> Topology:
    """The same choice on every rank, from every rank's host.

    Raises:
        UsageError: the hierarchical algorithm does not fit.
    """
    everyone, each = range(len(hosts)), ranks_each(hosts)
    fitting = [taken for taken in TAKEN[backend, algorithm] if fits(taken, asked=algorithm, ranks_each_host=each)]
    if not fitting:
        counts = ", ".join(str(hosts.count(host)) for host in dict.fromkeys(hosts))
        raise UsageError(
            "algorithm hierarchical needs two or more hosts with equally many ranks, numbered host by host "
            f"(ranks on each host here: {counts}); use direct"
        )
    taken = fitting[0]
    if backend.startswith("nccl"):
        return Topology(taken, local=everyone if len(set(hosts)) == 1 else ())
    if backend == "shm":
        return Topology(taken, local=everyone)
    if taken == "hierarchical":
        first = rank // each * each
        return Topology(taken, range(first, first + each), sorted({*neighbours(rank, len(hosts), each)}))
    if taken == "direct" and algorithm == "auto" and len(hosts) > MOST_DIRECT:
        taken = "ring"
    linked = neighbours(rank, len(hosts), 1) if taken == "ring" else everyone
    return Topology(taken, linked=sorted({*linked} - {rank}))


def fits(algorithm: str, *, asked: str, ranks_each_host: int) -> bool:
    """Whether the hosts suit it: a hierarchy of one rank each is only taken if it is asked for."""
    return algorithm != "hierarchical" or ranks_each_host >= (1 if asked == "hierarchical" else 2)
