"""What goes wrong, to whom, under which scheme, and what is promised then: a table of cases.

row 1    a rank is killed                       PeerLost, within K of all others
    2    the server, or the rank where the others have met, is killed: likewise
    4    a process is frozen                    for longer than the timeout: PeerStalled, within S
                                                for shorter: the bits of an undisturbed run
    5    a link is cut, or carries nothing      for longer: PeerUnreachable, within S, at both ends
         one of its two ways
                                                for shorter: the bits of an undisturbed run
    6    a link loses packets, brings them twice, or late: the bits of an undisturbed run, or an error that says so
    7    a message is lost, comes twice, after the next one, late, or from an epoch before: likewise
    8    a bit flips above TCP, with TLS and with --insecure: likewise
    21   simulated trainers, servers, network   see simulator.py and ring_simulator.py
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

from benchmarks.faults.interceptor import FATES, STRUCK, Interception
from benchmarks.faults.ring_simulator import simulate_ring
from benchmarks.faults.running import Process, Running
from benchmarks.faults.simulated import PromiseBroken
from benchmarks.faults.simulator import simulate
from benchmarks.netlab.cluster import Cluster, why_no_cluster
from benchmarks.netlab.hosts import OneHost
from benchmarks.netlab.mishaps import Mishaps

__all__ = ["CASES", "K_S", "SIMULATORS", "TIMEOUT_S", "Case", "NotKept", "simulation"]

TIMEOUT_S = 2.0
K_S = 1.0  # to notice that a process has died
S_S = TIMEOUT_S + 1.0  # that one is silent
TRAINERS_S = 1.0  # which a trainer waits longer for its server, so that the server, which knows more, speaks first
SHORT_S = TIMEOUT_S / 4
AT, STEPS, FEW_STEPS, LIMIT_S = 5, 60, 15, 40.0
HOSTS = 2
ROUGH_TIMEOUT_S, ROUGH_WAIT_S, LONG_S = 5.0, 30.0, 120.0  # where TCP sends packets again, after ever longer pauses
MANY = 0.1
MENDED = 0.01  # so many losses cost no process its patience
SHARES = {  # of packets: lost, twice, late
    "1 % of the packets lost": (0.01, 0.0, 0.0),
    "5 % of the packets lost": (0.05, 0.0, 0.0),
    "20 % of the packets lost": (0.2, 0.0, 0.0),
    "10 % of the packets twice": (0.0, 0.1, 0.0),
    "10 % of the packets late, behind later ones": (0.0, 0.0, 0.1),
}


class NotKept(Exception):
    """What is promised did not come, in words."""


@dataclass(frozen=True)
class Case:
    """
    Args:
        run: makes it once, and returns after how many seconds each process noticed; raises NotKept.
    """

    row: int
    name: str
    scheme: str
    backend: str
    promise: str
    run: Callable[[], Sequence[float]]
    needs_hosts: bool = False

    @property
    def why_not_here(self) -> str:
        return why_no_cluster() if self.needs_hosts else ""


def notices(running: Running, victim: Process, kind: str, limit: float, begun: float, whom: str) -> list[float]:
    """After how long each other rank failed with this error, in whose words `whom` is."""
    found = []
    for rank in running.ranks:
        if rank is victim:
            continue
        running.until(lambda rank=rank: rank.over, LIMIT_S, f"end of {rank.name}")  # type: ignore[misc]
        failed = rank.failed
        if failed is None:
            raise NotKept(f"{rank.name} did not fail: {rank.lines[-3:]}")
        if failed.kind != kind or whom not in failed.words:
            raise NotKept(f"{rank.name} failed with {failed.kind}: {failed.words}")
        if failed.at - begun > limit:
            raise NotKept(f"{rank.name} noticed after {failed.at - begun:.2f} s: {failed.words}")
        found.append(failed.at - begun)
    return found


def one_host(scheme: str, backend: str, *, nranks: int = 3, steps: int = 100_000) -> Running:
    return Running(OneHost(), scheme, backend, nranks=nranks, timeout=TIMEOUT_S, steps=steps)


def stopped(scheme: str, backend: str, who: int, number: signal.Signals, kind: str, limit: float) -> Sequence[float]:
    """A process is sent a signal that ends or stops it. `who`: the rank; -1: the server."""
    with one_host(scheme, backend) as running:
        running.at_step(AT)
        victim = running.ranks[who] if who >= 0 else running.server
        assert victim is not None
        begun = time.monotonic()
        victim.send(number)
        return notices(running, victim, kind, limit, begun, victim.name)


def ends_in_the_same_bits(running: Running, steps: int = STEPS) -> None:
    running.until(lambda: all(rank.over for rank in running.ranks), LIMIT_S, "end of all ranks")
    digests = {rank.digest or str(rank.lines[-1:]) for rank in running.ranks}
    if digests != {undisturbed(running.nranks, steps)}:
        raise NotKept(f"the ranks ended with {sorted(digests)}")


@cache
def undisturbed(nranks: int, steps: int) -> str:
    """The digest of a run to which nothing happens; every scheme's is the same."""
    with one_host("ring", "shm", nranks=nranks, steps=steps) as running:
        running.until(lambda: all(rank.over for rank in running.ranks), LIMIT_S, "end of all ranks")
        return running.ranks[0].digest


