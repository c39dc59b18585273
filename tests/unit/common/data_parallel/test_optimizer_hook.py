"""Updates by servers are those by trainers, whatever the program does between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")
from paddle import nn  # noqa: E402

from common.errors import PeerLost, UsageError  # noqa: E402
from tests.support.paddle_models import Life, batch, clear_grad, clear_gradients, gradients, life  # noqa: E402


def zero_grad(each: Life) -> None:
    each.model.zero_grad()


def drop_grad(each: Life) -> None:
    each.optimizer.clear_grad(set_to_zero=False)


def skipped(clear: Callable[[Life], None], **second: Any) -> Callable[[Life], None]:
    """A step is left out, as after an overflow, and its gradients are thrown away."""

    def program(each: Life) -> None:
        each.backward(theirs="body right")
        clear(each)
        each.backward(**second)
        each.step()

    return program


def two_backwards(each: Life) -> None:
    each.backward()
    each.backward(adds=True)
    each.step()


def two_backwards_of_other_parts(each: Life) -> None:
    """What only the other rank has used in the first one counts in full."""
    each.backward(left=True, theirs="body right")
    each.backward(left=True, theirs="body right", adds=True)
    each.step()


def three_backwards_of_changing_parts(each: Life) -> None:
    for number in range(3):
        each.backward(left=number % 2 == 0, theirs="body right" if number == 1 else "body", adds=number > 0)
    each.step()


def another_model(each: Life) -> None:
    each.backward()
    nn.Linear(6, 2)(batch()).sum().backward()
    each.step()


def another_model_between_two(each: Life) -> None:
    each.backward(theirs="body right")
    nn.Linear(6, 2)(batch()).sum().backward()
    each.backward(adds=True)
    each.step()


def no_sync_before(each: Life) -> None:
    each.average.enabled = False
    each.backward()
    each.average.enabled = True
    each.backward()
    each.step()


def weights_set(each: Life) -> None:
    each.backward()
    each.model.left.weight.set_value(paddle.full([5, 3], 0.25))
    each.step()


def weights_exchanged(each: Life) -> None:
    each.backward()
    left, right = each.model.left.weight.clone(), each.model.right.weight.clone()
    each.model.left.weight.set_value(right)
    each.model.right.weight.set_value(left)
    each.step()


GRADIENT_CHANGES: dict[str, Callable[[Any], object]] = {
    "scaled": lambda m: m.left.bias.grad.scale_(0.5),
    "negated": lambda m: [p.grad.scale_(-1.0) for p in (m.left.bias, m.left.weight)],
    "clipped": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-3),
    "clipped by value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-3),
    "replaced": lambda m: setattr(m.left.bias, "grad", paddle.ones([3])),
    "moved along": lambda m: m.left.weight.grad.set_value(m.left.weight.grad.roll(1, 0)),
}


def changed(how: str) -> Callable[[Life], None]:
    """All ranks change their gradients between backward and step."""

    def program(each: Life) -> None:
        each.backward()
        GRADIENT_CHANGES[how](each.model)
        each.step()

    return program


def two_backwards_around_a_look(each: Life) -> None:
    each.backward()
    assert each.model.left.bias.grad is not None
    each.backward(adds=True)
    each.step()


PROGRAMS: dict[str, Callable[[Life], None]] = {
    **{how: changed(how) for how in GRADIENT_CHANGES},
    "skipped, clear_gradients": skipped(clear_gradients),
    "skipped, clear_grad": skipped(clear_grad),
    "skipped, zero_grad": skipped(zero_grad),
    "skipped, clear_grad to none": skipped(drop_grad),
    "skipped, then another part": skipped(clear_grad, left=False),
    **{
        function.__name__.replace("_", " "): function
        for function in (
            two_backwards,
            two_backwards_of_other_parts,
            three_backwards_of_changing_parts,
            another_model,
            another_model_between_two,
            no_sync_before,
            two_backwards_around_a_look,
            weights_set,
            weights_exchanged,
        )
    },
}


def history_of(program: Callable[[Life], None], *, serves_updates: bool) -> list[dict[str, bytes]]:
    """The parameters after each step: two as usual, the program, and one more."""
    found = []
    with life(serves_updates=serves_updates) as each:
        for part in (None, None, program, None):
            if part:
                part(each)
            else:
                each.backward()
                each.step()
            found.append({name: p.numpy().tobytes() for name, p in each.model.named_parameters()})
        assert any(end[0] == "update" for end in each.synchronizer.ends) == serves_updates
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_updates_by_servers_are_those_by_trainers_whatever_the_program_does(name: str) -> None:
    by_servers, by_trainers = (history_of(PROGRAMS[name], serves_updates=s) for s in (True, False))
    assert by_servers == by_trainers
    assert len({tuple(values.values()) for values in by_servers}) == 4


def test_the_average_that_backward_waited_for_is_used_again_in_the_first_two_steps_only() -> None:
    with life(serves_updates=True) as each:
        for _ in range(2):
            each.backward()
            each.step()
        two_backwards(each)
        assert each.synchronizer.ends == [
            ("average",),
            ("configure", "sgd"),
            ("update", True, False),
            ("average",),
            ("update", True, False),
            ("average",),
            ("update", False, False),
        ]


@pytest.fixture
def served() -> Iterator[Life]:
    """A program that has made two steps by servers, and a backward."""
    with life(serves_updates=True) as each:
        for _ in range(2):
            each.backward()
            each.step()
        each.backward()
        yield each


PARAMETER_CHANGES: dict[str, Callable[[Any], object]] = {
    "set_value": lambda m: m.left.bias.set_value(paddle.ones([3])),
    "set_state_dict": lambda m: m.set_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "data": lambda m: setattr(m.left.bias, "data", paddle.full([3], 5.0)),
    "in place": lambda m: paddle.no_grad()(lambda: m.left.bias.add_(paddle.ones([3])))(),
    "one bit": lambda m: m.left.bias.set_value(paddle.nextafter(m.left.bias, paddle.full([3], 9.0))),
}


@pytest.mark.parametrize("how", PARAMETER_CHANGES)
def test_changed_parameters_are_noticed_once_and_are_views_again(served: Life, how: str) -> None:
    steps, model, arena = served.average.pushed_step, served.model, served.synchronizer.arena
    assert not steps.parameters_changed()
    PARAMETER_CHANGES[how](model)
    expected = {name: p.numpy().tobytes() for name, p in model.named_parameters()}
    assert steps.parameters_changed()
    values = dict(model.named_parameters())
    for slot in arena.layout.slots[1:]:
        assert values[slot.name].data_ptr() == arena.parameters[slot.start :].ctypes.data
        assert arena.parameter(slot).tobytes() == expected[slot.name]
    steps.note_parameters()
    assert not steps.parameters_changed()


@pytest.mark.parametrize("how", PARAMETER_CHANGES)
def test_a_step_after_a_change_says_that_parameters_were_replaced(served: Life, how: str) -> None:
    PARAMETER_CHANGES[how](served.model)
    served.step()
    assert served.synchronizer.ends[-1] == ("update", False, True)
    served.backward()
    served.step()
    assert served.synchronizer.ends[-1] == ("update", False, False)


def test_values_set_as_they_were_are_no_change(served: Life) -> None:
    served.model.set_state_dict({k: v.clone() for k, v in served.model.state_dict().items()})
    served.step()
    assert served.synchronizer.ends[-1] == ("update", False, False)


UNSEEN_CHANGES: dict[str, Callable[[Any], object]] = {
    "scaled": lambda m: m.left.bias._grad_ivar().scale_(0.5),
    "negated": lambda m: [p._grad_ivar().scale_(-1.0) for p in (m.left.bias, m.left.weight)],
    "replaced": lambda m: m.left.bias._copy_gradient_from(paddle.ones([3])),
    "cleared": lambda m: m.left.bias.clear_gradient(False),
    "zeroed": lambda m: m.left.bias.clear_gradient(True),
    "moved along": lambda m: m.left.weight._grad_ivar().set_value(m.left.weight._grad_ivar().roll(1, 0)),
}


@pytest.mark.parametrize("how", UNSEEN_CHANGES)
def test_changed_gradients_are_noticed(served: Life, how: str) -> None:
    assert not served.average.pushed_step.gradients_changed()
    UNSEEN_CHANGES[how](served.model)
    assert served.average.pushed_step.gradients_changed()
    with pytest.raises(UsageError, match=r"^the program changed gradients between backward and optimizer\.step\(\)"):
        served.step()


def test_who_looks_at_gradients_finds_the_mean_and_no_change(served: Life) -> None:
    (mine,) = {p._grad_ivar().numpy().tobytes() for p in [served.model.left.bias]}
    assert gradients(served.model)["left.bias"].tobytes() != mine
    assert served.synchronizer.ends[-1] == ("average",)
    assert not served.average.pushed_step.gradients_changed()


LOOKS: dict[str, tuple[Callable[[Life], object], str]] = {
    "reads": (lambda each: each.model.left.bias.grad, "trainers"),
    "reads a parameter of no model": (lambda _: paddle.create_parameter([2], "float32").grad, "servers"),
    "zero_grad in place of a step": (lambda each: each.model.zero_grad(), "servers"),
    "a scaler's step": (lambda each: paddle.amp.GradScaler(enable=False).step(each.optimizer), "servers"),
}


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("name", LOOKS)
def test_who_updates_once_the_program_has_looked_at_gradients(name: str, step: int) -> None:
    look, expected = LOOKS[name]
    with life(serves_updates=True) as each:
        assert each.model.left.bias.grad is None  # before any backward: says nothing
        for number in range(4):
            each.backward()
            if number == step:
                look(each)
            if number != step or "step" not in name:
                each.step()
            each.optimizer.clear_grad()
        assert each.hook.decision == expected


def test_tensors_have_their_own_properties_back() -> None:
    before = paddle.Tensor.grad, paddle.Tensor.grad_, nn.Layer.zero_grad
    with life(serves_updates=True), life(serves_updates=True):
        assert paddle.Tensor.grad is not before[0]
    assert (paddle.Tensor.grad, paddle.Tensor.grad_, nn.Layer.zero_grad) == before


def test_an_update_whose_group_fails_is_none_and_neither_are_those_after_it(served: Life) -> None:
    def fails(*_: object, **__: object) -> None:
        raise PeerLost("server 0 died")

    served.synchronizer.update = fails
    before = served.model.state_dict()["body.weight"].numpy().tobytes()
    served.optimizer.step()
    assert [str(each) for each in served.failures] == ["server 0 died"]
    served.hook.stand_still()
    served.step()
    assert served.model.state_dict()["body.weight"].numpy().tobytes() == before
    assert (len(served.failures), served.optimizer.state_dict()) == (1, {})


@pytest.mark.parametrize(
    ("who", "ends"),
    [
        ("servers", [("configure", "sgd"), ("average",), ("update", True, False), ("update", False, False)]),
        ("trainers", [("average",), ("average",)]),
        ("", [("average",), ("configure", "sgd"), ("update", True, False), ("average",), ("update", True, False)]),
    ],
)
def test_in_a_further_group_it_is_as_it_was_decided(who: str, ends: list[tuple[object, ...]]) -> None:
    with life(serves_updates=True) as each:
        each.hook.go_on(who, each.optimizer)
        assert (each.hook.decision, each.hook.has(each.optimizer)) == (who, who == "servers")
        for _ in range(2):
            each.backward()
            each.step()
        assert each.synchronizer.ends == ends


def test_servers_that_could_not_make_that_update_do_not_go_on_with_it() -> None:
    with life(serves_updates=True) as each:
        each.optimizer._grad_clip = nn.ClipGradByValue(1.0)
        with pytest.raises(UsageError, match=r"go on with the update that they have made: the optimizer clips grad"):
            each.hook.go_on("servers", each.optimizer)


def test_of_a_state_that_servers_have_only_the_schedule_is_here() -> None:
    with life(serves_updates=True) as each:
        schedule = paddle.optimizer.lr.StepDecay(0.5, 1)
        each.optimizer = paddle.optimizer.Momentum(schedule, parameters=each.model.parameters())
        each.synchronizer.state = lambda: {"body.weight_velocity_0": np.ones(3, np.float32)}
        each.backward()
        each.step()
        here = each.hook.state_here(each.optimizer)
        assert here.keys() == {"LR_Scheduler"}
        assert len(each.optimizer.state_dict()) == 2
        each.hook.set_state_here(each.optimizer, {"LR_Scheduler": {**here["LR_Scheduler"], "last_epoch": 4}})
        assert (schedule.last_epoch, each.hook.has_loaded) == (4, False)
