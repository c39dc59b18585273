"""Which of backward and update came last, of an optimizer of one parameter."""

from __future__ import annotations

import copy
from typing import Any

import pytest

paddle = pytest.importorskip("paddle")

from common.paddle_api.unused_gradients import UnusedGradients  # noqa: E402


class Program:
    def __init__(self) -> None:
        self.parameter = paddle.create_parameter([2], "float32")
        self.optimizer = paddle.optimizer.SGD(0.1, parameters=[self.parameter])
        self.backwards = 0
        self.watch()

    def watch(self) -> None:
        self.unused = UnusedGradients(self.optimizer, lambda: self.backwards)

    def loss(self) -> Any:
        self.backwards += 1
        return (self.parameter * 2).sum()

    def value(self) -> list[float]:
        found: list[float] = self.parameter.numpy().tolist()
        return found


@pytest.mark.parametrize("how", ["step", "minimize", "a scaler"])
def test_an_update_uses_what_was_there_before_it(how: str) -> None:
    program = Program()
    assert not program.unused.may_be_left()
    loss = program.loss()
    loss.backward()
    assert program.unused.may_be_left()
    before = program.value()
    if how == "step":
        program.optimizer.step()
    elif how == "minimize":
        program.optimizer.minimize(loss)
    else:
        paddle.amp.GradScaler(enable=False).step(program.optimizer)
    assert program.value() != before
    assert not program.unused.may_be_left()
    program.loss().backward()
    assert program.unused.may_be_left()


def test_a_copy_of_the_optimizer_updates_by_itself() -> None:
    program = Program()
    copied = copy.deepcopy(program.optimizer)
    program.loss().backward()
    before = program.value()
    copied.step()
    assert program.value() == before
    program.optimizer.step()
    assert program.value() != before


def test_what_a_program_has_put_in_the_place_of_its_update_is_called() -> None:
    program, called = Program(), [0] * 0
    program.optimizer.step = lambda: called.append(1)
    program.watch()
    program.loss().backward()
    program.optimizer.step()
    assert called == [1]
    assert not program.unused.may_be_left()
