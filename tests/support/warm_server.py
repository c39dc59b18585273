"""An interpreter that has imported Paddle and forks for every program that a test asks it to run: see warm.py."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress

from common.launch.cli import parse
from common.system.process import prepare_process
from tests.support.forked_program import Program, fork, fork_instead_of_new_interpreters, program_of

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
GONE_S = 10.0  # what a program has started may take this long to end after it
MOST = 1 << 20
PACKAGES = ("collective", "common", "ps")
OURS = (*PACKAGES, "benchmarks", "tests")
# Only when something needs them: Numba, and what knows from the environment which rank it is.
LATER = ("common.kernels.", "common.program.", "collective.fleet", "ps.fleet")


class WarmServer:
    """Programs under way, each with the connection of the test that has asked for it."""

    def __init__(self, listener: socket.socket, path: list[str]) -> None:
        self.listener, self.path = listener, path
        self.asked: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Until our stdin, which the tests' process keeps open, is at its end."""
        wakeup, bell = socket.socketpair()
        for end in (wakeup, bell):
            end.setblocking(False)
        signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(0, selectors.EVENT_READ, "end")
        self.selector.register(self.listener, selectors.EVENT_READ, "test")
        self.selector.register(wakeup, selectors.EVENT_READ, "child")
        while True:
            for key, _ in self.selector.select():
                if key.data == "end":
                    signal.set_wakeup_fd(-1)
                    return
                if key.data == "test":
                    self.start(self.listener.accept()[0])
                elif key.data == "child":
                    with suppress(BlockingIOError):
                        wakeup.recv(MOST)
                    self.tell_who_ended()
                else:
                    self.kill(key.data)

    def start(self, connection: socket.socket) -> None:
        message, descriptors, _, _ = socket.recv_fds(connection, MOST, 3)
        request = json.loads(message)
        command, environment = request["command"], request["environment"]
        program = program_of(command, environment)
        without = () if program and is_ours(program) else PACKAGES  # it may have its own of that name
        pid = program and fork(
            program, command, descriptors, self.path, environment=environment, cwd=request["cwd"], without=without
        )
        for descriptor in descriptors:
            os.close(descriptor)
        say(connection, pid=pid)
        if pid:
            self.asked[pid] = connection
            self.selector.register(connection, selectors.EVENT_READ, pid)

    def tell_who_ended(self) -> None:
        for pid, code in reaped():
            connection = self.asked.pop(pid, None)
            if connection is not None:
                self.selector.unregister(connection)
                say(connection, code=code, left=[] if self.asked else self.left_behind())
                connection.close()

    def left_behind(self) -> list[str]:
        """What programs have started and not ended: it is our child by now."""
        deadline = time.monotonic() + GONE_S
        while children() and time.monotonic() < deadline:
            time.sleep(0.005)
            reaped()
        left = children()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return list(left.values())

    def kill(self, pid: int) -> None:
        """The test that asked for it is gone."""
        self.selector.unregister(self.asked.pop(pid))
        for each in [pid, *children()]:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


def is_ours(program: Program) -> bool:
    return program.kind == "-m" and program.what.partition(".")[0] in OURS


def say(connection: socket.socket, **what: object) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # a test that does not wait
        connection.sendall(json.dumps(what).encode())


def reaped() -> list[tuple[int, int]]:
    """Children that have ended, and their exit codes as subprocess has them."""
    found = []
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append((ended[0], os.waitstatus_to_exitcode(ended[1])))
    return found


def children() -> dict[int, str]:
    """Process ids and names of our children, those of programs that have ended included."""
    listed = f"/proc/self/task/{os.getpid()}/children"
    found = {}
    with open(listed) as file:
        for pid in map(int, file.read().split()):
            with suppress(OSError), open(f"/proc/{pid}/cmdline") as line:
                found[pid] = line.read().replace("\0", " ").strip()
    return found


def import_what_programs_import() -> None:
    """What they import first, and our own packages for programs of ours."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a process that has threads cannot be forked
    import cryptography.hazmat.primitives.serialization
    import cryptography.x509
    import grpc.experimental
    import grpc_health.v1.health
    import grpc_health.v1.health_pb2_grpc
    import jinja2
    import msgspec
    import numpy.ma
    import paddle
    import paddle.distributed.launch
    import paddle.vision
    import psutil
    import rich.console
    import tyro
    import xxhash

    sys.argv[:1] = ["-m"]  # as our modules find it that are begun so
    for package in PACKAGES:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.startswith(LATER) and not module.name.endswith(".__main__"):
                importlib.import_module(module.name)
    let_tyro_read_their_flags()
    del os.environ["OPENBLAS_NUM_THREADS"]
    del cryptography, grpc, grpc_health, jinja2, msgspec, numpy, paddle, psutil, rich, tyro, xxhash


def let_tyro_read_their_flags() -> None:
    from collective.command_flags import CollectiveRunConfig, CollectiveTrainerConfig
    from ps.command_flags import RunConfig, ServerConfig, TrainerConfig

    for config in (CollectiveRunConfig, CollectiveTrainerConfig, RunConfig, ServerConfig, TrainerConfig):
        parse(config, "", ["--nranks", "2"])


def main(address: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    given = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    path = sys.path[1 + len(given) :]  # without what depends on a program
    prepare_process(of_user=True)  # servers have their threads switch often themselves
    import_what_programs_import()
    gc.freeze()
    fork_instead_of_new_interpreters(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")
        listener.listen(8)
        print("ready", flush=True)
        WarmServer(listener, path).serve()
    for pid in children():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
