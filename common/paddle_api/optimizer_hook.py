"""A user's optimizer whose update the parameter servers make: its steps are intercepted in one place.

All of Paddle's optimizers end in `Optimizer._apply_optimize`, whether by `step` or `minimize`; there it is decided, at
the first step, who updates. Servers do where the optimizer is one that they know and no rank's program reads its
gradients; otherwise the ranks do, as under the collective scheme, and one line says why. In the first two steps
gradients are the mean in any case. Who reads one later, between backward and step, gets the mean too, and from then on
the ranks update: all of them must read, therefore.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.optimizer import Optimizer as PaddleOptimizer

from common.errors import GradSyncError, PeerError, PeerUnreachable, UsageError
from common.paddle_api.gradient_average import GradientAverage
from common.paddle_api.gradient_reads import forget_reads, grad_of, listen_to_reads
from common.paddle_api.used_mask import USED
from common.paddle_api.user_optimizer import describe_optimizer, parameters_of, renamed, tensors_of
from common.sync.synchronizer import Synchronizer
from common.system.switching import switching_often
from common.tensors.flat_optimizer import initial_state
from common.tensors.optimizers import Optimizer
from common.tensors.parts import slot_of_key

__all__ = ["OptimizerHook", "forget_steps", "listen_to_steps"]

SERVERS, TRAINERS = "servers", "trainers"  # decisions
READS = ("", "the program reads gradients after backward", "the program changes gradients between backward and step")


class OptimizerHook:
    """Decides who updates, and has the servers do it.

    Args:
        synchronizer: has `server_optimizer`.
        average: the model's gradients, in an arena that the synchronizer is attached to.
        failed: is called with what the group has failed with in an update; unless that raises, the update is none.
    """

    def __init__(
        self, synchronizer: Synchronizer, average: GradientAverage, failed: Callable[[GradSyncError], None]
    ) -> None:
        if synchronizer.server_optimizer is None or average.pushed_step is None:
            raise ValueError(f"the scheme {synchronizer.scheme} has no servers that update")
        self._synchronizer, self._servers, self._failed = synchronizer, synchronizer.server_optimizer, failed
        self._pushed_step = average.pushed_step
        named, slots = average.binding.named, average.binding.arena.layout.slots
        self._parameters = {p.name: p for _, p in named}  # by names which another model may use too
        paddle_names = {name: p.name for name, p in named}
        self._paddle_names = [paddle_names.get(slot.name, "") for slot in slots]  # which may differ between ranks
        self._ids = {id(p) for _, p in named}
        self._slot_names = ["" if slot.name == USED else slot.name for slot in slots]
        self._optimizer: Any = None  # the one whose updates servers make
        self._by_trainers = self._servers.choice == "trainer"
        self._has_read = self._settled = False  # the program has read gradients; ranks have agreed that none does
        self._loaded: dict[str, Any] | None = None  # a state that the program has given the optimizer
        self._inherited: dict[str, Any] = {}
        self._handed_over = False
        self._is_out = False  # its group has failed

    @property
    def decision(self) -> str:
        """Who updates: "servers" or "trainers"; "": that is not decided yet."""
        return TRAINERS if self._by_trainers else SERVERS if self._optimizer is not None else ""

    @property
    def has_loaded(self) -> bool:
        """Whether the program has given the optimizer a state that the servers have not got yet."""
        return self._loaded is not None

    def has(self, optimizer: Any) -> bool:
        """Whether the servers have this optimizer's state."""
        return optimizer is self._optimizer

    def state_here(self, optimizer: Any) -> dict[str, Any]:
        """Its state_dict, without what the servers have."""
        found: dict[str, Any] = _originals["state_dict"](optimizer)
        return rest_of(found) if self.has(optimizer) else found

    def set_state_here(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Give it what `state_here` gave, where the servers have the rest."""
        _originals["set_state_dict"](optimizer, state)
        forget_accumulators(optimizer)

    def go_on(self, decision: str, optimizer: Any) -> None:
        """As in the group before this one, where that was decided; servers have kept the optimizer's state, if it was
        theirs. Before the first step."""
        self._by_trainers, self._settled = decision == TRAINERS, decision == SERVERS
        if decision != SERVERS:
            return
        found = describe_optimizer(optimizer, self._paddle_names)
        if isinstance(found, str):
            raise UsageError(f"servers cannot go on with the update that they have made: {found}")
        self._optimizer = optimizer
        self._servers.configure(found, self._slot_names)
        forget_accumulators(optimizer)

    def stand_still(self) -> None:
        """The group has failed, and will be followed by another one: until then this optimizer's updates are none."""
        self._is_out = True

    def inherit(self, by_trainers: bool, state: dict[str, Any]) -> None:
        """Go on from the decision and the optimizer's state of the one before, whose model has had other parameters."""
        self._by_trainers, self._inherited = by_trainers, state

    def estate(self) -> tuple[bool, dict[str, Any]]:
        """For `inherit`; between steps."""
        state = self.state(self._optimizer) if self._optimizer is not None else None
        return self._by_trainers, state or {}

    def step(self, optimizer: Any) -> bool:
        """Called instead of an update; False: Paddle is to make it."""
        if self._is_out:
            return self.has(optimizer)
        try:
            return self._step(optimizer)
        except (PeerError, PeerUnreachable) as exc:
            self._failed(exc)
            return True

    def _step(self, optimizer: Any) -> bool:
        if self._by_trainers or not self._concerns(optimizer):
            return False
        if self._optimizer is None:
            if not self._decide(optimizer):
                return False
        elif why := self._why_trainers(optimizer):
            self._hand_over(why)
            return False
        if self._loaded is not None:
            state, self._loaded = self._loaded, None
            self._servers.load({self._on_the_wire(k): np.asarray(v) for k, v in state.items()})  # tensors or arrays
        self._pushed_step.servers_update = self._settled
        self._pushed_step.update(optimizer.get_lr())
        return True

    def read(self, parameter: Any) -> None:
        """Called before the program reads a gradient, or puts another one in its place."""
        if self._by_trainers or self._is_out or self._servers.choice == "server" or id(parameter) not in self._ids:
            return
        self._has_read = self._has_read or self._pushed_step.has_begun
        if self._pushed_step.withholds_mean:
            try:
                self._hand_over(READS[1])
            except (PeerError, PeerUnreachable) as exc:
                self._failed(exc)

    def _why_trainers(self, optimizer: Any) -> str:
        """Why servers cannot make this update, which is not the first one; "": they can."""
        if optimizer is not self._optimizer:
            if self._servers.choice == "server":
                raise UsageError(
                    "--update server: a second optimizer updates the model, but servers keep the state of one; "
                    "use --update auto"
                )
            return "a second optimizer updates the model"
        if not self._settled:
            self._settled = True
            if why := self._what_some_rank_does():
                self._refuse_if_servers_must(why)
            return why
        if self._changes():
            raise UsageError(
                "the program changed gradients between backward and optimizer.step(), when the servers had taken them; "
                "start with --update trainer"
            )
        return ""

    def _what_some_rank_does(self) -> str:
        """With gradients which are the mean: one of `READS`."""
        mine = 2 if self._changes() else int(self._has_read)
        return READS[int(np.max(self._synchronizer.all_gather(np.array([mine], np.uint8))))]

    def _refuse_if_servers_must(self, why: str) -> None:
        if self._servers.choice == "server":
            raise UsageError(f"--update server: servers cannot make this update: {why}; use --update auto")

    def _changes(self) -> bool:
        return not self._pushed_step.can_change() and self._pushed_step.gradients_changed()

    def _hand_over(self, why: str) -> None:
        """From now on the trainers update, and the optimizer has its state back."""
        self._pushed_step.end_updates_by_servers()
        first, self._optimizer, self._by_trainers, self._handed_over = self._optimizer, None, True, True
        _originals["set_state_dict"](first, self._state())
        if self._synchronizer.rank == 0:
            line = f"gradsync: the trainers update from now on, not the servers: {why}"
            print(line, file=sys.stderr, flush=True)

    def has_just_handed_over(self) -> bool:
        """Since it was asked last."""
        handed, self._handed_over = self._handed_over, False
        return handed

    def cleared(self, parameters: Iterable[Any]) -> None:
        """The program has cleared the gradients of these."""
        if self._optimizer is not None and self._ids <= {id(p) for p in parameters}:
            self._pushed_step.cleared()

    def state(self, optimizer: Any) -> dict[str, Any] | None:
        """The state that servers keep for this optimizer; None: it is Paddle's affair."""
        if self._is_out or optimizer is not self._optimizer:
            return None
        return self._state()

    def _state(self) -> dict[str, Any]:
        if self._loaded is not None:
            return dict(self._loaded)
        return {self._in_paddle(k): paddle.to_tensor(v) for k, v in self._servers.state().items()}

    def load(self, optimizer: Any, state: dict[str, Any]) -> bool:
        """Take a state that the program gives the optimizer, for the next step; False: it is Paddle's affair."""
        if optimizer is not self._optimizer:
            return False
        self._loaded = tensors_of(state)
        return True

    def _on_the_wire(self, key: str) -> str:
        return renamed(key, self._paddle_names, self._slot_names)

    def _in_paddle(self, key: str) -> str:
        return renamed(key, self._slot_names, self._paddle_names)

    def _concerns(self, optimizer: Any) -> bool:
        return any(id(p) in self._ids for p in parameters_of(optimizer))

    def _complete(self, optimizer: Optimizer) -> dict[str, Any]:
        """The inherited state, with that of parameters which it does not have."""
        state = dict(self._inherited)
        known = {slot_of_key(key, self._paddle_names) for key in state}
        for index, name in enumerate(self._paddle_names):
            if name and index not in known:
                state |= initial_state(optimizer, self._parameters[name])
        return state

    def _decide(self, optimizer: Any) -> bool:
        found = describe_optimizer(optimizer, self._paddle_names)
        found = self._what_some_rank_does() or found
        if isinstance(found, str):
            self._refuse_if_servers_must(found)
            if self._synchronizer.rank == 0:
                print(f"gradsync: the trainers update, not the servers: {found}", file=sys.stderr, flush=True)
            self._by_trainers = True
            return False
        state = self._complete(found) if self._inherited else tensors_of(optimizer.state_dict())
        self._optimizer = optimizer
        self._servers.configure(found, self._slot_names)
        if state:
            self._loaded = state
            forget_accumulators(optimizer)
        return True


def forget_accumulators(optimizer: Any) -> None:
    """What Paddle keeps of its state is out of date."""
    optimizer._accumulators.clear()
    optimizer._accumulators_holder = {}


def rest_of(state: dict[str, Any]) -> dict[str, Any]:
    """What of an optimizer's state_dict servers never have."""
    return {key: value for key, value in state.items() if key == "LR_Scheduler"}


_hooks: list[OptimizerHook] = []
_originals: dict[str, Any] = {}


def listen_to_steps(hook: OptimizerHook) -> None:
    """Ask `hook` first, from now on, whenever a Paddle optimizer updates, or its state is read or set."""
    _hooks.append(hook)
    listen_to_reads(hook.read)
    if _originals:
        return
    for name in ("_apply_optimize", "state_dict", "set_state_dict", "clear_grad"):
        _originals[name] = getattr(PaddleOptimizer, name)
    for name in ("clear_gradients", "zero_grad"):
        _originals[name] = getattr(nn.Layer, name)

    def apply_optimize(self: Any, loss: Any, startup_program: Any, params_grads: Any, param_group_idx: int = 0) -> Any:
        with switching_often():
            served = any(hook.step(self) for hook in _hooks)
        if served:
            return []
        if any(hook.has_just_handed_over() for hook in list(_hooks)):  # gradients of other ranks' have come
            found = ((p, grad_of(p)) for p in parameters_of(self) if not p.stop_gradient)
            params_grads = [(p, grad) for p, grad in found if grad is not None]
        return _originals["_apply_optimize"](self, loss, startup_program, params_grads, param_group_idx)

    def state_dict(self: Any) -> dict[str, Any]:
        found: dict[str, Any] = _originals["state_dict"](self)
        served = next((state for hook in _hooks if (state := hook.state(self)) is not None), None)
        return found if served is None else {**served, **rest_of(found)}

    def set_state_dict(self: Any, state: dict[str, Any]) -> None:
        _originals["set_state_dict"](self, state)
        if any(hook.load(self, state) for hook in _hooks):
            self._accumulators_holder = {}

    def clear_grad(self: Any, set_to_zero: bool = True) -> None:
        _originals["clear_grad"](self, set_to_zero)
        for hook in _hooks:
            hook.cleared(parameters_of(self))

    def clear_gradients(self: Any, set_to_zero: bool = True) -> None:
        _originals["clear_gradients"](self, set_to_zero)
        for hook in _hooks:
            hook.cleared(self.parameters())

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        for p in self.parameters():
            if grad_of(p) is not None:  # Paddle's asks as a program does that reads them
                p.clear_gradient(not set_to_none)
        for hook in _hooks:
            hook.cleared(self.parameters())

    nn.Layer.clear_gradients, nn.Layer.zero_grad = clear_gradients, zero_grad
    PaddleOptimizer.clear_grad = PaddleOptimizer.clear_gradients = clear_grad
    PaddleOptimizer._apply_optimize = apply_optimize
    PaddleOptimizer.state_dict = state_dict
    PaddleOptimizer.set_state_dict = PaddleOptimizer.load_state_dict = set_state_dict


def forget_steps(hook: OptimizerHook) -> None:
    """Ask it no more; after the last one Paddle's optimizers have their own methods back."""
    if hook in _hooks:
        _hooks.remove(hook)
        forget_reads(hook.read)
    if _hooks:
        return
    if _originals:
        nn.Layer.clear_gradients, nn.Layer.zero_grad = _originals.pop("clear_gradients"), _originals.pop("zero_grad")
        PaddleOptimizer.load_state_dict = _originals["set_state_dict"]
        PaddleOptimizer.clear_gradients = _originals["clear_grad"]
    for name, original in _originals.items():
        setattr(PaddleOptimizer, name, original)
    _originals.clear()
