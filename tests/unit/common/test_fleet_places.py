"""What Fleet says of a job's places, and what its workers do together, of ranks that are simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.errors import UsageError
from common.launch.settings import Placement
from common.sync.local import LocalSynchronizer
from tests.support.three_ranks import ENDPOINTS, PLACE, ThreeRanks, fleet_at

paddle = pytest.importorskip("paddle")


def test_places_are_told_as_in_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PADDLE_RANK_IN_NODE", "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_DEVICE_IDS", "PADDLE_WORLD_DEVICE_IDS"):
        monkeypatch.delenv(name, raising=False)
    fleet = fleet_at()
    assert (fleet.worker_index(), fleet.rank(), fleet.worker_num(), fleet.nranks(), fleet.world_size()) == (
        2,
        2,
        3,
        3,
        3,
    )
    assert (fleet.is_first_worker(), fleet.is_worker(), fleet.is_server(), fleet.is_coordinator()) == (
        *(False, True),
        *(False, False),
    )
    assert (fleet.node_num(), fleet.local_rank(), fleet.local_device_ids(), fleet.world_device_ids()) == (
        2,
        "2",
        None,
        None,
    )
    assert fleet.worker_endpoints() == list(ENDPOINTS)
    assert fleet.worker_endpoints(to_string=True) == ",".join(ENDPOINTS)
    assert (fleet.server_num(), fleet.server_endpoints(), fleet.server_endpoints(True)) == (
        2,
        ["h:1", "h:2"],
        "h:1,h:2",
    )
    monkeypatch.setenv("PADDLE_LOCAL_RANK", "0")
    monkeypatch.setenv("PADDLE_LOCAL_DEVICE_IDS", "5")
    assert (fleet.local_rank(), fleet.rank_in_node(), fleet.local_device_ids()) == ("0", "0", "5")


@pytest.mark.parametrize("servers", ["", "h:1"])
def test_without_is_collective_each_rank_is_the_first_of_one_unless_paddle_has_servers(
    monkeypatch: pytest.MonkeyPatch, servers: str
) -> None:
    """As Paddle's PaddleCloudRoleMaker, which `init` makes then, reads the environment."""
    monkeypatch.setenv("PADDLE_PSERVERS_IP_PORT_LIST", servers)
    fleet = fleet_at()
    fleet.init()
    expected = (2, 3, False) if servers else (0, 1, True)
    assert (fleet.worker_index(), fleet.worker_num(), fleet.is_first_worker()) == expected
    assert (fleet.get_rank(), fleet.get_world_size()) == (2, 3)
    fleet.init(is_collective=True)
    assert (fleet.worker_index(), fleet.worker_num(), fleet.is_first_worker()) == (2, 3, False)


def test_a_parameter_server_programs_workers_differ_without_is_collective() -> None:
    from ps.fleet import ServerFleetApi

    fleet = ServerFleetApi()
    fleet._synchronizer = ThreeRanks()
    fleet.init()
    fleet.placement = PLACE
    assert (fleet.worker_index(), fleet.is_first_worker(), fleet.is_worker()) == (0, True, True)
    assert fleet.worker_num() == 1
    assert not fleet.is_server()  # asked by a program that has servers
    assert (fleet.worker_index(), fleet.worker_num()) == (2, 3)


def test_parallel_env_is_a_type_with_paddles_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_PG_TIMEOUT", "60000")
    fleet = fleet_at()
    env = fleet.ParallelEnv()
    assert isinstance(env, fleet.ParallelEnv)
    assert isinstance(env, paddle.distributed.ParallelEnv)
    assert (env.rank, env.local_rank, env.world_size, env.nranks) == (2, 2, 3, 3)
    assert (env.device_id, env.dev_id, env.device_type, env.nrings, env.pg_timeout) == (0, 0, "", 1, 60000)
    assert (env.current_endpoint, env.trainer_endpoints) == (ENDPOINTS[2], list(ENDPOINTS))
    fields = {name for name in vars(paddle.distributed.ParallelEnv) if not name.startswith("_")}
    assert [name for name in sorted(fields) if getattr(env, name, None) is None] == []
    fleet.placement = replace(PLACE, rank=0)  # as a role maker may say
    assert fleet.ParallelEnv().rank == 0


def test_a_back_end_may_be_named() -> None:
    fleet = fleet_at()
    group = fleet.init_parallel_env("gloo")
    assert group is fleet.init_parallel_env() is fleet.get_group()
    assert (group.rank, group.ranks, group.nranks, group.id, group.process_group.size()) == (2, [0, 1, 2], 3, 0, 3)
    assert fleet.get_hybrid_communicate_group().get_data_parallel_group() is group


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("mode", ["sum", "max", "min"])
def test_util_reduces_arrays(shape: tuple[int, ...], dtype: str, mode: str) -> None:
    mine = (np.arange(np.prod(shape, dtype=int)) - 1).reshape(shape).astype(dtype)
    found = fleet_at().util.all_reduce(mine, mode)
    expected = getattr(np.stack([mine, 2 * mine + 1, 3 * mine + 2]), mode)(0)
    assert (found.dtype, found.shape) == (mine.dtype, shape)
    assert np.array_equal(found, expected)


