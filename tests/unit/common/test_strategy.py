"""`DistributedStrategy`: Paddle's own, read before it is set, and refused where it asks for another training."""

from __future__ import annotations

from typing import Any

import pytest

import collective
import ps
from common.errors import UsageError
from common.paddle_api import strategy as checks
from common.paddle_api.strategy import DEGREES, IN_VAIN, SWITCHES

paddle = pytest.importorskip("paddle")


def strategy(**fields: Any) -> Any:
    found = collective.DistributedStrategy()
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def check_strategy(given: Any, nranks: int) -> list[str]:
    told: list[str] = []
    checks.check_strategy(given, nranks, told.append)
    return told


def refused(given: Any, nranks: int = 2) -> str:
    with pytest.raises(UsageError) as raised:
        check_strategy(given, nranks)
    return str(raised.value)


def test_it_is_paddles_type_and_has_its_defaults() -> None:
    given = collective.DistributedStrategy()
    assert isinstance(given, paddle.distributed.fleet.DistributedStrategy)
    assert isinstance(given, ps.DistributedStrategy)
    assert (given.amp, given.find_unused_parameters, given.fuse_grad_size_in_MB) == (False, False, 32)
    assert given.hybrid_configs["mp_degree"] == 1
    with pytest.raises(TypeError, match="no_such_field"):
        given.no_such_field = 1


@pytest.mark.parametrize("nranks", [1, 2, 5])
def test_the_defaults_and_what_changes_no_bits_are_taken(nranks: int) -> None:
    check_strategy(None, nranks)
    check_strategy(strategy(), nranks)
    check_strategy(strategy(a_sync=False, **dict.fromkeys(set(SWITCHES) - {"a_sync"}, False)), nranks)
    check_strategy(
        strategy(
            **dict.fromkeys(("amp", "recompute", "find_unused_parameters", "sync_batch_norm"), True),
            **dict.fromkeys(("fuse_all_reduce_ops", "sync_nccl_allreduce", "without_graph_optimization"), False),
            nccl_comm_num=2,
            fuse_grad_size_in_MB=16,
            last_comm_group_size_MB=2,
            hybrid_configs={"dp_degree": nranks, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1},
        ),
        nranks,
    )


@pytest.mark.parametrize("field", sorted(IN_VAIN))
def test_what_is_in_vain_under_paddle_too_is_said_and_taken(field: str) -> None:
    (line,) = check_strategy(strategy(**{field: True}), 2)
    assert line.startswith(f"gradsync: DistributedStrategy: {field} has no effect, as in Paddle's dynamic graph: ")
    assert line.endswith(SWITCHES[field].words)


@pytest.mark.parametrize("field", sorted(SWITCHES.keys() - IN_VAIN))
def test_a_switch_for_another_training_is_named_with_what_to_do(field: str) -> None:
    assert (
        refused(strategy(**{field: True})) == f"DistributedStrategy: {field} is not supported: {SWITCHES[field].words}"
    )


@pytest.mark.parametrize("field", DEGREES)
def test_parts_of_a_model_are_refused(field: str) -> None:
    check_strategy(strategy(hybrid_configs={field: 1}), 4)
    assert f"hybrid_configs asks for {field} 2, but each rank trains the whole model" in refused(
        strategy(hybrid_configs={field: 2}), 4
    )


@pytest.mark.parametrize(("degree", "nranks"), [(1, 2), (2, 1), (4, 2)])
def test_another_number_of_ranks_is_refused(degree: int, nranks: int) -> None:
    said = refused(strategy(hybrid_configs={"dp_degree": degree}), nranks)
    assert said.endswith(f"hybrid_configs asks for dp_degree {degree}, but there are {nranks} ranks: leave it at -1")


@pytest.mark.parametrize("field", ["use_pure_fp16", "use_pure_bf16"])
def test_parameters_in_half_precision_are_refused_where_they_would_be_made(field: str) -> None:
    check_strategy(strategy(amp_configs={field: True}), 2)  # `amp` is off
    assert f"amp_configs asks for {field}, but parameters must stay" in refused(
        strategy(amp=True, amp_configs={field: True})
    )


def test_gradients_that_are_not_averaged_are_refused() -> None:
    assert "gradient_scale_configs asks for 'sum', but" in refused(
        strategy(gradient_scale_configs={"scale_strategy": "sum"})
    )


def test_fleet_init_and_distributed_optimizer_refuse_before_anybody_joins() -> None:
    from common.paddle_api.fleet_api import FleetApi
    from ps.fleet import ServerFleetApi

    for fleet in (FleetApi("test", lambda _: pytest.fail("joined")), ServerFleetApi()):
        with pytest.raises(UsageError, match="DistributedStrategy: pipeline is not supported"):
            fleet.init(is_collective=True, strategy=strategy(pipeline=True))
        optimizer = paddle.optimizer.SGD(parameters=paddle.nn.Linear(1, 1).parameters())
        with pytest.raises(UsageError, match="DistributedStrategy: sharding is not supported"):
            fleet.distributed_optimizer(optimizer, strategy(sharding=True))
        assert not fleet.is_initialized()
