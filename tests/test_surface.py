"""The names for Paddle programs: equal in both schemes, loaded lazily, and honest about what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import collective
import ps
from common.cli import split_script
from common.errors import UsageError
from common.names import PUBLIC, SERVER_SIDE
from common.placement import placement_from

EXPECTED = {
    *("DataParallel", "DistributedStrategy", "ParallelEnv", "ReduceOp", "all_gather", "all_reduce", "barrier"),
    *(
        "broadcast",
        "destroy_process_group",
        "distributed_model",
        "distributed_optimizer",
        "distributed_scaler",
        "get_rank",
        "get_world_size",
    ),
    *("init", "init_parallel_env", "is_first_worker", "is_initialized", "spawn", "worker_index", "worker_num"),
}


def test_the_public_names_are_pinned_and_equal() -> None:
    assert set(PUBLIC) == EXPECTED
    assert set(collective.__all__) >= EXPECTED
    assert set(ps.__all__) >= EXPECTED | set(SERVER_SIDE)
    assert not set(SERVER_SIDE) & set(collective.__all__)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_name_is_there(name: str) -> None:
    pytest.importorskip("paddle")
    assert getattr(collective, name) is not None
    assert getattr(ps, name) is not None


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
    assert (found.timeout, found.backend, found.overlap) == (7, "tcp", False)
    assert placement_from({}).overlap


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"PADDLE_TRAINER_ID": "2", "PADDLE_TRAINERS_NUM": "2"}, "rank 2 is outside 0..1"),
        ({"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": "h:1"}, "names 1 ranks, PADDLE_TRAINERS_NUM says 2"),
        ({"GRADSYNC_SERVERS": "nonsense"}, "not an address: 'nonsense'"),
    ],
)
def test_a_contradictory_environment_is_named(env: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        placement_from(env)


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
