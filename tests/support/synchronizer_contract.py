"""What every Synchronizer promises, as checks to be run over each implementation with `make(rank, nranks)`.

    @pytest.mark.parametrize("check", CHECKS, ids=name_of)
    def test_contract(check, make, nranks):
        check(make, nranks)

`make` gives a context that is one rank's synchronizer of one job; it is called once for every rank, each on a thread.
All values are such that NumPy gives the same bits as Paddle's optimizers: learning rates are powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from common.errors import PeerLost, ProtocolError
from common.sync.synchronizer import Synchronizer
from common.tensors.arena import Arena
from common.tensors.optimizers import SGD, Momentum
from tests.support.groups import assert_same_bits, reduced, sample
from tests.support.synchronizer_failures import (
    check_a_missing_parameter_is_named,
    check_a_name_that_differs_is_named,
    check_a_rank_that_raises_fails_the_others_with_its_reason,
    check_a_rank_that_stops_early_is_named,
    check_a_shape_that_differs_is_named,
    check_another_optimizer_is_named,
    check_another_setting_is_named,
    check_bucket_plans_that_differ_are_refused,
)
from tests.support.synchronizer_guards import (
    check_all_that_refuse_at_once_use_the_same_words,
    check_finite_gradients_whose_squares_overflow_are_used,
    check_what_is_not_finite_is_refused_by_all,
)
from tests.support.synchronizer_models import (
    check_a_model_ends_and_others_go_on_and_another_comes,
    check_a_rank_that_raises_is_named_whichever_model_is_stepped,
    check_models_are_gathered_for_and_stepped_at_once,
    check_models_may_come_in_the_midst_of_training,
    check_two_models_are_stepped_in_turn,
    check_without_an_optimizer_each_model_has_its_mean,
)
from tests.support.synchronizer_steps import (
    BUCKETS,
    RATES,
    Check,
    Make,
    after_sgd,
    assert_all_equal,
    buckets_of,
    errors_of,
    gradients,
    initial,
    layout_of,
    mean_gradients,
    new_arena,
    one_step,
    run,
    train,
)

__all__ = ["BETWEEN_RANKS", "CHECKS", "Make", "check_overlap_changes_no_bits", "name_of"]


def check_it_says_who_it_is(make: Make, nranks: int) -> None:
    seen = run(make, nranks, lambda s: (s.rank, s.nranks, s.scheme, s.backend))
    assert [(rank, n) for rank, n, _, _ in seen] == [(rank, nranks) for rank in range(nranks)]
    assert len({(scheme, backend) for _, _, scheme, backend in seen}) == 1


def check_empty_is_flat_and_aligned(make: Make, nranks: int) -> None:
    for array in run(make, nranks, lambda s: s.empty(1009)):
        assert (array.shape, array.dtype, array.ctypes.data % 64) == ((1009,), np.float32, 0)


def check_attach_gives_rank_0s_parameters(make: Make, nranks: int) -> None:
    def body(synchronizer: Synchronizer) -> np.ndarray:
        arena = new_arena(synchronizer)
        synchronizer.attach(arena, SGD())
        return arena.parameters.copy()

    assert_all_equal(run(make, nranks, body), initial(layout_of(), 0))


def check_a_step_is_the_mean_and_sgd(make: Make, nranks: int) -> None:
    assert_all_equal(train(make, nranks, rates=[0.5]), after_sgd(nranks, [0.5]))


def check_steps_follow_each_other_at_changing_learning_rates(make: Make, nranks: int) -> None:
    assert_all_equal(train(make, nranks), after_sgd(nranks, RATES))


def check_an_announced_learning_rate_changes_no_bits(make: Make, nranks: int) -> None:
    """Announced on all ranks, on some, or on none; parameters stay until `finish`."""

    def body(synchronizer: Synchronizer) -> np.ndarray:
        arena = new_arena(synchronizer)
        synchronizer.attach(arena, SGD())
        for step, rate in enumerate(RATES):
            before = arena.parameters.copy()
            if (synchronizer.rank + step) % 4 < 2:
                synchronizer.announce(rate)
            arena.gradients[:] = gradients(arena.layout, synchronizer.rank, step)
            for bucket in range(BUCKETS):
                synchronizer.mark_ready(bucket)
            assert_same_bits(arena.parameters, before)
            synchronizer.finish(rate)
        return arena.parameters.copy()

    assert_all_equal(run(make, nranks, body), after_sgd(nranks, RATES))


def check_the_order_of_marking_does_not_matter(make: Make, nranks: int) -> None:
    """Every rank marks in another order, and in another one each step."""

    def order(rank: int, step: int) -> Sequence[int]:
        return np.random.default_rng([rank, step]).permutation(BUCKETS).tolist()

    assert_all_equal(train(make, nranks, order=order), after_sgd(nranks, RATES))


def check_finish_takes_unmarked_buckets_as_final(make: Make, nranks: int) -> None:
    """None marked, the first only, the last only; differently on every rank."""
    choices: list[Sequence[int]] = [[], [0], [BUCKETS - 1], range(1, BUCKETS)]
    results = train(make, nranks, order=lambda rank, step: choices[(rank + step) % len(choices)])
    assert_all_equal(results, after_sgd(nranks, RATES))


def check_marking_twice_is_refused(make: Make, nranks: int) -> None:
    """And the step goes on; in the next one the bucket may be marked again."""

    def body(synchronizer: Synchronizer) -> np.ndarray:
        arena = new_arena(synchronizer)
        synchronizer.attach(arena, SGD())
        for step, rate in enumerate(RATES[:2]):
            arena.gradients[:] = gradients(arena.layout, synchronizer.rank, step)
            synchronizer.mark_ready(1)
            with pytest.raises(ValueError, match="bucket 1 was marked ready twice"):
                synchronizer.mark_ready(1)
            synchronizer.finish(rate)
        return arena.parameters.copy()

    assert_all_equal(run(make, nranks, body), after_sgd(nranks, RATES[:2]))


def check_marking_what_does_not_exist_is_refused(make: Make, nranks: int) -> None:
    def body(synchronizer: Synchronizer) -> None:
        synchronizer.attach(new_arena(synchronizer), SGD())
        for bucket in (-1, BUCKETS):
            with pytest.raises(ValueError, match=rf"bucket must be in 0\.\.{BUCKETS - 1} \(got {bucket}\)"):
                synchronizer.mark_ready(bucket)

    run(make, nranks, body)


def check_the_optimizer_keeps_its_state(make: Make, nranks: int) -> None:
    layout = layout_of()
    parameters, velocity = initial(layout, 0), np.zeros(layout.length, np.float32)
    for step, rate in enumerate(RATES):
        velocity = np.float32(0.5) * velocity + mean_gradients(layout, nranks, step)
        parameters = parameters - np.float32(rate) * velocity
    assert_all_equal(train(make, nranks, optimizer=Momentum(momentum=0.5)), parameters)


def check_without_an_optimizer_gradients_become_their_mean(make: Make, nranks: int) -> None:
    """And the parameters stay rank 0's: the update is the caller's."""

    def body(synchronizer: Synchronizer) -> list[np.ndarray]:
        arena = new_arena(synchronizer)
        synchronizer.attach(arena, None)
        means = []
        for step in range(3):
            one_step(synchronizer, arena, step, 0.5, range(BUCKETS))
            means.append(arena.gradients.copy())
        return [*means, arena.parameters.copy()]

    expected = [mean_gradients(layout_of(), nranks, step) for step in range(3)] + [initial(layout_of(), 0)]
    for column, right in zip(zip(*run(make, nranks, body), strict=True), expected, strict=True):
        assert_all_equal(column, right)


def check_private_memory_serves_as_well(make: Make, nranks: int) -> None:
    def body(synchronizer: Synchronizer) -> np.ndarray:
        arena = Arena(layout_of(), buckets=buckets_of(layout_of()))
        arena.parameters[:] = initial(arena.layout, synchronizer.rank)
        synchronizer.attach(arena, SGD())
        for step, rate in enumerate(RATES):
            one_step(synchronizer, arena, step, rate, range(BUCKETS))
        return arena.parameters.copy()

    assert_all_equal(run(make, nranks, body), after_sgd(nranks, RATES))


def check_one_large_bucket(make: Make, nranks: int) -> None:
    """Larger than any segment or message; the only one."""
    layout = layout_of([("all", (700_001,))])

    def body(synchronizer: Synchronizer) -> np.ndarray:
        arena = new_arena(synchronizer, layout=layout)
        synchronizer.attach(arena, SGD())
        one_step(synchronizer, arena, 0, 0.5, [0])
        return arena.parameters.copy()

    expected = initial(layout, 0) - np.float32(0.5) * mean_gradients(layout, nranks, 0)
    assert_all_equal(run(make, nranks, body), expected)


def check_all_gather_stacks_in_rank_order(make: Make, nranks: int) -> None:
    def values(rank: int, round_: int) -> list[np.ndarray]:
        rng = np.random.default_rng([rank, round_])
        return [rng.standard_normal((6, 17)), rng.integers(-9, 9, 1), rng.integers(0, 9, (2, 3, 1), np.uint8)]

    def body(synchronizer: Synchronizer) -> list[np.ndarray]:
        arena = new_arena(synchronizer)
        synchronizer.attach(arena, SGD())
        gathered = []
        for step in range(2):
            gathered += [synchronizer.all_gather(v) for v in values(synchronizer.rank, step)]
            one_step(synchronizer, arena, step, 0.5, range(BUCKETS))
        return gathered

    ranks = [values(rank, 0) + values(rank, 1) for rank in range(nranks)]
    expected = [np.stack(column) for column in zip(*ranks, strict=True)]
    for gathered in run(make, nranks, body):
        for got, right in zip(gathered, expected, strict=True):
            assert_same_bits(got, right)


def check_all_reduce_adds_in_the_canonical_order(make: Make, nranks: int) -> None:
    """Arrays of the program's own, between steps."""
    kinds = [("float32", (5, 7)), ("float64", (1001,)), ("float16", ()), ("int32", (0, 3)), ("int64", (33,))]
    kinds.append(("float32", (20_011, 2)))
    cases = [(op, *kind) for kind in kinds for op in ("sum", "mean", "max") if op != "mean" or "float" in kind[0]]

    def body(synchronizer: Synchronizer) -> list[np.ndarray]:
        arena = new_arena(synchronizer)
        synchronizer.attach(arena, SGD())
        reduced_ones = []
        for op, dtype, shape in cases:
            array = np.asarray(sample(synchronizer.rank, shape, dtype))
            synchronizer.all_reduce(array, op)
            reduced_ones.append(array)
        one_step(synchronizer, arena, 0, 0.5, range(BUCKETS))
        return reduced_ones

    for found in run(make, nranks, body):
        for (op, dtype, shape), got in zip(cases, found, strict=True):
            inputs = [np.asarray(sample(rank, shape, dtype)) for rank in range(nranks)]
            assert_same_bits(got, reduced(inputs, op) if nranks > 1 else inputs[0])


