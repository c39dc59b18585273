"""Runs a function on every rank of a group, as threads or as processes, and lets no rank outlive its test."""

from __future__ import annotations

import importlib
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from collective.algorithms.ring import RingAlgorithm
from collective.build import build
from collective.choice import topology_of
from collective.group import Group, connect
from collective.membership.connections import Listener, build_mesh
from collective.membership.messenger import MeshMessenger
from collective.nccl.algorithm import NcclAlgorithm
from collective.transports.threads import connect_threads
from common.launch.ranks import abstract_address
from common.network.patience import Patience
from common.system.process import PARENT_VARIABLE, prepare_process
from tests.support.credentials import encrypted
from tests.support.fake_nccl import FakeGpu, FakeNccl, make_binding
from tests.support.thorough import ALL

ROOT = Path(__file__).resolve().parents[2]
RINGS = ("memory", "tcp-ring")  # backends, with the algorithm where it is not the usual one
PROCESSES = ("shm", "tcp", "tcp-ring")
BACKENDS = ("memory", *PROCESSES, "tcp-hierarchical")
ENCRYPTED = ("tls", "tls-ring", "tls-hierarchical")  # tcp, over TLS
CANONICAL = (*BACKENDS, "fake-nccl-ring", *(ENCRYPTED if ALL else ()))  # all that give the same bits
DEADLINE_S = float(os.environ.get("GRADSYNC_TEST_DEADLINE_S", "40"))  # of every wait here; far above what is needed
LEAST_OF_LINK = 0.05  # of an emulated link's rate: tbf lets less through where timers are late, on a loaded machine
T = TypeVar("T")


# Expected values, from NumPy alone


def cuts_of(length: int, nranks: int) -> list[int]:
    """Where a bucket is cut into chunks: as equally as cuts at multiples of 16 elements allow."""
    blocks = (length + 15) // 16
    return [min(length, 16 * ((blocks * c + nranks - 1) // nranks)) for c in range(nranks + 1)]


def reduced(inputs: Sequence[np.ndarray], op: str) -> np.ndarray:
    """What all ranks must hold after an all-reduce: chunk c summed from rank c+1 on, round to rank c."""
    nranks, flat = len(inputs), [x.reshape(-1) for x in inputs]
    partial = np.float32 if inputs[0].dtype == np.float16 else inputs[0].dtype
    cuts, out = cuts_of(flat[0].size, nranks), np.empty_like(flat[0])
    for c in range(nranks):
        part = slice(cuts[c], cuts[c + 1])
        total = flat[(c + 1) % nranks][part].astype(partial)
        for i in range(2, nranks + 1):
            values = flat[(c + i) % nranks][part].astype(partial)
            total = np.maximum(total, values) if op == "max" else total + values
        out[part] = total * total.dtype.type(1 / nranks) if op == "mean" else total
    return out.reshape(inputs[0].shape)


def sample(rank: int, shape: int | tuple[int, ...], dtype: str, *, seed: int = 0) -> np.ndarray:
    """Values that differ by rank and element, and whose float sums depend on the order of summation."""
    return kept_sample(rank, shape, dtype, seed).copy()


@lru_cache(maxsize=128)  # all ranks and the expectation ask for the same ones
def kept_sample(rank: int, shape: int | tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, rank])
    if dtype == "float16":
        return (rng.standard_normal(shape) * 2.0 ** rng.integers(-7, 8, shape)).astype(dtype)
    if np.dtype(dtype).kind == "f":
        return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(dtype)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)  # their sums wrap


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    one, other = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (got, expected))
    if not np.array_equal(one, other):
        np.testing.assert_array_equal(one, other)  # says where


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at, and that the kernel gives to no outgoing connection meanwhile."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)  # below ip_local_port_range
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# Ranks as threads


@dataclass
class Outcome(Generic[T]):
    """How one rank's thread ended, and when (monotonic seconds)."""

    value: T | None = None
    error: BaseException | None = None
    at: float = 0.0


def outcomes_of(nranks: int, function: Callable[[int], T]) -> list[Outcome[T]]:
    """Call `function(rank)` on a thread for each rank; an AssertionError if one does not end."""
    outcomes: list[Outcome[T]] = [Outcome() for _ in range(nranks)]

    def body(rank: int) -> None:
        try:
            outcomes[rank].value = function(rank)
        except BaseException as exc:
            outcomes[rank].error = exc
        outcomes[rank].at = time.monotonic()

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(nranks)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if hung := [thread for thread in threads if thread.is_alive()]:
        raise AssertionError(f"{', '.join(t.name for t in hung)} still runs\n{stack_of(hung[0])}")
    return outcomes


def stack_of(thread: threading.Thread) -> str:
    return "".join(traceback.format_stack(sys._current_frames()[thread.ident or 0]))


