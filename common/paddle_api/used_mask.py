"""Which parameters have a gradient: zero is one, none is not, and what no rank has used must not be updated.

The arena's first slot holds 1 or 0 for each parameter; averaged with the gradients, it tells what any rank has used.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from common.paddle_api.arena_binding import Binding
from common.paddle_api.gradient_hooks import Named
from common.tensors.arena import FloatArray, Layout

__all__ = ["DTYPES", "USED", "UsedMask", "dtype_of", "layout_with_used"]

DTYPES = ("float32", "float64")
USED = "(used)"  # the name of that slot


class UsedMask:
    """Of one rank, until `take_all` makes it that of all."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self.has = [False] * len(binding.named)

    def keep(self, kept: Sequence[bool]) -> None:
        """Other gradients have been dropped. One that was set to zero, as `clear_grad` does unless it is told not to,
        is a gradient still: Paddle's optimizers update by it."""
        self.has = [has and k for has, k in zip(self.has, kept, strict=True)]

    def reach(self, reached: Collection[int]) -> None:
        """A backward has given these parameters gradients."""
        for index in reached:
            self.has[index] = True

    def tell(self) -> None:
        """Write it into the arena, to be sent. What is frozen now is not to be updated, whatever gradient it has."""
        self._slot()[...] = self.not_frozen()

    def take_all(self) -> list[bool]:
        """What any rank has used, after the average has come."""
        frozen = [p.stop_gradient for _, p in self._binding.named]  # keeps what it has
        told = zip(self.has, frozen, self._slot().tolist(), strict=True)
        self.has = [value > 0 or (has and is_frozen) for has, is_frozen, value in told]
        return self.has

    def drop_unused(self) -> None:
        """What is not used has no gradient, which an optimizer leaves alone."""
        for has, (_, p) in zip(self.has, self._binding.named, strict=True):
            if not has and not p.stop_gradient:
                p.clear_gradient(False)

    def of_slots(self) -> bytes:
        """A byte for each slot of the arena."""
        has = dict(zip((slot.name for slot in self._binding.slots), self.not_frozen(), strict=True))
        return bytes(has.get(slot.name, False) for slot in self._binding.arena.layout.slots)

    def not_frozen(self) -> list[bool]:
        """Which parameters have a gradient to be updated by."""
        return [has and not p.stop_gradient for has, (_, p) in zip(self.has, self._binding.named, strict=True)]

    def _slot(self) -> FloatArray:
        return self._binding.arena.gradients[: len(self.has)]


def layout_with_used(named: Named) -> Layout:
    """The used-mask, then the parameters, those of one dtype together."""
    by_dtype = {d: [(name, p.shape) for name, p in named if dtype_of(p) == d] for d in DTYPES}
    layout = Layout.of([(USED, [len(named)]), *by_dtype["float32"]])
    return layout.then(by_dtype["float64"], "float64")


def dtype_of(tensor: object) -> str:
    """As NumPy calls it: "float32"."""
    return str(getattr(tensor, "dtype", None)).rpartition(".")[2]