def check_all_reduce_of_other_shapes_is_refused(make: Make, nranks: int) -> None:
    """Also of as many elements."""
    refuse_other_shapes(make, nranks, (2, 3), (3, 2))


def check_all_reduce_of_large_arrays_of_other_shapes_is_refused(make: Make, nranks: int) -> None:
    refuse_other_shapes(make, nranks, (20_000, 2), (2, 20_000))


def refuse_other_shapes(make: Make, nranks: int, of_rank_0: tuple[int, ...], others: tuple[int, ...]) -> None:
    def body(synchronizer: Synchronizer) -> None:
        synchronizer.all_reduce(np.ones(of_rank_0 if synchronizer.rank == 0 else others, np.float32), "mean")
        synchronizer.all_gather(np.ones(1))

    errors = errors_of(make, nranks, body)
    assert ProtocolError in map(type, errors)
    assert all(isinstance(error, (ProtocolError, PeerLost)) for error in errors)


def check_close_is_idempotent(make: Make, nranks: int) -> None:
    def body(synchronizer: Synchronizer) -> None:
        arena = new_arena(synchronizer)
        synchronizer.attach(arena, SGD())
        one_step(synchronizer, arena, 0, 0.5, range(BUCKETS))
        synchronizer.close()
        synchronizer.close()
        synchronizer.close("ValueError: too late to matter")

    run(make, nranks, body)


