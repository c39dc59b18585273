"""What of a program's state parameter servers have, as its TrainingState sees it: it says when they are to keep that
beside the trainers' step boundaries, and goes back with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.paddle_api.optimizer_hook import OptimizerHook
from common.paddle_api.wrapped_models import WrappedModels
from common.sync.synchronizer import Synchronizer

__all__ = ["ServersPart"]


class ServersPart:
    """Of one optimizer; under a scheme without servers, nothing.

    Args:
        optimizer: Paddle's own.
    """

    def __init__(self, synchronizer: Synchronizer, models: WrappedModels, optimizer: Any) -> None:
        self._synchronizer, self._models, self._optimizer = synchronizer, models, optimizer
        self._keep = False  # servers were asked to

    @property
    def can_be_left(self) -> bool:
        """Whether servers and trainers together can come back to where they are: what servers keep is of one model, and
        they have got all of it."""
        if self._synchronizer.server_optimizer is None:
            return True
        return self._keep and (hook := self._hook) is not None and not hook.has_loaded

    @property
    def has_optimizer(self) -> bool:
        """Whether the optimizer's state is theirs."""
        return (hook := self._hook) is not None and hook.has(self._optimizer)

    def state_here(self) -> dict[str, Any]:
        """The optimizer's state_dict, without what they have."""
        hook = self._hook
        found = hook.state_here(self._optimizer) if hook else self._optimizer.state_dict()
        return dict(found)

    def set_state(self, state: dict[str, Any]) -> None:
        """Give the optimizer such a state, without what they have."""
        if (hook := self._hook) and hook.has(self._optimizer):
            hook.set_state_here(self._optimizer, state)
        else:
            self._optimizer.set_state_dict(state)

    def note(self) -> dict[str, Any]:
        """Plain values by which `go_back` finds what they have now."""
        servers, hook = self._synchronizer.server_optimizer, self._hook
        return {"updates": servers.updates, "who": hook.decision} if servers and hook else {}

    def keep(self, step: int) -> None:
        """After so many steps, in the first group: they are to keep it from now on; not if they have made updates that
        who takes the place of another would make once more."""
        servers = self._synchronizer.server_optimizer
        if servers and self._hook and not servers.updates:
            servers.keep(0, step)
            self._keep = True

    def go_back(self, note: Mapping[str, Any], step: int) -> None:
        """To what they had when the note was made, after so many steps; in a further group, before its first one."""
        servers, hook = self._synchronizer.server_optimizer, self._hook
        if servers and hook and note:
            servers.keep(note["updates"], step)
            self._keep = True
            hook.go_on(note["who"], self._optimizer)

    @property
    def _hook(self) -> OptimizerHook | None:
        return self._models.only_hook
