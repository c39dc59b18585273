"""What libraries and programs read of Paddle behind its interface: it is there under a scheme, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle
from paddle.distributed import collective, parallel_helper
from paddle.distributed.communication import group as communication
from paddle.distributed.fleet import meta_parallel
from paddle.distributed.fleet.base import topology

from common.launch.settings import Placement
from tests.support.three_ranks import ENDPOINTS, PLACE, fleet_at


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("PADDLE_TRAINER_ID", str(PLACE.rank))
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", str(PLACE.nranks))
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", ",".join(ENDPOINTS))
    for each in (collective._group_map, collective._group_map_by_name, collective._group_map_backend):
        each.clear()  # what other tests have not left
    communication._GroupManager.group_map_by_id.clear()
    fleet = fleet_at()
    fleet.init(is_collective=True)
    yield fleet
    fleet.leave()


def test_paddles_maps_have_our_groups_until_they_are_left(fleet: Any) -> None:
    world, some = fleet.get_group(), fleet.new_group([2, 0])
    assert (
        collective._get_default_group() is collective._get_global_group() is communication._get_global_group() is world
    )
    by_id = communication._GroupManager.group_map_by_id
    for found in (by_id, collective._get_group_map()):
        assert [found[0], found[some.id]] == [world, some]
    assert collective._get_group_map_by_name() == {"_default_pg": world, some.name: some}
    assert (collective._default_backend, collective._group_map_backend) == ("gloo", {world: "gloo", some: "gloo"})
    assert parallel_helper._is_parallel_ctx_initialized()
    fleet.destroy_process_group(some)
    assert by_id == {0: world}
    fleet.leave()
    assert (by_id, collective._group_map_by_name, collective._group_map_backend) == ({}, {}, {})
    assert not communication.is_initialized()


def test_paddles_own_groups_stay_in_its_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    class PaddlesOwn:
        pass

    monkeypatch.setattr(paddle.base.core, "ProcessGroup", PaddlesOwn)
    own = communication.Group(0, 0, [0, 1], pg=PaddlesOwn(), name="_default_pg")
    monkeypatch.setitem(communication._GroupManager.group_map_by_id, 0, own)
    fleet = fleet_at()
    fleet.new_group([0, 2])
    assert communication._GroupManager.group_map_by_id == {0: own}
    fleet.leave()
    assert communication._GroupManager.group_map_by_id == {0: own}


def test_the_one_fleet_has_paddles_fields(fleet: Any) -> None:
    assert fleet._topology.get_dim("data") == 3
    assert topology._HYBRID_PARALLEL_GROUP is fleet._hcg
    role = fleet._role_maker
    assert isinstance(role, paddle.distributed.fleet.base.role_maker.RoleMakerBase)
    assert (role._worker_index(), role._worker_num(), role._get_trainer_endpoints()) == (2, 3, list(ENDPOINTS))
    assert fleet._is_collective
    assert fleet._user_defined_strategy is fleet._user_defined_strategy
    assert fleet.hybrid_configs["mp_degree"] == 1
    assert (fleet._context, fleet._final_strategy(), fleet._get_applied_meta_list()) == ({}, {}, [])
    mine = paddle.distributed.fleet.UserDefinedRoleMaker(
        is_collective=True, current_id=1, worker_num=2, worker_endpoints=["h:1", "h:2"], init_gloo=False
    )
    fleet.init(mine)
    assert fleet._role_maker is mine
    fleet.leave()
    assert topology._HYBRID_PARALLEL_GROUP is None


def test_a_distributed_optimizer_has_the_programs_own_inside(fleet: Any) -> None:
    layer = paddle.nn.Linear(2, 1, bias_attr=False)
    before = layer.weight.numpy()
    own = paddle.optimizer.SGD(0.5, parameters=layer.parameters())
    optimizer = fleet.distributed_optimizer(own)
    assert type(optimizer).__name__ == "HybridParallelOptimizer"
    assert optimizer._inner_opt is fleet.user_defined_optimizer is own
    layer(paddle.to_tensor([[1.0, 2.0]])).sum().backward()
    optimizer.step()
    assert np.array_equal(layer.weight.numpy(), before - np.float32(0.5) * np.array([[1.0], [2.0]], np.float32))
    optimizer.clear_grad()
    assert optimizer.get_lr() == 0.5
    fleet.placement = Placement()  # of one rank, as in Paddle
    assert fleet.distributed_optimizer(own) is own


def test_layers_that_tensor_parallelism_divides_are_whole(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle.distributed.fleet, "fleet", fleet)  # as `install` does
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    for kind, options in (("Column", {"gather_output": True}), ("Row", {"input_is_parallel": False})):
        layer = getattr(meta_parallel, f"{kind}ParallelLinear")(3, 5, has_bias=True, **options)
        layer.bias.set_value(np.arange(5, dtype=np.float32))
        expected = values @ layer.weight.numpy() + np.arange(5, dtype=np.float32)
        assert np.allclose(layer(paddle.to_tensor(values)).numpy(), expected, atol=1e-5)
    table = meta_parallel.VocabParallelEmbedding(7, 2)
    assert np.array_equal(table(paddle.to_tensor([6, 0])).numpy(), table.weight.numpy()[[6, 0]])