def paused(scheme: str, backend: str, who: int) -> Sequence[float]:
    """A process is frozen for a moment."""
    with one_host(scheme, backend, steps=STEPS) as running:
        running.at_step(AT)
        victim = running.ranks[who] if who >= 0 else running.server
        assert victim is not None
        victim.send(signal.SIGSTOP)
        time.sleep(SHORT_S)
        victim.send(signal.SIGCONT)
        ends_in_the_same_bits(running)
    return []


def cut(scheme: str, backend: str, how: Callable[[Cluster, int], None], limit: float) -> Sequence[float]:
    """The second host's link carries nothing any more, one way or both; rank 1 is there."""
    with Cluster([0] * HOSTS) as cluster, Running(cluster, scheme, backend, timeout=TIMEOUT_S) as running:
        running.at_step(AT)
        begun = time.monotonic()
        how(cluster, 1)
        first, second = running.ranks
        other = "rank 0" if scheme == "ring" else "server 0"
        return [
            *notices(running, second, "PeerUnreachable", limit, begun, "rank 1"),
            *notices(running, first, "PeerUnreachable", limit, begun, other),
        ]


def healed(
    scheme: str, backend: str, how: Callable[[Cluster, int], None], mend: Callable[[Cluster, int], None]
) -> Sequence[float]:
    """Likewise, for a moment."""
    with (
        Cluster([0] * HOSTS) as cluster,
        Running(cluster, scheme, backend, timeout=TIMEOUT_S, steps=STEPS) as running,
    ):
        running.at_step(AT)
        how(cluster, 1)
        time.sleep(SHORT_S)
        mend(cluster, 1)
        ends_in_the_same_bits(running)
    return []


def rough(scheme: str, backend: str, lost: float, twice: float, late: float) -> Sequence[float]:
    """The second host's link loses and doubles these shares of the packets, and brings them late. TCP mends that; where
    many are lost it may take so long that a process gives up, and says so."""
    steps = FEW_STEPS if lost > MANY else STEPS
    with (
        Cluster([0] * HOSTS) as cluster,
        Mishaps(cluster, 1, lost=lost, twice=twice, late=late),
        Running(cluster, scheme, backend, timeout=ROUGH_TIMEOUT_S, wait_limit=ROUGH_WAIT_S, steps=steps) as running,
    ):
        running.until(lambda: all(rank.over for rank in running.ranks), LONG_S, "end of all ranks")
        if lost <= MENDED or all(rank.digest for rank in running.ranks):
            ends_in_the_same_bits(running, steps)
        elif not all(rank.digest == undisturbed(running.nranks, steps) or rank.gave_up for rank in running.ranks):
            raise NotKept(f"the ranks ended with {[rank.lines[-1:] for rank in running.ranks]}")
    return []


def intercepted(scheme: str, backend: str, what: Interception) -> Sequence[float]:
    """One message does not come as it was sent."""
    with Running(
        OneHost(), scheme, backend, timeout=TIMEOUT_S, wait_limit=TIMEOUT_S, steps=STEPS, interception=what
    ) as running:
        running.until(lambda: all(rank.over for rank in running.ranks), LIMIT_S, "end of all ranks")
        lines = [line for process in running.all() for line in process.lines]
        if not any(line.startswith(STRUCK) for line in lines):
            raise NotKept(f"there was no {what.kind} number {what.number}")
        right_or_named(running)
    return []


def right_or_named(running: Running) -> None:
    if all(rank.gave_up for rank in running.ranks):
        return
    ends_in_the_same_bits(running)


def flipped(scheme: str, backend: str, *, secure: bool) -> Sequence[float]:
    """Bits of what goes over the second host's link flip."""
    with (
        Cluster([0] * HOSTS) as cluster,
        Mishaps(cluster, 1, flipped=FLIPPED),
        Running(cluster, scheme, backend, timeout=TIMEOUT_S, wait_limit=TIMEOUT_S, secure=secure) as running,
    ):
        running.until(lambda: all(rank.over for rank in running.ranks), LIMIT_S, "end of all ranks")
        if not all(rank.gave_up for rank in running.ranks):
            raise NotKept(f"the ranks ended with {[rank.lines[-1:] for rank in running.ranks]}")
    return []