def on_threads(nranks: int, function: Callable[[int], T]) -> list[T]:
    """What `function(rank)` returned on each rank; the error of the rank that failed first is raised again."""
    outcomes = outcomes_of(nranks, function)
    if failed := sorted((o for o in outcomes if o.error), key=lambda o: o.at):
        raise failed[0].error  # type: ignore[misc]
    return [o.value for o in outcomes]  # type: ignore[misc]


def open_groups(backend: str, nranks: int, *, timeout: float = 30.0) -> list[Group]:
    """The groups of all ranks, in rank order, connected inside this process."""
    if backend in ENCRYPTED:
        with encrypted():
            return open_groups(backend.replace("tls", "tcp"), nranks, timeout=timeout)
    if backend == "fake-nccl-ring":
        return nccl_groups(nranks, ring=True, timeout=timeout, on_host=True)
    if backend == "memory" or nranks == 1:
        return [
            Group(RingAlgorithm(transport), backend=backend) for transport in connect_threads(nranks, timeout=timeout)
        ]
    if backend == "tcp-hierarchical":  # this is one host
        return mesh_groups(backend, nranks, timeout=timeout)
    rendezvous = abstract_address("test")
    return on_threads(nranks, lambda rank: connect(rank, nranks, rendezvous, timeout=timeout, **named(backend)))


def named(backend: str) -> dict[str, str]:
    """The arguments of `connect` for one of PROCESSES, or as in nccl-ring+pynccl."""
    place, _, binding = backend.partition("+")
    kind, _, algorithm = place.partition("-")
    return {"backend": kind, "algorithm": algorithm or "auto", "nccl_binding": binding or "cupy"}


def mesh_groups(backend: str, nranks: int, *, timeout: float = 30.0) -> list[Group]:
    """Like `open_groups` but without the rendezvous, whose gRPC takes 0.2 s each time."""
    if backend in ENCRYPTED:
        with encrypted():
            return mesh_groups(backend.replace("tls", "tcp"), nranks, timeout=timeout)
    if backend == "fake-nccl-ring":
        return nccl_groups(nranks, ring=True, timeout=timeout, on_host=True)
    if backend == "memory" or nranks == 1:
        return open_groups(backend, nranks, timeout=timeout)
    token = secrets.token_bytes(16)
    kind, _, algorithm = backend.partition("-")
    with ExitStack() as stack:
        host = "127.0.0.1" if kind == "tcp" else ""
        listeners = [stack.enter_context(Listener(host, f"gradsync-{secrets.token_hex(8)}")) for _ in range(nranks)]

        def join(rank: int) -> Group:
            topology = topology_of(kind, algorithm or "direct", rank, hosts_of(nranks))
            addresses = [x.local_address if r in topology.local else x.address for r, x in enumerate(listeners)]
            mesh, connections = build_mesh(
                rank, addresses, listeners[rank], token, data=topology.linked, near=topology.local, timeout=timeout
            )
            built = build(kind, topology, mesh, connections)
            return Group(built, backend=kind, messenger=MeshMessenger(mesh))

        return on_threads(nranks, join)


def hosts_of(nranks: int) -> list[str]:
    """Where the ranks of a hierarchical group are supposed to be: two on each host, or else one."""
    each = 2 if nranks % 2 == 0 and nranks > 2 else 1
    return [f"host {rank // each}" for rank in range(nranks)]


def nccl_groups(
    nranks: int, *, ring: bool, binding: str = "cupy", nccl: Any = None, timeout: float = 30.0, **options: Any
) -> list[Group]:
    """Groups over the fake NCCL and GPU, of threads; `options` are those of NcclAlgorithm."""
    nccl, token, identity = nccl or FakeNccl(), secrets.token_bytes(16), secrets.token_bytes(128)
    with ExitStack() as stack:
        listeners = [stack.enter_context(Listener("", f"gradsync-{secrets.token_hex(8)}")) for _ in range(nranks)]
        addresses = tuple(listener.local_address for listener in listeners)

        def join(rank: int) -> Group:
            mesh, _ = build_mesh(rank, addresses, listeners[rank], token, data=(), timeout=timeout)
            end = partial(nccl.interrupt, rank)
            nccl_binding = make_binding(binding, nccl)
            algorithm = NcclAlgorithm(nccl_binding, FakeGpu(), mesh, nranks, identity, ring=ring, end=end, **options)
            return Group(algorithm, backend="nccl-ring" if ring else "nccl")

        return on_threads(nranks, join)


