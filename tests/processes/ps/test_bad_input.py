"""The parameter-server commands given what cannot be: one line and the exit code."""

from __future__ import annotations

import socket
from collections.abc import Callable
from importlib import import_module

import pytest

pytest.importorskip("paddle")


from ps.run import main as run_main
from tests.support.commands import JOB, Started, start_server
from tests.support.groups import free_port

pytestmark = pytest.mark.processes


BAD_FLAGS: dict[str, tuple[list[str], list[str]]] = {
    "model": (["ps.run", "--model", "mnist-cn"], ["ps.run: UsageError:", "'mnist-cn'", "did you mean 'mnist-cnn'?"]),
    "optimizer": (["ps.run", "--optimizer", "adamm"], ["'adamm'", "did you mean 'adam'?"]),
    "no servers": (["ps.run", "--servers", "0"], ["--servers must be at least 1 (got 0)"]),
    "rank": (["ps.trainer", "--rank", "2", "--nranks", "2"], ["ps.trainer:", "rank 2 is outside 0..1"]),
    "address": (["ps.trainer", "--servers", "here"], ["'here'", "HOST:PORT"]),
    "flag": (["ps.run", "--server", "2"], ["ps.run: UsageError: unknown flag --server; did you mean --servers?"]),
    "value": (["ps.trainer", "--rank", "one"], ["ps.trainer: UsageError: --rank must be a whole number (got 'one')"]),
}


@pytest.mark.parametrize("what", BAD_FLAGS)
def test_bad_flags_are_one_line_and_exit_code_2(what: str, capfd: pytest.CaptureFixture[str]) -> None:
    (module, *flags), texts = BAD_FLAGS[what]
    assert import_module(module).main(flags) == 2
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert [text for text in texts if text not in line] == [], line


def test_a_server_that_refuses_ends_with_its_code(start: Callable[..., Started]) -> None:
    start("ps.server", "--shard", "2/2").refused("ps.server:", "'2/2'", "I/S")
    start("ps.server", "--port", "65536").refused("--port must be in 0..65535 (got 65536)")
    start("ps.server", "--host", "0.0.0.0", "--port", "0").refused("0.0.0.0", "--insecure")


def test_a_port_in_use_is_named(start: Callable[..., Started]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        start("ps.server", "--port", address.rpartition(":")[2]).refused("PortInUse", address)


def test_a_server_that_is_not_there_is_named(start: Callable[..., Started]) -> None:
    address = f"127.0.0.1:{free_port()}"
    trainer = start("ps.trainer", "--rank", 0, "--servers", address, "--timeout", 1, *JOB)
    trainer.refused("PeerUnreachable", address, "within 1 s")


def test_disagreement_about_nranks_ends_all(start: Callable[..., Started]) -> None:
    server, address = start_server(start, nranks=2)
    trainers = [start("ps.trainer", "--rank", rank, "--nranks", 2 + rank, "--servers", address) for rank in (0, 1)]
    for one in (*trainers, server):
        one.refused("RendezvousError", "nranks 3", "with 2")


def test_a_missing_data_file_is_named(start: Callable[..., Started]) -> None:
    run = start("ps.run", "--trainers", 1, "--dataset", "mnist", "--data-dir", "/nonexistent")
    assert run.code == 2
    (line,) = run.err.splitlines()
    assert line.startswith("ps.trainer: DataError: ")
    assert "/nonexistent/" in line


def test_update_is_for_programs_of_the_users_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_main(["--update", "server"]) == 2
    assert capfd.readouterr().err == (
        "ps.run: UsageError: --update is for your own program; in the built-in training servers update\n"
    )
    assert run_main(["--update", "sever", "script.py"]) == 2
    assert "unknown update 'sever'; did you mean 'server'" in capfd.readouterr().err
