"""`install`: one scheme a process, at Paddle's names from when Paddle is imported, and nothing loaded for it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from common.errors import UsageError
from common.paddle_api.names import why_refused
from common.paddle_api.names_table import DISTRIBUTED, FLEET
from common.program.install import DIVIDED, LAYERS_PARTS, found_in
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
        "assert paddle.distributed.TrainingState is surface.TrainingState\n"
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
    with pytest.raises(
        UsageError, match=r"fleet\.init_worker: It is for .*cannot run as a ring: run the program with ps"
    ):
        found_in(ring, FLEET, "init_worker")()
    servers = SimpleNamespace(init_worker=int, is_worker=bool)
    assert found_in(servers, FLEET, "init_worker") is int
    assert found_in(servers, FLEET, "is_worker") is bool
    assert found_in(servers, FLEET, "fleet") is servers


def test_calls_of_the_stream_modules_are_those_of_stream() -> None:
    surface = SimpleNamespace(all_reduce=int, stream=SimpleNamespace(all_reduce=bool))
    for where, expected in (("stream", bool), ("stream.all_reduce", bool), ("all_reduce", int)):
        assert found_in(surface, f"{DISTRIBUTED}.communication.{where}", "all_reduce") is expected


@pytest.mark.parametrize(
    ("where", "name", "words"),
    [
        (DISTRIBUTED, "shard_tensor", why_refused("shard_tensor")),
        (FLEET, "save_persistables", why_refused("save_persistables")),
        (LAYERS_PARTS, "_c_softmax_with_cross_entropy", DIVIDED["_c_softmax_with_cross_entropy"]),
        (FLEET, "new_in_a_later_paddle", "Leave it out, or start with --no-install."),
    ],
)
def test_what_a_scheme_has_not_is_refused_with_the_words_of_the_table(where: str, name: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        found_in(SimpleNamespace(), where, name)(1, key=2)
    assert words
    assert str(raised.value) == (
        f"{where}.{name} is not supported by , which is installed in the place of Paddle's groups. {words}"
    )


@pytest.mark.processes
def test_what_needs_no_group_stays_paddles_and_what_we_have_not_is_refused() -> None:
    pytest.importorskip("paddle")
    code = (
        "import collective, paddle\n"
        "from types import ModuleType\n"
        "from paddle.distributed import Shard, ColWiseParallel, fleet\n"
        "kept = dict(vars(paddle.distributed)), dict(vars(fleet))\n"
        "collective.install()\n"
        "from common.paddle_api.names import PASSED_ON, put_in_place_in\n"
        "surface = __import__('collective.fleet').fleet.surface\n"
        "for module, own in zip((paddle.distributed, fleet), kept):\n"
        "    places = type(module).__dict__\n"
        "    assert not any(n in places for n in PASSED_ON)\n"
        "    for name in put_in_place_in(module.__name__):\n"
        "        if name in own and name not in places:\n"
        "            assert isinstance(own[name], (type, ModuleType)), name\n"
        "assert isinstance(paddle.distributed.Shard(0), Shard)\n"
        "assert paddle.distributed.ColWiseParallel is ColWiseParallel\n"
        "assert fleet.util is surface.util and fleet.all_reduce == surface.util.all_reduce\n"
        "assert isinstance(fleet.fleet, fleet.Fleet) and fleet.Fleet() is fleet.fleet\n"
        "assert isinstance(paddle.distributed.ParallelEnv(), paddle.distributed.ParallelEnv)\n"
        "from paddle.distributed.communication.all_reduce import all_reduce\n"
        "assert all_reduce == surface.all_reduce\n"
        "from paddle.distributed.fleet.layers.mpu import mp_ops\n"
        "try: mp_ops._c_softmax_with_cross_entropy()\n"
        "except Exception as exc: assert 'ParallelCrossEntropy calls it' in str(exc)\n"
        "assert fleet.metrics.sum.__module__ == 'paddle.distributed.fleet.metrics.metric'\n"
        "try: paddle.distributed.sharding.group_sharded_parallel()\n"
        "except Exception as exc: print(type(exc).__name__, exc)"
    )
    assert said_by(code).startswith(
        "UsageError paddle.distributed.sharding.group_sharded_parallel is not supported by collective, which is "
    )
