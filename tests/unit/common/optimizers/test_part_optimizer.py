"""Updates of parts of parameters give Paddle's bits wherever they are cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

paddle = pytest.importorskip("paddle")

from common.errors import UsageError  # noqa: E402
from common.system.memory import aligned_empty  # noqa: E402
from common.tensors.arena import Arena, FloatArray, Layout  # noqa: E402
from common.tensors.flat_optimizer import PartOptimizer  # noqa: E402
from common.tensors.optimizers import Adam, Optimizer  # noqa: E402
from common.tensors.parts import PADDING, Accumulator, is_number, parts_of  # noqa: E402
from tests.support.optimizer_cases import CASES, RATES, Make  # noqa: E402

SIZES = [1, 7, 13, 16, 17, 33, 100, 1037]  # below, at and beyond the widths of Paddle's kernels
NAMES = [f"p{size}" for size in SIZES]
WHOLE = bytes([1] * len(SIZES))
Mask = bytes


def layout_in(dtype: str) -> Layout:
    return Layout((), 0).then([(name, [size]) for name, size in zip(NAMES, SIZES, strict=True)], dtype)


def vectors(step: int, dtype: str) -> list[np.ndarray]:
    """A gradient of every parameter at a step; -1: the parameters at the start."""
    rng = np.random.default_rng([step + 1, len(dtype)])
    return [rng.standard_normal(size).astype(dtype) for size in SIZES]


class ByPaddle:
    """Each parameter by itself, as a user's program has it."""

    def __init__(self, make: Make, dtype: str) -> None:
        as_parameter = paddle.base.framework.EagerParamBase.from_tensor
        values = zip(vectors(-1, dtype), NAMES, strict=True)
        self.parameters = [as_parameter(paddle.to_tensor(value), name=name) for value, name in values]
        self.optimizer = make(self.parameters)
        self.dtype = dtype

    def step(self, step: int, mask: Mask) -> None:
        for p, gradient, used in zip(self.parameters, vectors(step, self.dtype), mask, strict=True):
            if used:
                p.grad = paddle.to_tensor(gradient)
            else:
                p.clear_gradient(False)
        self.optimizer.set_lr(RATES[step % len(RATES)])
        with paddle.utils.unique_name.guard():
            self.optimizer.step()

    def values(self) -> list[bytes]:
        return [p.numpy().tobytes() for p in self.parameters]

    def state(self) -> dict[str, bytes]:
        return {key: tensor.numpy().tobytes() for key, tensor in self.optimizer.state_dict().items()}


class InParts:
    """The same parameters in an arena, which is cut into slices with zeros behind, as servers hold them."""

    def __init__(self, description: Optimizer, dtype: str, cuts: list[int]) -> None:
        self.description, self.layout, self.dtype = description, layout_in(dtype), dtype
        edges = [0, *sorted(cuts), self.layout.length]
        self.slices = [slice(a, b) for a, b in pairwise(edges)]
        self.parameters = [padded(self.flat(-1)[where]) for where in self.slices]
        self.gradients = [padded(np.zeros_like(self.flat(-1)[where])) for where in self.slices]
        self.make()

    def make(self) -> None:
        self.optimizers = [
            PartOptimizer(self.description, parameters, gradients, parts_of(self.layout, NAMES, s.start, s.stop))
            for parameters, gradients, s in zip(self.parameters, self.gradients, self.slices, strict=True)
        ]

    def flat(self, step: int) -> FloatArray:
        arena = Arena(self.layout)
        for slot, values in zip(self.layout.slots, vectors(step, self.dtype), strict=True):
            arena.gradient(slot)[...] = values
        return arena.gradients

    def step(self, step: int, mask: Mask) -> None:
        for where, gradients, optimizer in zip(self.slices, self.gradients, self.optimizers, strict=True):
            gradients[: where.stop - where.start] = self.flat(step)[where]
            optimizer.step(RATES[step % len(RATES)], mask)

    def values(self) -> list[bytes]:
        arena = Arena(self.layout)
        for where, parameters in zip(self.slices, self.parameters, strict=True):
            arena.parameters[where] = parameters[: where.stop - where.start]
        return [arena.parameter(slot).tobytes() for slot in self.layout.slots]

    def state(self) -> dict[str, bytes]:
        """The slices' states, joined."""
        found: dict[str, np.ndarray] = {}
        for each in (each for optimizer in self.optimizers for each in optimizer.state()):
            whole = found.setdefault(each.key, np.full(each.size, np.nan, each.values.dtype))
            whole[each.first : each.first + each.values.size] = each.values
            assert each.size == (1 if is_number(each.key) else SIZES[each.slot])
        return {key: whole.tobytes() for key, whole in found.items()}

    def padding_is_zero(self) -> bool:
        inside = [(where.stop - where.start) for where in self.slices]
        buffers = [*zip(self.parameters, inside, strict=True), *zip(self.gradients, inside, strict=True)]
        return not any(buffer[length:].view(np.uint32).any() for buffer, length in buffers)