def check_leaving_without_attaching_is_fine(make: Make, nranks: int) -> None:
    run(make, nranks, lambda _synchronizer: None)


def check_overlap_changes_no_bits(make_overlapping: Make, make_waiting: Make, nranks: int) -> None:
    """To be given two jobs, one that synchronises beside backward and one that does so in `finish`."""
    overlapping, waiting = (
        train(make, nranks, order=lambda _rank, _step: range(BUCKETS)[::-1])
        for make in (make_overlapping, make_waiting)
    )
    assert_all_equal([*overlapping, *waiting], after_sgd(nranks, RATES))


CHECKS: list[Check] = [
    check_it_says_who_it_is,
    check_empty_is_flat_and_aligned,
    check_attach_gives_rank_0s_parameters,
    check_a_step_is_the_mean_and_sgd,
    check_steps_follow_each_other_at_changing_learning_rates,
    check_an_announced_learning_rate_changes_no_bits,
    check_the_order_of_marking_does_not_matter,
    check_finish_takes_unmarked_buckets_as_final,
    check_marking_twice_is_refused,
    check_marking_what_does_not_exist_is_refused,
    check_the_optimizer_keeps_its_state,
    check_without_an_optimizer_gradients_become_their_mean,
    check_private_memory_serves_as_well,
    check_one_large_bucket,
    check_all_gather_stacks_in_rank_order,
    check_all_reduce_adds_in_the_canonical_order,
    check_close_is_idempotent,
    check_leaving_without_attaching_is_fine,
    check_two_models_are_stepped_in_turn,
    check_models_are_gathered_for_and_stepped_at_once,
    check_a_model_ends_and_others_go_on_and_another_comes,
    check_models_may_come_in_the_midst_of_training,
    check_without_an_optimizer_each_model_has_its_mean,
    check_what_is_not_finite_is_refused_by_all,
    check_all_that_refuse_at_once_use_the_same_words,
    check_finite_gradients_whose_squares_overflow_are_used,
]
BETWEEN_RANKS: list[Check] = [  # for two ranks or more
    check_all_reduce_of_other_shapes_is_refused,
    check_all_reduce_of_large_arrays_of_other_shapes_is_refused,
    check_a_shape_that_differs_is_named,
    check_a_name_that_differs_is_named,
    check_a_missing_parameter_is_named,
    check_bucket_plans_that_differ_are_refused,
    check_another_optimizer_is_named,
    check_another_setting_is_named,
    check_a_rank_that_raises_fails_the_others_with_its_reason,
    check_a_rank_that_stops_early_is_named,
    check_a_rank_that_raises_is_named_whichever_model_is_stepped,
]


def name_of(check: Check) -> str:
    """For pytest's ids."""
    return check.__name__.removeprefix("check_")
