"""What the arena of a wrapped model holds, tied and repeated weights included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")
from paddle import nn  # noqa: E402
from paddle.distributed.fleet.utils import recompute  # noqa: E402

from common.errors import UsageError  # noqa: E402
from tests.support.paddle_models import Twice, averaging, batch, life  # noqa: E402


class Tied(nn.Layer):
    """One weight by two names, as language models have it, and a float64 head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3).to(dtype="float64")

    def forward(self, x: Any) -> Any:
        return self.head(self.second(paddle.tanh(self.first(x))).astype("float64"))


class Rank1(Twice):
    """Rank 0's parameters, which all are one, arrive as the arena is attached."""

    def attach(self, arena: Any, optimizer: Any) -> None:
        super().attach(arena, optimizer)
        for slot in arena.layout.slots:
            arena.parameter(slot)[...] = 1


def test_sharing_gives_rank_0s_parameters_as_views_of_the_arena() -> None:
    model, synchronizer = Tied(), Rank1()
    with averaging(model, synchronizer):
        arena = synchronizer.arena
        values = dict(model.named_parameters())
        assert sorted(slot.name for slot in arena.layout.slots[1:]) == sorted(values)
        for slot in arena.layout.slots[1:]:
            assert values[slot.name].data_ptr() == arena.parameters[slot.start :].ctypes.data
            assert (values[slot.name].numpy() == 1).all()
            arena.parameter(slot)[...] = 2 + slot.start
            assert (values[slot.name].numpy() == 2 + slot.start).all()
            assert str(values[slot.name].dtype) == f"paddle.{slot.dtype}"


def test_optimizers_and_set_value_write_into_the_arena() -> None:
    model, synchronizer = Tied(), Rank1()
    with averaging(model, synchronizer):
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        for _ in range(2):
            model(batch()).sum().backward()
            optimizer.step()
            optimizer.clear_grad()
        model.first.bias.set_value(paddle.full([6], 7.0))
        model.set_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        values = dict(model.named_parameters())
        for slot in synchronizer.arena.layout.slots[1:]:
            np.testing.assert_array_equal(values[slot.name].numpy(), synchronizer.arena.parameter(slot))
        np.testing.assert_array_equal(model.first.bias.numpy(), np.full(6, 8, np.float32))


def test_a_tied_weight_is_one_parameter_with_the_sum_of_both_gradients() -> None:
    paddle.seed(3)
    model, synchronizer = Tied(), Twice()
    reference = Tied()
    reference.set_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    with averaging(model, synchronizer):
        names = [slot.name for slot in synchronizer.arena.layout.slots]
        assert sum(name.endswith("weight") for name in names) == 2  # the tied one and the head's
        assert model.first.weight is model.second.weight
        for each in (model, reference):
            each(batch()).sum().backward()
        np.testing.assert_array_equal(model.first.weight.grad.numpy(), 2 * reference.first.weight.grad.numpy())
        model(batch()).sum().backward()
        assert len(synchronizer.marked) == len(set(synchronizer.marked))


class Repeated(nn.Layer):
    """Blocks that share a weight, recomputed in backward or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.LayerList([nn.Linear(6, 6) for _ in range(3)])
        for block in self.blocks[1:]:
            block.weight = self.blocks[0].weight
        self.recomputed, self.used = True, 3

    def forward(self, x: Any, left: bool = True) -> Any:
        x = self.first(x)
        for block in self.blocks[: self.used]:
            x = paddle.tanh(recompute(block, x) if self.recomputed else block(x))
        return x


def repeated(*, serves_updates: bool, recomputed: bool) -> list[dict[str, bytes]]:
    found = []
    with life(Repeated, serves_updates=serves_updates) as each:
        each.model.recomputed = recomputed
        for _ in range(4):
            each.backward(theirs="first")
            each.step()
            found.append({name: p.numpy().tobytes() for name, p in each.model.named_parameters()})
    return found


@pytest.mark.parametrize("serves_updates", [True, False])
def test_recomputed_blocks_that_share_weights_train_as_others_do(serves_updates: bool) -> None:
    expected = repeated(serves_updates=serves_updates, recomputed=False)
    assert repeated(serves_updates=serves_updates, recomputed=True) == expected


def test_buckets_not_shared_are_marked_early_beside_those_that_are() -> None:
    model, synchronizer = Repeated(), Twice()
    with averaging(model, synchronizer) as average:
        for _ in range(2):
            model(batch()).sum().backward()
        names = [
            {s.name for s in average.binding.arena.layout.slots_between(b.start, b.stop)}
            for b in average.binding.arena.buckets
        ]
        marked = [names[bucket] for bucket in synchronizer.marked]
        assert {"blocks.2.bias"} in marked
        assert not any("blocks.0.weight" in each for each in marked)


def test_weights_shared_by_recomputed_blocks_only_later_are_refused() -> None:
    model, synchronizer = Repeated(), Twice()
    with averaging(model, synchronizer):
        model.used = 1
        model(batch()).sum().backward()
        model.used = 3
        text = r"^backward reached parameter blocks\.0\.weight again after its gradient was sent"
        with pytest.raises(UsageError, match=text):
            model(batch()).sum().backward()
