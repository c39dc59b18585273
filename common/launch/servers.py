"""Starts parameter servers as processes of a job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from common.launch.child import ProcessFailed
from common.launch.job import POLL_S, Job

__all__ = ["start_servers", "wait_for_file"]


def start_servers(
    job: Job,
    count: int,
    *,
    nranks: int,
    timeout: float,
    first: str = "127.0.0.1:0",
    insecure: bool = False,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Start `count` parameter servers and return their addresses.

    Args:
        first: HOST:PORT of server 0; server I listens at port + I. With port 0 each takes a free one and tells which by
            a file, so that no port can be raced for.
        insecure: let them listen to other hosts.
    """
    host, _, port = first.rpartition(":")
    files = [job.scratch / f"server-{index}" for index in range(count)]
    for index, file in enumerate(files):
        flags = ["--host", host.strip("[]"), "--port", str(int(port) + index if int(port) else 0)]
        flags += ["--shard", f"{index}/{count}", "--address-file", str(file)]
        flags += ["--nranks", str(nranks), "--timeout", str(timeout), *["--insecure"] * insecure]
        command = ["-m", "ps.server", *flags]
        job.start(f"server {index}", command, log=f"serverlog.{index}", environment=environment)
    return [wait_for_file(file, job, timeout=timeout) for file in files]


def text_of(path: Path) -> str:
    """What a file holds; "" if there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def wait_for_file(path: Path, job: Job, *, timeout: float) -> str:
    """The content of a file that a child of `job` writes once it is ready.

    Raises:
        ProcessFailed: a child ended instead, or `timeout` seconds passed.
    """
    deadline = time.monotonic() + timeout
    while not (text := text_of(path)).endswith("\n"):
        job.check()
        if time.monotonic() > deadline or all(child.code is not None for child in job.children):
            what = f"{path.name.replace('-', ' ')} was not ready within {timeout:g} s"
            raise ProcessFailed(f"{what}; start fewer processes, or raise --timeout", 1)
        time.sleep(POLL_S)
    return text.strip()