def padded(words: FloatArray) -> FloatArray:
    buffer = aligned_empty(words.size + PADDING)
    buffer.fill(0)
    buffer[: words.size] = words
    return buffer


def cuts_in(dtype: str) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, layout_in(dtype).length // 16).map(lambda unit: 16 * unit), max_size=4)


masks = st.lists(st.lists(st.integers(0, 1), min_size=len(SIZES), max_size=len(SIZES)).map(bytes), max_size=4)
in_both_dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])


@in_both_dtypes
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_parts_give_paddles_bits_wherever_they_are_cut(name: str, dtype: str, data: st.DataObject) -> None:
    description, make = CASES[name]
    parts, whole = InParts(description, dtype, data.draw(cuts_in(dtype))), ByPaddle(make, dtype)
    for step, mask in enumerate([*data.draw(masks), WHOLE, WHOLE]):
        for each in (parts, whole):
            each.step(step, mask)
        assert parts.values() == whole.values(), f"step {step}"
        assert parts.state() == whole.state(), f"step {step}"
        assert parts.padding_is_zero()


@in_both_dtypes
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_loaded_state_goes_on_to_the_same_bits(name: str, dtype: str, data: st.DataObject) -> None:
    """In new optimizers, as after a restart, or in those at hand, which have gone on meanwhile."""
    parts = InParts(CASES[name][0], dtype, data.draw(cuts_in(dtype)))
    for step in range(2):
        parts.step(step, WHOLE)
    saved = [[parameters.copy() for parameters in parts.parameters], [o.state() for o in parts.optimizers]]
    later = [(step, mask) for step, mask in enumerate([*data.draw(masks), WHOLE], 2)]
    expected = []
    for again in (False, *data.draw(st.permutations(["new", "at hand"]))):
        if again:
            for parameters, values in zip(parts.parameters, saved[0], strict=True):
                parameters[...] = values
            if again == "new":
                parts.make()
            for optimizer, state in zip(parts.optimizers, saved[1], strict=True):
                optimizer.load(state)
        for step, mask in later:
            parts.step(step, mask)
        expected.append((parts.values(), parts.state()))
        assert parts.padding_is_zero()
    assert expected[0] == expected[1] == expected[2]
    assert any(a.tobytes() != b.tobytes() for a, b in zip(saved[0], parts.parameters, strict=True))


@in_both_dtypes
def test_the_tables_of_parts_cover_what_they_are_for(dtype: str) -> None:
    """A cut inside a parameter, once and twice, and slices without any parameter's part."""
    layout = layout_in(dtype)
    parts = [parts_of(layout, NAMES, a, b) for a, b in pairwise([0, 16, 192, 416, 800, 1200, layout.length])]
    cut = [part for of_slice in parts for part in of_slice if part.count < part.size]
    assert len({part.slot for part in cut}) >= 2
    assert any(part.first and part.first + part.count < part.size for part in cut)
    assert any(part.padded_stop > part.stop for part in cut)
    assert parts_of(layout, NAMES, 48, 48) == []
    assert parts_of(layout, ["", *NAMES[1:]], 0, 16) == []


def test_a_slice_without_parameters_is_no_work() -> None:
    for description, _ in CASES.values():
        optimizer = PartOptimizer(description, padded(aligned_empty(0)), padded(aligned_empty(0)), [])
        optimizer.step(0.1, WHOLE)
        optimizer.load([])
        assert optimizer.state() == []


def adam_in_parts() -> InParts:
    return InParts(Adam(), "float32", [])


def without(state: list[Accumulator], key: str) -> list[Accumulator]:
    return [each for each in state if each.key != key]


def test_a_state_with_something_missing_is_refused() -> None:
    parts = adam_in_parts()
    parts.step(0, WHOLE)
    (optimizer,) = parts.optimizers
    text = r"^the optimizer state does not fit the optimizer: .*p7_moment1_0 not found"
    with pytest.raises(UsageError, match=text):
        optimizer.load(without(optimizer.state(), "p7_moment1_0"))


def test_a_state_with_something_missing_is_refused_at_the_first_step_where_it_was_loaded_before() -> None:
    old, new = adam_in_parts(), adam_in_parts()
    old.step(0, WHOLE)
    new.optimizers[0].load(without(old.optimizers[0].state(), "p7_moment1_0"))
    text = r"^the optimizer state does not fit the optimizer: .*p7_moment1_0 should in state dict"
    with pytest.raises(UsageError, match=text):
        new.step(1, WHOLE)