SIMULATORS: dict[str, Callable[..., object]] = {"ps": simulate, "ring": simulate_ring}


def simulation(scheme: str, first: int, count: int) -> Sequence[float]:
    """So many seeds from the first on."""
    for seed in range(first, first + count):
        try:
            SIMULATORS[scheme](seed)
        except PromiseBroken as exc:
            raise NotKept(str(exc)) from exc
    return []


ONE_WAY_S = 1.0  # more: one end learns of it by the other's end
CUTS = (
    ("a link cut", Cluster.unplug, Cluster.plug, 0.0),
    ("a link that carries nothing to the others", Cluster.mute, Cluster.mend, ONE_WAY_S),
    ("a link that carries nothing from the others", Cluster.deafen, Cluster.mend, ONE_WAY_S),
)
FLIPPED = 0.005  # of the packets with data
MISSED = (  # by servers
    Interception("gradients", "doubled", 5, 1),
    Interception("gradients", "of an old epoch", 5, 1),
    Interception("server's served", "lost", 5, -1),
)
WAYS = (("ring", "shm"), ("ring", "tcp"), ("ps", "shm"), ("ps", "tcp"), ("ps", "grpc"))
BETWEEN = (("ring", "tcp"), ("ps", "tcp"), ("ps", "grpc"))
SAME_BITS = "the bits of an undisturbed run"


def table() -> list[Case]:
    found = []
    for scheme, backend in WAYS:
        way = (scheme, backend)
        hub, hub_name = (-1, "the server") if scheme == "ps" else (0, "the rank where all met")
        kill, freeze = partial(stopped, *way, number=signal.SIGKILL), partial(stopped, *way, number=signal.SIGSTOP)
        lost = partial(kill, kind="PeerLost", limit=K_S)
        stalled, late = partial(freeze, kind="PeerStalled", limit=S_S), TRAINERS_S if scheme == "ps" else 0.0
        within_k, within_s = f"PeerLost within {K_S:g} s", f"PeerStalled within {S_S:g} s"
        found += [
            Case(1, "kill -9 of a rank", *way, within_k, partial(lost, who=1)),
            Case(2, f"kill -9 of {hub_name}", *way, within_k, partial(lost, who=hub)),
            Case(4, "a rank frozen", *way, within_s, partial(stalled, who=1)),
            Case(
                4,
                f"{hub_name} frozen",
                *way,
                f"PeerStalled within {S_S + late:g} s",
                partial(stalled, who=hub, limit=S_S + late),
            ),
            Case(4, f"a rank frozen for {SHORT_S:g} s", *way, SAME_BITS, partial(paused, *way, 1)),
            Case(4, f"{hub_name} frozen for {SHORT_S:g} s", *way, SAME_BITS, partial(paused, *way, hub)),
        ]
    for scheme, backend in BETWEEN:
        way, late = (scheme, backend), TRAINERS_S if scheme == "ps" else 0.0
        for name, how, mend, more in CUTS:
            limit = S_S + late + more
            within, run = f"PeerUnreachable within {limit:g} s", partial(cut, *way, how, limit)
            again = partial(healed, *way, how, mend)
            found += [
                Case(5, name, *way, within, run, needs_hosts=True),
                Case(5, f"{name} for {SHORT_S:g} s", *way, SAME_BITS, again, needs_hosts=True),
            ]
        for name, shares in SHARES.items():
            promise = SAME_BITS if shares[0] <= MENDED else f"{SAME_BITS}, or a named error"
            found.append(Case(6, name, *way, promise, partial(rough, *way, *shares), needs_hosts=True))
    right_or_error = f"{SAME_BITS}, or a named error"
    for scheme, backend in WAYS[1:]:
        chunk = [Interception("all_reduce", fate, 5, 1) for fate in FATES]
        for what in MISSED if scheme == "ps" else chunk:
            run = partial(intercepted, scheme, backend, what)
            found.append(Case(7, f"a message {what.fate}", scheme, backend, right_or_error, run))
    for (scheme, backend), secure in product(BETWEEN, (True, False)):
        name, run = f"bits flip, {'over TLS' if secure else 'with --insecure'}", partial(flipped, scheme, backend)
        error = "a named error"
        found.append(Case(8, name, scheme, backend, error, partial(run, secure=secure), needs_hosts=True))
    return sorted(found, key=lambda case: case.row)


CASES: list[Case] = table()