@contextmanager
def opened(backend: str, nranks: int) -> Iterator[list[Group]]:
    """Like `mesh_groups`; closed at the end."""
    groups = mesh_groups(backend, nranks)
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def on_ranks(groups: Sequence[Group], function: Callable[[Group], T]) -> list[T]:
    """What `function(group)` returned on each rank; the group is left open, or closed with the error as reason."""
    return on_threads(len(groups), lambda rank: closing_on_error(groups[rank], function))


def errors_on(groups: Sequence[Group], function: Callable[[Group], object]) -> list[BaseException | None]:
    """What each rank raised, None where nothing; every group is closed as soon as its rank has ended."""

    def body(rank: int) -> None:
        with groups[rank]:
            function(groups[rank])

    return [outcome.error for outcome in outcomes_of(len(groups), body)]


def closing_on_error(group: Group, function: Callable[[Group], T]) -> T:
    try:
        return function(group)
    except BaseException as exc:
        group.close(f"{type(exc).__name__}: {exc}")
        raise


def limit_waits(groups: Sequence[Group], seconds: float, wait_limit: float = 0.0) -> None:
    """Shorten the limits of groups that have connected; connecting keeps generous ones on a loaded machine. Ranks that
    are threads always live, so that only the wait limit ends a wait for them: without one, at the timeout."""
    for group in groups:
        parts: list[Any] = [group._algorithm]
        for part in parts:
            names = ("transport", "_transport", "_barrier", "_mesh")
            parts += [vars(part)[n] for n in names if hasattr(vars(part).get(n), "__dict__")]  # some are plain lists
            if hasattr(part, "patience"):
                part.patience = Patience(seconds, wait_limit)
            else:
                part.timeout = seconds


def transport_of(group: Group) -> Any:
    """What a ring moves its data through."""
    algorithm: Any = group._algorithm
    return algorithm.transport


def barrier_of(group: Group) -> Any:
    """Where the ranks of a host meet."""
    algorithm: Any = group._algorithm
    return algorithm._barrier


# Ranks as processes


class RankProcesses:
    """Runs `body(group)`, a function at the top of a test module, as every rank of a group of processes.

    What a body says with `say` is heard with `hear`; how it ends is said too: {"ended": error's name or "well",
    "text": its message, "at": monotonic seconds}. A context manager: no process outlives it.
    """

    def __init__(self, body: Callable[[Group], object], nranks: int, backend: str, rendezvous: str = "") -> None:
        self.rendezvous = rendezvous or abstract_address("test")
        module = Path(body.__code__.co_filename).relative_to(ROOT).with_suffix("")
        target = f"{'.'.join(module.parts)}:{body.__name__}"
        self.processes = [
            self._start([target, str(rank), str(nranks), self.rendezvous, backend]) for rank in range(nranks)
        ]
        self._said: list[queue.SimpleQueue[dict[str, Any] | None]] = [queue.SimpleQueue() for _ in range(nranks)]
        self._readers = [threading.Thread(target=self._read, args=(rank,), daemon=True) for rank in range(nranks)]
        for reader in self._readers:
            reader.start()

    def hear(self, rank: int, key: str) -> dict[str, Any]:
        """The rank's next message that has `key`."""
        deadline = time.monotonic() + DEADLINE_S
        while (message := self._said[rank].get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            if key in message:
                return message
            assert "ended" not in message, f"rank {rank} ended before it said {key!r}: {message}"
        raise AssertionError(f"rank {rank} ended with {self.code(rank)} before it said {key!r}")

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal; returns the moment before (monotonic seconds)."""
        at = time.monotonic()
        self.processes[rank].send_signal(number)
        return at

    def code(self, rank: int) -> int:
        return self.processes[rank].wait(DEADLINE_S)

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process, reader in zip(self.processes, self._readers, strict=True):
            process.wait()
            reader.join()
            process.stdout.close()  # type: ignore[union-attr]

    def _start(self, args: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.groups", *args],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _read(self, rank: int) -> None:
        for line in self.processes[rank].stdout or ():
            self._said[rank].put(json.loads(line))
        self._said[rank].put(None)


def environment() -> dict[str, str]:
    """For children: this tree's packages first, and an end with this process."""
    return {**os.environ, "PYTHONPATH": str(ROOT), PARENT_VARIABLE: str(os.getpid())}


def say(**message: Any) -> None:
    """From a rank's process to the test."""
    print(json.dumps(message), flush=True)


def main(target: str, rank: str, nranks: str, rendezvous: str, backend: str) -> int:
    prepare_process()
    module, _, name = target.partition(":")
    body = getattr(importlib.import_module(module), name)
    try:
        with connect(int(rank), int(nranks), rendezvous, **named(backend)) as group:
            body(group)
    except Exception as exc:
        say(ended=type(exc).__name__, text=str(exc), at=time.monotonic())
        return getattr(exc, "exit_code", 1)
    say(ended="well", text="", at=time.monotonic())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
