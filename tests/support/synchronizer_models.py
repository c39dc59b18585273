"""What every Synchronizer promises of several models of one group, as checks of its contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from common.errors import PeerError
from common.sync.synchronizer import Synchronizer
from common.tensors.arena import Arena, Layout
from common.tensors.optimizers import SGD, Momentum, Optimizer
from tests.support.synchronizer_steps import (
    RATES,
    Make,
    assert_all_equal,
    errors_of,
    gradients,
    initial,
    layout_of,
    mean_gradients,
    new_arena,
    one_step,
    run,
)

__all__ = [
    "check_a_model_ends_and_others_go_on_and_another_comes",
    "check_a_rank_that_raises_is_named_whichever_model_is_stepped",
    "check_models_are_gathered_for_and_stepped_at_once",
    "check_models_may_come_in_the_midst_of_training",
    "check_two_models_are_stepped_in_turn",
    "check_without_an_optimizer_each_model_has_its_mean",
]

OTHER = layout_of([("tail", (3,)), ("body", (41, 9)), ("one", (1,)), ("wide", (2, 300))])
THIRD = layout_of([("only", (129,))])


def after(layout: Layout, nranks: int, rates: Sequence[float], *, momentum: float = 0.0, first: int = 0) -> np.ndarray:
    """The parameters after one step at each learning rate, by hand; gradients are those of steps from `first` on."""
    parameters, velocity = initial(layout, 0), np.zeros(layout.length, np.float32)
    for step, rate in enumerate(rates, first):
        velocity = np.float32(momentum) * velocity + mean_gradients(layout, nranks, step)
        parameters = parameters - np.float32(rate) * velocity
    return parameters


def attached(synchronizer: Synchronizer, layout: Layout, optimizer: Optimizer | None) -> Arena:
    arena = new_arena(synchronizer, layout=layout)
    synchronizer.attach(arena, optimizer)
    return arena


def steps(synchronizer: Synchronizer, arena: Arena, rates: Sequence[float], *, first: int = 0) -> None:
    for step, rate in enumerate(rates, first):
        one_step(synchronizer, arena, step, rate, range(len(arena.buckets)))


def check_all(make: Make, nranks: int, body: Callable[[Synchronizer], list[np.ndarray]], *right: np.ndarray) -> None:
    """Every rank's body gives these arrays."""
    for column, expected in zip(zip(*run(make, nranks, body), strict=True), right, strict=True):
        assert_all_equal(column, expected)


def check_two_models_are_stepped_in_turn(make: Make, nranks: int) -> None:
    """Of other layouts and optimizers; the second takes two steps to each of the first."""

    def body(synchronizer: Synchronizer) -> list[np.ndarray]:
        second = synchronizer.another()
        assert (second.rank, second.nranks, second.scheme) == (synchronizer.rank, nranks, synchronizer.scheme)
        one, other = attached(synchronizer, layout_of(), SGD()), attached(second, OTHER, Momentum(momentum=0.5))
        for step, rate in enumerate(RATES):
            steps(synchronizer, one, [rate], first=step)
            steps(second, other, [rate, 2 * rate], first=2 * step)
        return [one.parameters.copy(), other.parameters.copy()]

    rates = [scale * rate for rate in RATES for scale in (1, 2)]
    check_all(make, nranks, body, after(layout_of(), nranks, RATES), after(OTHER, nranks, rates, momentum=0.5))


def check_models_are_gathered_for_and_stepped_at_once(make: Make, nranks: int) -> None:
    """Buckets of both become ready in turn, on every rank in another order; both steps then end, one by one."""

    def body(synchronizer: Synchronizer) -> list[np.ndarray]:
        second = synchronizer.another()
        pairs = [(synchronizer, attached(synchronizer, layout_of(), SGD())), (second, attached(second, OTHER, SGD()))]
        for step, rate in enumerate(RATES):
            marks = []
            for each, arena in pairs:
                arena.gradients[:] = gradients(arena.layout, each.rank, step)
                marks += [(each, bucket) for bucket in range(len(arena.buckets))]
            for mark in np.random.default_rng([synchronizer.rank, step]).permutation(len(marks)):
                each, bucket = marks[mark]
                each.mark_ready(bucket)
            for each, _ in pairs:
                each.finish(rate)
            mine = np.array([each.rank, step])
            assert [each.all_gather(mine).tolist() for each, _ in pairs] == 2 * [[[r, step] for r in range(nranks)]]
        return [arena.parameters.copy() for _, arena in pairs]

    check_all(make, nranks, body, after(layout_of(), nranks, RATES), after(OTHER, nranks, RATES))


def check_a_model_ends_and_others_go_on_and_another_comes(make: Make, nranks: int) -> None:
    """Twice; ranks close the model at other times."""

    def body(synchronizer: Synchronizer) -> list[np.ndarray]:
        one, ended = attached(synchronizer, layout_of(), SGD()), []
        for number, layout in enumerate((OTHER, THIRD)):
            further = synchronizer.another()
            arena = attached(further, layout, SGD())
            steps(further, arena, RATES[:2])
            steps(synchronizer, one, RATES[:1], first=2 * number)
            if synchronizer.rank % 2:
                further.close()
            steps(synchronizer, one, RATES[:1], first=2 * number + 1)
            further.close()
            further.close()
            ended.append(arena.parameters.copy())
        return [one.parameters.copy(), *ended]

    right = (after(layout_of(), nranks, RATES[:1] * 4), *(after(each, nranks, RATES[:2]) for each in (OTHER, THIRD)))
    check_all(make, nranks, body, *right)


def check_models_may_come_in_the_midst_of_training(make: Make, nranks: int) -> None:
    """And from a further one; one of them is never attached, another one never closed."""

    def body(synchronizer: Synchronizer) -> list[np.ndarray]:
        one = attached(synchronizer, layout_of(), SGD())
        steps(synchronizer, one, RATES[:1])
        second = synchronizer.another()
        third = second.another()
        steps(synchronizer, one, RATES[1:2], first=1)
        other = attached(third, THIRD, SGD())
        steps(third, other, RATES)
        return [one.parameters.copy(), other.parameters.copy()]

    check_all(make, nranks, body, after(layout_of(), nranks, RATES[:2]), after(THIRD, nranks, RATES))


def check_without_an_optimizer_each_model_has_its_mean(make: Make, nranks: int) -> None:
    def body(synchronizer: Synchronizer) -> list[np.ndarray]:
        second = synchronizer.another()
        other, one = attached(second, OTHER, None), attached(synchronizer, layout_of(), None)
        steps(synchronizer, one, RATES[:1], first=3)
        steps(second, other, RATES[:1], first=4)
        return [one.gradients.copy(), other.gradients.copy()]

    check_all(make, nranks, body, mean_gradients(layout_of(), nranks, 3), mean_gradients(OTHER, nranks, 4))


def check_a_rank_that_raises_is_named_whichever_model_is_stepped(make: Make, nranks: int) -> None:
    def body(synchronizer: Synchronizer) -> None:
        second = synchronizer.another()
        one, other = attached(synchronizer, layout_of(), SGD()), attached(second, OTHER, SGD())
        steps(second, other, RATES[:1])
        if synchronizer.rank == nranks - 1:
            raise ValueError("boom")
        steps(second, other, RATES[1:])
        steps(synchronizer, one, RATES)

    *others, culprit = errors_of(make, nranks, body)
    assert type(culprit) is ValueError
    for error in others:
        assert isinstance(error, PeerError)
        assert f"rank {nranks - 1} left" in str(error)
        assert "ValueError: boom" in str(error)
