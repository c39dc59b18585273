"""The names for Paddle programs: equal in both schemes, loaded lazily, and honest about what is missing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import collective
import ps
from collective.flags import RingSettings
from common.credentials.credentials import using
from common.errors import UsageError
from common.launch.cli import split_script
from common.launch.settings import Placement, Settings, placement_from, settings_from, variables_of
from common.paddle_api.names import SERVER_SIDE
from common.sync.local import LocalSynchronizer
from ps.flags import ScriptSettings
from tests.support.channels import INSECURE
from tests.support.groups import on_threads


@pytest.mark.parametrize("name", SERVER_SIDE)
def test_the_server_side_is_there(name: str) -> None:
    pytest.importorskip("paddle")
    assert getattr(ps, name) is not None


@pytest.mark.parametrize(
    ("module", "name", "nearest"),
    [
        (collective, "all_reduced", "all_reduce"),
        (ps, "init_servers", "init_server"),
        (collective, "DataParalel", "DataParallel"),
    ],
)
def test_a_missing_name_points_to_the_nearest(module: object, name: str, nearest: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'; the nearest it has is '{nearest}'"):
        getattr(module, name)


def test_a_name_that_nothing_is_near_gets_no_misleading_one() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'shard_optimizers'; dir\(ps\) lists what it has$"):
        _ = ps.shard_optimizers


@pytest.mark.parametrize("module", ["ps", "collective"])
def test_importing_a_scheme_does_not_import_paddle(module: str) -> None:
    code = f"import sys, {module}; assert 'paddle' not in sys.modules; dir({module})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_module_of_the_users_that_shadows_ours_is_named(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    (folder / "common.py").write_text("x = 1\n")
    (folder / "program.py").write_text("import collective\n")
    done = subprocess.run(
        [sys.executable, str(folder / "program.py")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert f"{folder}/common.py comes first on the path; rename that module" in done.stderr


def test_without_a_launcher_there_is_one_rank() -> None:
    found = placement_from({})
    assert (found.rank, found.nranks, found.servers, found.rendezvous) == (0, 1, (), "")


def test_paddles_launcher_on_one_host_meets_at_an_abstract_socket() -> None:
    env = {
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:6170,127.0.0.1:6171",
    }
    found = placement_from(env)
    assert (found.rank, found.nranks) == (1, 2)
    assert found.rendezvous.startswith("unix-abstract:gradsync-")
    assert found.rendezvous.endswith("127.0.0.1-6170")
    assert placement_from({**env, "PADDLE_TRAINER_ID": "0"}).rendezvous == found.rendezvous


def test_paddles_launcher_on_two_hosts_meets_at_rank_0() -> None:
    env = {
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170,10.0.0.2:6170",
    }
    assert placement_from(env).rendezvous == "10.0.0.1:6170"


def test_our_variables_win() -> None:
    env = {
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:1",
        "GRADSYNC_RENDEZVOUS": "unix-abstract:x",
        "GRADSYNC_SERVERS": "127.0.0.1:8500,127.0.0.1:8501",
        "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.9:1",
        "GRADSYNC_TIMEOUT": "7",
        "GRADSYNC_BACKEND": "tcp",
        "GRADSYNC_OVERLAP": "0",
    }
    found = placement_from(env)
    assert found.rendezvous == "unix-abstract:x"
    assert found.servers == ("127.0.0.1:8500", "127.0.0.1:8501")
    assert settings_from(RingSettings, env) == RingSettings(timeout=7, backend="tcp", overlap=False)


@pytest.mark.parametrize("kind", [RingSettings, ScriptSettings])
def test_settings_come_back_from_the_environment(kind: type[Settings]) -> None:
    other = {"timeout": 7.5, "overlap": False}
    other |= (
        {"backend": "tcp", "checksum": "on"} if kind is RingSettings else {"data_plane": "grpc", "update": "server"}
    )
    for settings in (kind(), kind(**other)):
        assert settings_from(kind, variables_of(kind, settings)) == settings
        assert settings_from(Settings, variables_of(kind, settings)).timeout == settings.timeout


def test_a_place_comes_back_from_the_environment() -> None:
    for place in (
        Placement(),
        Placement(rendezvous="unix-abstract:x"),
        Placement(servers=("127.0.0.1:8500", "127.0.0.1:8501")),
    ):
        assert placement_from(place.variables()) == place


def test_a_program_under_the_other_schemes_launcher_is_told_so_when_it_joins() -> None:
    from collective import fleet as over_ring
    from ps import fleet as over_servers

    endpoints = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:6170,127.0.0.1:6171"}
    theirs = Placement(servers=("127.0.0.1:8500",)).variables()
    with pytest.raises(UsageError, match=r"uses collective, but was started with python -m ps\.run.*import ps instead"):
        over_ring.join(placement_from({**endpoints, **theirs}))
    theirs = Placement(rendezvous="unix-abstract:x").variables()
    with pytest.raises(UsageError, match=r"uses ps, but no server was started.*or import collective instead"):
        over_servers.join(placement_from({**endpoints, **theirs}))


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"PADDLE_TRAINER_ID": "2", "PADDLE_TRAINERS_NUM": "2"}, "rank 2 is outside 0..1"),
        ({"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": "h:1"}, "names 1 ranks, PADDLE_TRAINERS_NUM says 2"),
        ({"GRADSYNC_SERVERS": "nonsense"}, "not an address: 'nonsense'"),
        ({"GRADSYNC_TIMEOUT": "long"}, "GRADSYNC_TIMEOUT must be of type float \\(got 'long'\\)"),
        ({"GRADSYNC_TIMEOUT": "-1"}, "--timeout must be a positive number"),
        ({"GRADSYNC_CHECKSUM": "of"}, "unknown checksum 'of'; did you mean 'off'"),
    ],
)
def test_a_contradictory_environment_is_named(env: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        (settings_from(RingSettings, env), placement_from(env))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], ([], [])),
        (["--nranks", "2"], (["--nranks", "2"], [])),
        (["--nranks", "2", "a.py", "--nranks", "3"], (["--nranks", "2"], ["a.py", "--nranks", "3"])),
        (["dir/a.py", "b.py"], ([], ["dir/a.py", "b.py"])),
    ],
)
def test_the_script_is_the_first_python_file(args: list[str], expected: tuple[list[str], list[str]]) -> None:
    assert split_script(args) == expected


# ---- metrics ----------------------------------------------------------------------------------------------------


def surface() -> Any:
    from common.paddle_api.fleet_api import FleetApi

    return FleetApi("test", lambda placement: LocalSynchronizer())


def test_calls_of_programs_go_through_the_group_that_was_joined() -> None:
    paddle = pytest.importorskip("paddle")
    from tests.support.thread_messenger import thread_ranks

    ranks, surfaces = thread_ranks(2), [surface() for _ in range(2)]

    def body(rank: int) -> list[Any]:
        dist = surfaces[rank]
        dist._synchronizer = ranks[rank]
        total, everyone, one = paddle.full([2], rank + 1.0), [], dist.new_group([1])
        dist.all_reduce(total, dist.ReduceOp.AVG)
        dist.barrier()
        dist.all_gather(everyone, total + rank)
        dist.broadcast(total, src=1)
        found = [total.tolist(), [t.tolist() for t in everyone], dist.get_rank(one), dist.get_world_size(one)]
        dist.destroy_process_group(one)
        assert dist.is_initialized()
        dist._synchronizer = None
        return found

    assert on_threads(2, body) == [[[1.5, 1.5], [[1.5, 1.5], [2.5, 2.5]], -1, -1]] * 2


def test_objects_of_other_types_are_for_members_and_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paddle")
    dist = surface()
    assert not dist._may_pickle()
    monkeypatch.setenv("GRADSYNC_ALLOW_PICKLE", "1")
    assert dist._may_pickle()
    with using(INSECURE), pytest.raises(UsageError, match="--allow-pickle works among processes with credentials only"):
        dist._may_pickle()


def test_options_that_paddles_spawn_does_not_have_are_refused() -> None:
    pytest.importorskip("paddle")
    with pytest.raises(ValueError, match="spawn: the option server is not supported"):
        surface().spawn(print, nprocs=2, backend="gloo", server=2)


def test_after_leaving_another_model_can_be_wrapped() -> None:
    paddle = pytest.importorskip("paddle")
    dist = surface()
    models = []
    for _ in range(2):
        dist._synchronizer = LocalSynchronizer()
        models.append(dist.DataParallel(paddle.nn.Linear(2, 1)))
        dist.destroy_process_group()
    models[0](paddle.ones([1, 2])).sum().backward()  # which is Paddle's own again
    assert models[0]._layers.weight.grad.numpy().tolist() == [[1.0], [1.0]]


def test_an_unknown_reduction_is_refused() -> None:
    paddle = pytest.importorskip("paddle")
    with pytest.raises(ValueError, match="op must be one of ReduceOp's"):
        surface().all_reduce(paddle.ones([1]), 17)


# ---- Paddle's own role makers --------------------------------------------------------------------------------------


def paddles(kind: str, **arguments: Any) -> Any:
    pytest.importorskip("paddle")
    from paddle.distributed.fleet.base import role_maker

    return getattr(role_maker, kind)(**arguments)


def test_servers_take_paddles_own_role_makers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paddle")
    from ps.fleet import ServerFleetApi

    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    joined: list[bool] = []
    monkeypatch.setattr(ServerFleetApi, "init_parallel_env", lambda _: joined.append(True))
    monkeypatch.setattr(ServerFleetApi, "get_hybrid_communicate_group", lambda _: None)
    for collective_role in (True, False):
        fleet = ServerFleetApi()
        fleet.init(paddles("PaddleCloudRoleMaker", is_collective=collective_role))
        assert (fleet.worker_index(), fleet.worker_num(), fleet.is_server()) == (1, 2, False)
        assert joined == [True]  # the other one waits for init_worker
    written = {"current_id": 1, "role": 2, "worker_num": 3, "server_endpoints": ["h:1", "h:2"]}
    fleet.init(paddles("UserDefinedRoleMaker", **written))
    assert (fleet.is_server(), fleet.worker_num(), fleet._role.endpoint) == (True, 3, "h:2")
    with pytest.raises(UsageError, match=r"a str is no role maker; give it fleet\.PaddleCloudRoleMaker"):
        fleet.init("worker")


def test_a_ring_takes_paddles_own_role_maker_unless_it_is_for_servers() -> None:
    dist = surface()
    dist._synchronizer = LocalSynchronizer()
    assert dist.init(paddles("PaddleCloudRoleMaker", is_collective=True)) is dist
    with pytest.raises(UsageError, match=r"^a parameter-server program cannot run as a ring: run it with ps; or, if"):
        dist.init(paddles("PaddleCloudRoleMaker", is_collective=False))
