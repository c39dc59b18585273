"""What the built-in training keeps of each step boundary, and how it goes back to one. The data's order follows from
the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from common.commit.parts import Part
from common.commit.resuming import BUFFERS, OPTIMIZER, PARAMETERS, RANDOM
from common.commit.slices import arrays_of, slices_in
from common.paddle_api.arena_binding import trainable
from common.paddle_api.random_states import RandomStates, set_random
from common.sync.boundaries import Boundaries, Boundary
from common.sync.synchronizer import Synchronizer
from common.system.next_epoch import is_mended
from common.tensors.arena import Arena

__all__ = ["StepCopies", "fill_arena"]

WHOLE = PARAMETERS + "arena"


def fill_arena(arena: Arena, boundary: Boundary) -> None:
    """With the parameters of the boundary."""
    np.copyto(arena.parameters, boundary.common.arrays[WHOLE])


class StepCopies:
    """Of one model, on one rank, while one group lasts; after `attach`."""

    def __init__(self, boundaries: Boundaries, synchronizer: Synchronizer, arena: Arena, model: Any) -> None:
        self._boundaries, self._synchronizer, self._arena = boundaries, synchronizer, arena
        self._random = RandomStates()
        trained = {id(p) for _, p in trainable(model)}
        self._buffers = {name: t for name, t in model.state_dict().items() if id(t) not in trained}

    def begin(self, boundary: Boundary | None, step: int) -> None:
        """Go back to the boundary that the ranks have agreed on, if there is one, whose parameters are in the arena;
        keep that of `step`, the first, if not."""
        if boundary is None:
            self.after(step)
            if is_mended():
                self._boundaries.gone_back(step)
            return
        with paddle.no_grad():
            for name, values in boundary.own.beginning(BUFFERS).items():
                self._buffers[name].set_value(values)
        optimizer = boundary.own if self._synchronizer.own_optimizer else boundary.common
        self._synchronizer.load_optimizer(slices_in(optimizer.beginning(OPTIMIZER)))
        set_random(boundary.own.beginning(RANDOM))
        self._boundaries.gone_back(boundary.step)

    def after(self, step: int) -> None:
        """So many steps have been made."""
        if not self._boundaries.are_kept:
            return
        own = {RANDOM + name: array for name, array in self._random.arrays().items()}
        own |= {BUFFERS + name: tensor.numpy() for name, tensor in self._buffers.items()}
        common = {WHOLE: self._arena.parameters.copy()}
        slices = self._synchronizer.optimizer_slices(everyone=True)
        optimizer = own if self._synchronizer.own_optimizer else common
        optimizer |= {OPTIMIZER + name: array for name, array in arrays_of(slices).items()}
        self._boundaries.keep(step, Part(own), Part(common))
