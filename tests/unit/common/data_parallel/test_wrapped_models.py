"""WrappedModels: several models of one group, frozen and thawed, with sparse gradients, and gone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")
from paddle import nn  # noqa: E402

from common.errors import UsageError  # noqa: E402
from common.paddle_api.data_parallel import DataParallel  # noqa: E402
from common.paddle_api.wrapped_models import WrappedModel, WrappedModels  # noqa: E402
from common.sync.local import LocalSynchronizer  # noqa: E402
from tests.support.paddle_models import Branches, Twice, batch, gradients  # noqa: E402


class Group(Twice):
    """Doubles every model's gradients; in gathers the other rank has three times this one's values."""

    def __init__(self) -> None:
        self.others: list[Group] = []
        self.closed = False

    def another(self) -> Any:
        self.others.append(Group())
        return self.others[-1]

    def all_gather(self, values: Any) -> Any:
        return np.stack([values, values if values.dtype == np.int64 else 3 * values])

    def close(self, reason: str = "") -> None:
        self.closed = True


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def models(group: Group) -> Iterator[WrappedModels]:
    found = WrappedModels(lambda: group)
    yield found
    found.stop()


def wrap(models: WrappedModels, model: Any) -> WrappedModel:
    return models.wrap(model, first_bytes=64, bucket_bytes=64)


def values_of(model: Any) -> dict[str, float]:
    return {name: None if g is None else float(np.abs(g).max()) for name, g in gradients(model).items()}


def test_each_model_has_a_synchronizer_of_its_own(models: WrappedModels, group: Group) -> None:
    one, other = nn.Linear(6, 2), nn.Linear(6, 2)
    wrap(models, one), wrap(models, other)
    (third,) = group.others
    one(batch()).sum().backward()
    assert (group.steps, third.steps) == (1, 0)
    (other(batch()).sum() + one(batch()).sum()).backward()
    assert (group.steps, third.steps) == (2, 1)
    assert (other.bias.grad.numpy() == 8).all()  # 4 samples, doubled
    assert (one.bias.grad.numpy() == 2 * (8 + 4)).all()  # of two backwards


def test_a_parameter_of_two_models_is_averaged_once(models: WrappedModels) -> None:
    one, other = nn.Linear(6, 2), nn.Linear(2, 2)
    both = nn.Sequential(one, other)
    wrap(models, one), wrap(models, both), wrap(models, both)
    both(batch()).sum().backward()
    assert (other.bias.grad.numpy() == 8).all()
    reference = 4 * other.weight.numpy().sum(1)
    np.testing.assert_array_equal(one.bias.grad.numpy(), 2 * reference)


def test_a_model_that_is_gone_is_synchronised_no_longer(models: WrappedModels, group: Group) -> None:
    one, other = nn.Linear(6, 2), nn.Linear(6, 2)
    wrap(models, one), wrap(models, other)
    weight = other.weight
    before = weight.numpy()
    del other
    gc.collect()
    one(batch()).sum().backward()
    assert len(models) == 1
    assert group.others[0].closed
    np.testing.assert_array_equal(weight.numpy(), before)  # who kept a parameter has it still
    (batch() @ weight).sum().backward()
    np.testing.assert_allclose(weight.grad.numpy()[:, 0], batch().numpy().sum(0))  # its own


def test_the_groups_own_synchronizer_outlives_its_model(models: WrappedModels, group: Group) -> None:
    for _ in range(3):
        model = nn.Linear(6, 2)
        wrap(models, model)
        model(batch()).sum().backward()
        assert (model.bias.grad.numpy() == 8).all()
        del model
        gc.collect()
    assert not group.closed
    assert len(group.others) == 2


def test_a_parameter_that_is_frozen_for_a_while_is_left_alone(models: WrappedModels) -> None:
    model = Branches()
    wrap(models, model)
    model(batch()).sum().backward()
    stale = model.body.bias.grad.numpy()
    model.body.bias.stop_gradient = model.body.weight.stop_gradient = True
    model(batch()).sum().backward()
    np.testing.assert_array_equal(model.left.bias.grad.numpy(), [2 * (8 + 4)] * 3)
    np.testing.assert_array_equal(model.body.bias.grad.numpy(), stale)  # as Paddle leaves it, which clears it neither:
    model.clear_gradients()
    model.body.bias.stop_gradient = model.body.weight.stop_gradient = False
    model(batch()).sum().backward()
    np.testing.assert_array_equal(model.body.bias.grad.numpy(), 2 * (stale + stale / 2))


def test_a_parameter_that_is_thawed_is_synchronised_from_then_on(models: WrappedModels, group: Group) -> None:
    model = Branches()
    model.left.bias.stop_gradient = True
    wrap(models, model)
    model(batch()).sum().backward()
    assert model.left.bias.grad is None
    model.left.bias.stop_gradient = False
    model(batch()).sum().backward()
    assert (model.left.bias.grad.numpy() == 8).all()
    assert (model.left.weight.grad.numpy() != 0).any()
    assert len(group.others) == 1
    for _ in range(2):
        model(batch()).sum().backward()
    assert len(group.others) == 1  # once


class Normalised(nn.Linear):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.norm = nn.SpectralNorm([6, 3])

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.norm(self.weight), self.bias)


@pytest.mark.filterwarnings("ignore:When training:UserWarning")
@pytest.mark.parametrize(
    ("model", "bias"), [(lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1D(3)), "1.bias"), (Normalised, "bias")]
)
def test_statistics_stay_each_ranks_own_when_a_gan_thaws_all_parameters(
    models: WrappedModels, group: Group, model: Any, bias: str
) -> None:
    model = model()
    wrap(models, model)
    for trainable in (False, True):
        for p in model.parameters():
            p.trainable = trainable
    model(batch()).sum().backward()
    assert not group.others  # of statistics, which would become rank 0's
    assert (gradients(model)[bias] == 8).all()


def test_a_scale_that_forward_passes_compute_is_no_trained_parameter(models: WrappedModels, group: Group) -> None:
    class Scaled(nn.Linear):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.scale = self.create_parameter([4, 3])
            self.scale.stop_gradient = True

        def forward(self, x: Any) -> Any:
            found = super().forward(x)
            paddle.assign(found, self.scale)
            return found

    model = Scaled()
    model(batch()).sum().backward()
    assert not model.scale.stop_gradient  # Paddle: it has a history now
    model.clear_gradients()
    wrap(models, model)
    model(batch()).sum().backward()
    assert (model.bias.grad.numpy() == 8).all()
    assert not group.others


def test_gradients_that_were_there_when_a_parameter_was_thawed_are_added_to(models: WrappedModels) -> None:
    model, plain = Branches(), Branches()
    plain.set_state_dict(model.state_dict())
    model.left.bias.stop_gradient = True
    wrapped = wrap(models, model)
    wrapped.enabled = False
    for each in (model, plain):
        each(batch(1)).sum().backward()
    model.left.bias.stop_gradient = False
    wrapped.enabled = True
    for each in (model, plain):
        each(batch(2)).sum().backward()
    np.testing.assert_array_equal(model.body.weight.grad.numpy(), 2 * plain.body.weight.grad.numpy())


QUIET, LOUD, BACKWARD = "forward in no_sync", "forward", "backward"


@pytest.mark.parametrize(
    ("course", "synchronised"),
    [
        ([LOUD, BACKWARD], [True]),
        ([QUIET, BACKWARD, LOUD, BACKWARD], [False, True]),
        ([LOUD, QUIET, BACKWARD, QUIET, BACKWARD], [True, False]),
        ([QUIET, LOUD, BACKWARD], [True]),
        ([QUIET, QUIET, BACKWARD, BACKWARD], [False, False]),
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_the_forward_decides_whether_a_backward_synchronises(
    models: WrappedModels, course: list[str], synchronised: list[bool], inside: bool
) -> None:
    """As in Paddle, wherever the backward stands."""
    model = DataParallel(nn.Linear(6, 2), models=models)
    losses: list[Any] = []
    found = []
    for what in course:
        with model.no_sync() if what == QUIET or (what == BACKWARD and inside) else nullcontext():
            if what == BACKWARD:
                model.clear_gradients()
                losses.pop(0).backward()
                found.append(bool((model.bias.grad.numpy() == 2).all()))
            else:
                losses.append(model(batch()).mean(0).sum())
    assert found == synchronised


def test_a_second_backward_synchronises_outside_no_sync(models: WrappedModels) -> None:
    """Where Paddle would leave each rank its own."""
    model = DataParallel(nn.Linear(6, 2), models=models)
    first, second = (model(batch()).mean(0).sum() for _ in range(2))
    for each in (first, second):
        model.clear_gradients()
        each.backward()
        assert (model.bias.grad.numpy() == 2).all()


def test_a_forward_without_gradients_decides_nothing(models: WrappedModels) -> None:
    model = DataParallel(nn.Linear(6, 2), models=models)
    with paddle.no_grad():
        model(batch())
    with model.no_sync():
        model(batch()).mean(0).sum().backward()
    assert (model.bias.grad.numpy() == 1).all()


def test_a_program_may_prepare_for_a_backward_by_itself(models: WrappedModels) -> None:
    model = DataParallel(nn.Linear(6, 2), models=models)
    with model.no_sync():
        loss = model(batch()).mean(0).sum()
    model._reducer.prepare_for_backward(list(model._find_tensor(loss)))
    loss.backward()
    assert (model.bias.grad.numpy() == 2).all()


def test_rows_of_a_sparse_table_are_joined_in_rank_order(models: WrappedModels) -> None:
    table = nn.Embedding(8, 3, sparse=True)
    wrapped = wrap(models, table)
    table(paddle.to_tensor([1, 1, 3])).sum().backward()
    found = table.weight.grad.get_selected_rows()
    assert found.rows() == [1, 1, 3, 1, 1, 3]
    np.testing.assert_array_equal(np.array(found.get_tensor()), np.repeat([0.5, 1.5], 3)[:, None] * np.ones(3))
    wrapped.enabled = False
    table(paddle.to_tensor([2])).sum().backward()
    assert sorted(set(table.weight.grad.get_selected_rows().rows())) == [1, 2, 3]


def test_a_rank_that_has_read_nothing_of_a_table_gets_the_others_rows(models: WrappedModels) -> None:
    class Other(Group):
        def all_gather(self, values: Any) -> Any:
            if values.dtype == np.int64 and values.size == 1 and not self.told:
                self.told = True
                return np.array([[0], [2]])
            theirs = np.arange(6, dtype=values.dtype).reshape(2, 3) if values.ndim == 2 else np.array([4, 5])
            return np.stack([values, theirs])

        told = False

    net = nn.Sequential(nn.Embedding(8, 3, sparse=True), nn.Linear(3, 1))
    apart = WrappedModels(lambda: LocalSynchronizer())
    wrapped = apart.wrap(net, first_bytes=64, bucket_bytes=64)
    wrapped._sparse._synchronizer = Other()
    net[1](paddle.ones([1, 3])).sum().backward()
    apart.stop()
    found = net[0].weight.grad.get_selected_rows()
    assert found.rows() == [4, 5]
    np.testing.assert_array_equal(np.array(found.get_tensor()), np.arange(6).reshape(2, 3) / 2)


def test_what_cannot_be_synchronised_is_refused(models: WrappedModels) -> None:
    with pytest.raises(UsageError, match="no trainable parameter"):
        wrap(models, nn.ReLU())
    with pytest.raises(UsageError, match=r"bfloat16: only float32 and float64 .*auto_cast\(level='O1'\)"):
        wrap(models, nn.Linear(2, 2).to(dtype="bfloat16"))


def test_a_model_of_some_ranks_is_averaged_by_these_after_those_of_all(models: WrappedModels, group: Group) -> None:
    some, all_of_them = nn.Linear(6, 2), nn.Linear(6, 2)
    order: list[str] = []
    part = Group()
    mine = DataParallel(some, group=group_of(part, 2), models=models)
    other = DataParallel(all_of_them, models=models)
    for name, each in (("some", part.others[0]), ("all", group)):
        each.finish = lambda rate, name=name, end=each.finish: (order.append(name), end(rate))
    (mine(batch()).sum() + other(batch()).sum()).backward()
    assert order == ["all", "some"]
    once = np.abs(batch().numpy().sum(0)).max()
    for model in (some, all_of_them):
        assert values_of(model)["weight"] == pytest.approx(2 * once)


def test_a_group_of_as_many_ranks_as_there_are_is_that_of_all(models: WrappedModels) -> None:
    part = Group()
    DataParallel(nn.Linear(6, 2), group=group_of(part, Group.nranks), models=models)
    assert part.others == []


@pytest.mark.parametrize("group_", [object(), SimpleNamespace(nranks=1, process_group=None)])
def test_who_is_no_member_cannot_wrap_a_model_for_the_group(models: WrappedModels, group_: Any) -> None:
    with pytest.raises(UsageError, match="group= must be a group of two ranks or more with this rank among them"):
        DataParallel(nn.Linear(6, 2), group=group_, models=models)


def group_of(synchronizer: Group, nranks: int) -> Any:
    return SimpleNamespace(nranks=nranks, process_group=SimpleNamespace(synchronizer=synchronizer))