def test_util_takes_numbers_and_lists_and_says_what_it_does_not_take() -> None:
    fleet = fleet_at()
    util = fleet.util
    assert isinstance(util, fleet_util_base())
    assert util.all_reduce(5).tolist() == 5 + 11 + 17
    assert util.all_reduce([1.0, 2.0], "max", "worker").tolist() == [5.0, 8.0]
    assert util.all_reduce((1, 2)).tolist() == [9, 15]
    assert util.all_gather(7) == [7, 15, 23]
    assert util.barrier() is None
    assert fleet.barrier_worker() is None
    with pytest.raises(ValueError, match=r"all_reduce: mode must be one of sum, max, min, mean \(got 'product'\)"):
        util.all_reduce(1, "product")
    for call in (lambda: util.all_reduce(1, "sum", "all"), lambda: util.barrier("server")):
        with pytest.raises(UsageError, match="servers take no part in it; leave out comm_world="):
            call()


def fleet_util_base() -> Any:
    import collective

    assert collective.UtilBase is paddle.distributed.fleet.UtilBase
    return collective.UtilBase


@pytest.mark.parametrize(("count", "shares"), [(0, [0, 0, 0]), (1, [1, 0, 0]), (5, [2, 2, 1]), (6, [2, 2, 2])])
def test_util_shares_files_out(count: int, shares: list[int]) -> None:
    files = [f"part-{index}" for index in range(count)]
    found = [fleet_at(replace(PLACE, rank=rank)).util.get_file_shard(files) for rank in range(3)]
    assert [len(each) for each in found] == shares
    assert [file for each in found for file in each] == files
    with pytest.raises(TypeError, match="list"):
        fleet_at().util.get_file_shard("part-0")


def test_util_prints_on_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    fleet_at().util.print_on_rank("mine", 2)
    fleet_at().util.print_on_rank("another's", 1)
    assert capsys.readouterr().out == "mine\n"


def test_metrics_are_of_all_ranks() -> None:
    metrics = fleet_at().metrics
    mine, count = np.array([4.0]), np.array([10])
    total, number = 4.0 + 9.0 + 14.0, 10 + 21 + 32
    assert metrics.sum(mine).tolist() == [total]
    assert (metrics.max(mine).tolist(), metrics.min(mine).tolist()) == ([14.0], [4.0])
    assert metrics.acc(mine, count) == metrics.mae(mine, count) == metrics.mse(mine, count) == total / number
    assert metrics.rmse(mine, count) == (total / number) ** 0.5


def test_auc_is_of_all_ranks() -> None:
    positive, negative = np.array([[0.0, 1.0, 4.0]]), np.array([[3.0, 2.0, 0.0]])
    all_positive = (np.stack([positive, 2 * positive + 1, 3 * positive + 2])).sum(0)[0]
    all_negative = (np.stack([negative, 2 * negative + 1, 3 * negative + 2])).sum(0)[0]
    pairs = sum(
        p * n * (1.0 if i > j else 0.5 if i == j else 0.0)
        for i, p in enumerate(all_positive)
        for j, n in enumerate(all_negative)
    )
    found = fleet_at().metrics.auc(positive, negative)
    assert found == pytest.approx(pairs / (all_positive.sum() * all_negative.sum()), rel=1e-12)


@pytest.mark.parametrize("nranks", [1, 3])
def test_the_hybrid_group_is_parallel_in_its_data_only(nranks: int) -> None:
    fleet = fleet_at(replace(PLACE, rank=nranks - 1, nranks=nranks, endpoints=ENDPOINTS[:nranks]))
    groups = fleet.get_hybrid_communicate_group()
    assert groups is fleet.get_hybrid_communicate_group()
    assert isinstance(groups, paddle.distributed.fleet.HybridCommunicateGroup)
    assert groups.get_parallel_mode() == (paddle.distributed.ParallelMode.DATA_PARALLEL if nranks > 1 else None)
    assert (groups.get_global_rank(), groups.get_data_parallel_rank()) == (nranks - 1, nranks - 1)
    assert groups.get_data_parallel_world_size() == nranks
    assert groups.get_data_parallel_group().ranks == list(range(nranks))
    assert groups.get_data_parallel_group_src_rank() == 0
    for name in ("model", "sharding"):
        assert getattr(groups, f"get_{name}_parallel_world_size")() == 1
        assert getattr(groups, f"get_{name}_parallel_rank")() == 0
        assert getattr(groups, f"get_{name}_parallel_group")().ranks == [nranks - 1]
        assert getattr(groups, f"get_{name}_parallel_group_src_rank")() == nranks - 1
    assert (groups.get_pipe_parallel_world_size(), groups.get_stage_id(), groups.get_sep_parallel_world_size()) == (
        1,
        0,
        1,
    )
    assert groups.get_pipe_parallel_group().nranks == groups.get_check_parallel_group().nranks == 1
    assert groups.topology().get_dim("data") == nranks
    assert groups.get_rank_from_stage(0) == nranks - 1
    tensor = paddle.ones([2])
    with pytest.warns(UserWarning, match="is not in group"):  # as Paddle has it in a group of one
        fleet.all_reduce(tensor, group=groups.get_model_parallel_group())
    assert tensor.numpy().tolist() == [1.0, 1.0]
    fleet._synchronizer = LocalSynchronizer()  # left, and joined anew
    assert fleet.get_hybrid_communicate_group() is not groups


def test_minimize_is_that_of_the_last_optimizer() -> None:
    fleet = fleet_at(Placement())
    layer = paddle.nn.Linear(2, 1, bias_attr=False)
    before = layer.weight.numpy()
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.5, parameters=layer.parameters()))
    loss = layer(paddle.to_tensor([[1.0, 2.0]])).sum()
    loss.backward()
    fleet.minimize(loss)
    assert np.array_equal(layer.weight.numpy(), before - np.float32(0.5) * np.array([[1.0], [2.0]], np.float32))
    assert fleet.collective_perf("allreduce") is None
