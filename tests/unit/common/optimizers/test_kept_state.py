"""What optimizers keep beside flat parameters comes back, however it is cut: the same bits go on."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from common.commit.slices import Slice, cut  # noqa: E402
from common.errors import UsageError  # noqa: E402
from common.system.memory import aligned_empty  # noqa: E402
from common.tensors.flat_optimizer import FlatOptimizer, PieceOptimizer  # noqa: E402
from common.tensors.optimizers import OPTIMIZERS, make_optimizer  # noqa: E402
from common.tensors.parts import Piece  # noqa: E402

SIZE = 160
CUTS = ((0, SIZE), (0, 48, SIZE), (0, 16, 96, SIZE))


def gradients_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal(SIZE).astype(np.float32)


class Flat:
    """One optimizer for each run between `edges`."""

    def __init__(self, name: str, edges: tuple[int, ...]) -> None:
        self.parameters, self.gradients = aligned_empty(SIZE), aligned_empty(SIZE)
        self.parameters[...] = 1
        self.runs = [slice(*pair) for pair in pairwise(edges)]
        self.optimizers = [
            FlatOptimizer(make_optimizer(name, {}), self.parameters[run], self.gradients[run]) for run in self.runs
        ]

    def step(self, number: int) -> None:
        self.gradients[...] = gradients_of(number)
        for optimizer in self.optimizers:
            optimizer.step(0.01)

    def slices(self) -> list[Slice]:
        return [Slice(r.start, r.stop, o.arrays()) for r, o in zip(self.runs, self.optimizers, strict=True)]

    def load(self, slices: list[Slice]) -> None:
        for run, optimizer in zip(self.runs, self.optimizers, strict=True):
            optimizer.load(cut(slices, run.start, run.stop).arrays)


class Pieces:
    """One optimizer whose pieces, given in any order, lie between `edges`."""

    def __init__(self, name: str, edges: tuple[int, ...]) -> None:
        self.parameters = aligned_empty(SIZE)
        self.parameters[...] = 1
        self.pieces = [Piece(0, *pair) for pair in pairwise(edges)][::-1]
        self.optimizer = PieceOptimizer(make_optimizer(name, {}), self.parameters, self.pieces)

    def step(self, number: int) -> None:
        self.optimizer.set_rate(0.01)
        for piece in self.pieces:
            gradients = aligned_empty(piece.stop - piece.start)
            gradients[...] = gradients_of(number)[piece.start : piece.stop]
            self.optimizer.step(piece.start, gradients)

    def slices(self) -> list[Slice]:
        return [Slice(0, SIZE, self.optimizer.arrays())]

    def load(self, slices: list[Slice]) -> None:
        self.optimizer.load(cut(slices, 0, SIZE).arrays)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), [(Flat, Pieces), (Pieces, Flat)])
def test_another_cut_goes_on_with_the_same_bits(name: str, before: type, after: type) -> None:
    whole = Flat(name, CUTS[0])
    for step in range(6):
        whole.step(step)
    for edges in CUTS:
        first = before(name, edges)
        for step in range(3):
            first.step(step)
        second = after(name, CUTS[1])
        second.parameters[...] = first.parameters
        second.load(first.slices())
        kept = first.slices()
        for step in range(3, 6):
            second.step(step)
            first.step(step)
        assert second.parameters.tobytes() == first.parameters.tobytes() == whole.parameters.tobytes()
        for each in kept:  # copies
            assert all(
                (each.arrays[kind] != array).any()
                for kind, array in first.slices()[0].arrays.items()
                if each.start == 0 and "moment" in kind and array.size == each.arrays[kind].size
            )


def test_the_state_of_another_optimizer_is_refused() -> None:
    momentum = Flat("momentum", CUTS[0])
    momentum.step(0)
    with pytest.raises(UsageError, match="the optimizer state does not fit the optimizer"):
        Pieces("adam", CUTS[0]).load(momentum.slices())
    flat = Flat("adam", CUTS[0])
    flat.load(momentum.slices())
    with pytest.raises(UsageError, match="the optimizer state does not fit the optimizer"):
        flat.step(0)
