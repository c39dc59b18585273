"""Has each layer of a model wait for its own parameters before it computes, where they come one after the other."""

from __future__ import annotations

import time
from typing import Any

from common.paddle_api.binding import trainable
from common.sync.synchronizer import Synchronizer
from common.tensors.arena import Layout, Slot

__all__ = ["LayerWaits"]


class LayerWaits:
    """Between a synchronizer's `commit` and the next backward, if it has `priority`; otherwise it does nothing.

    For models whose layers use parameters of their own only, as the built-in ones do.
    """

    def __init__(self, model: Any, layout: Layout, synchronizer: Synchronizer) -> None:
        self._synchronizer, self._length = synchronizer, layout.length
        self._seconds = 0.0
        self._hooks: list[Any] = []
        slot_of = {id(p): slot for (_, p), slot in zip(trainable(model), layout.slots, strict=True)}
        for layer in model.sublayers(include_self=True) if synchronizer.priority else ():
            own = [slot_of[id(p)] for p in layer.parameters(include_sublayers=False) if id(p) in slot_of]
            if own:
                self._hooks.append(layer.register_forward_pre_hook(self._hook(own)))

    def rest(self) -> float:
        """Wait for what no layer has waited for; returns how many seconds all waits since the last call took."""
        if self._hooks:
            self._wait(0, self._length)
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Leave the model as it was."""
        while self._hooks:
            self._hooks.pop().remove()

    def _hook(self, own: list[Slot]) -> Any:
        def wait(_layer: Any, _inputs: Any) -> None:
            for slot in own:
                self._wait(slot.start, slot.stop)

        return wait

    def _wait(self, start: int, stop: int) -> None:
        begun = time.monotonic()
        with self._synchronizer.trace.span("parameters"):
            self._synchronizer.wait_for(start, stop)
        self._seconds += time.monotonic() - begun
