"""`install`: one scheme a process, at Paddle's names from when Paddle is imported, and nothing loaded for it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from common.errors import UsageError
from common.program.install import FLEET, found_in
from tests.support.groups import ROOT


def said_by(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.processes
def test_an_installed_scheme_loads_nothing_until_it_is_used() -> None:
    pytest.importorskip("paddle")
    code = (
        "import sys, collective\n"
        "collective.install(); collective.install()\n"
        "assert 'paddle' not in sys.modules\n"
        "import paddle\n"
        "own = vars(paddle)['DataParallel']\n"
        "assert not {'collective.fleet', 'common.paddle_api.fleet_api'} & sys.modules.keys()\n"
        "from paddle.distributed import init_parallel_env\n"
        "surface = sys.modules['collective.fleet'].surface\n"
        "from paddle.distributed import fleet, parallel\n"
        "from paddle.distributed.fleet import fleet as one\n"
        "assert init_parallel_env == surface.init_parallel_env == parallel.init_parallel_env\n"
        "assert paddle.DataParallel is surface.DataParallel is not own\n"
        "assert one is surface and fleet.rank == surface.worker_index and fleet.init == surface.init\n"
        "from paddle.distributed.communication.all_reduce import all_reduce\n"
        "from paddle.distributed import communication, stream\n"
        "from paddle.distributed.communication import stream as same\n"
        "import paddle.distributed.communication.all_to_all as module\n"
        "assert all_reduce == communication.all_reduce == paddle.distributed.all_reduce == surface.all_reduce\n"
        "assert stream is same and stream.send == stream.send.__self__.send == surface.stream.send\n"
        "assert module.alltoall == surface.alltoall and module.__name__.endswith('all_to_all')\n"
        "paddle.DataParallel = 'the program knows better'\n"
        "assert paddle.DataParallel == 'the program knows better'\n"
        "print('all')"
    )
    assert said_by(code) == "all\n"


@pytest.mark.processes
def test_a_second_scheme_is_refused() -> None:
    code = (
        "import ps, collective\n"
        "ps.install()\n"
        "try: collective.install()\n"
        "except Exception as exc: print(type(exc).__name__, exc)"
    )
    assert said_by(code) == (
        "UsageError collective.install(): ps was installed in this process before, and a process synchronises by one "
        "scheme: install only one\n"
    )


def test_fleets_names_about_servers() -> None:
    ring = SimpleNamespace()
    assert (found_in(ring, FLEET, "is_server")(), found_in(ring, FLEET, "is_worker")()) == (False, True)
    with pytest.raises(UsageError, match=r"fleet\.init_worker: a parameter-server program cannot run as a ring"):
        found_in(ring, FLEET, "init_worker")()
    servers = SimpleNamespace(init_worker=int, is_worker=bool)
    assert found_in(servers, FLEET, "init_worker") is int
    assert found_in(servers, FLEET, "is_worker") is bool
    assert found_in(servers, FLEET, "fleet") is servers
