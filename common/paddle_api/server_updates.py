"""A user's optimizer whose update the parameter servers make: its steps are intercepted in one place.

All of Paddle's optimizers end in `Optimizer._apply_optimize`, whether by `step` or `minimize`; there it is decided, at
the first step, who updates. Servers do where the optimizer is one that they know and nothing comes between backward
and step; otherwise the ranks do, as under the collective scheme, and one line says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import paddle
from paddle.optimizer import Optimizer as PaddleOptimizer

from common.errors import UsageError
from common.sync.synchronizer import Synchronizer
from common.tensors.optimizers import SGD, Adagrad, Adam, AdamW, Momentum, Optimizer, RMSProp
from common.tensors.parts import slot_of_key

__all__ = ["Steps", "UpdateByServers", "describe_optimizer", "listen_to_steps", "stop_listening"]


class Steps(Protocol):
    """What `UpdateByServers` needs of the model's gradients; GradientAverage has it."""

    slot_names: list[str]  # of the layout's slots, equal on all ranks; "" where a slot is no parameter
    parameter_names: list[str]  # Paddle's names of the same, which may differ between ranks

    def gradients_changed(self) -> bool: ...  # by the program, since backward

    def parameters_changed(self) -> bool: ...  # by the program, since the last update

    def parameters_updated(self) -> None: ...  # take note of that

    def leave_to_servers(self) -> None: ...  # from now on backward does not wait for the average

    def used(self) -> bytes: ...  # a byte for each slot

    def push(self) -> bool: ...  # what no step has used; False: the servers have it already, as an average


class UpdateByServers:
    """Decides who updates, and makes the servers do it.

    Args:
        steps: the model's gradients.
    """

    def __init__(self, synchronizer: Synchronizer, steps: Steps) -> None:
        if synchronizer.server_updates is None:
            raise ValueError(f"the scheme {synchronizer.scheme} has no servers that update")
        self._servers, self._rank = synchronizer.server_updates, synchronizer.rank
        self._steps = steps
        self._optimizer: Any = None  # the one whose updates servers make
        self._by_trainers = self._servers.choice == "trainer"
        self._loaded: dict[str, Any] | None = None  # a state that the program has given the optimizer

    def step(self, optimizer: Any) -> bool:
        """Called instead of an update; False: Paddle is to make it."""
        if self._by_trainers or not self._concerns(optimizer):
            return False
        if self._optimizer is None and not self._decide(optimizer):
            return False
        if optimizer is not self._optimizer:
            raise UsageError(
                "a second optimizer updates the model, but servers keep the state of one; start with --update trainer"
            )
        if self._steps.gradients_changed():
            raise UsageError(
                "the program changed gradients between backward and optimizer.step(), when the servers had taken them; "
                "start with --update trainer"
            )
        if self._loaded is not None:
            state, self._loaded = self._loaded, None
            self._servers.load(
                {self._on_the_wire(k): np.asarray(v) for k, v in state.items()}  # of tensors or arrays
            )
        pushed = self._steps.push()
        self._servers.update(
            optimizer.get_lr(),
            used=self._steps.used(),
            again=not pushed,
            replaced=self._steps.parameters_changed(),
        )
        self._steps.parameters_updated()
        return True

    def state(self, optimizer: Any) -> dict[str, Any] | None:
        """The state that servers keep for this optimizer; None: it is Paddle's affair."""
        if optimizer is not self._optimizer:
            return None
        if self._loaded is not None:
            return dict(self._loaded)
        served = self._servers.state()
        return {self._in_paddle(k): paddle.to_tensor(v) for k, v in served.items()}

    def load(self, optimizer: Any, state: dict[str, Any]) -> bool:
        """Take a state that the program gives the optimizer, for the next step; False: it is Paddle's affair."""
        if optimizer is not self._optimizer:
            return False
        self._loaded = tensors_of(state)
        return True

    def _on_the_wire(self, key: str) -> str:
        return renamed(key, self._steps.parameter_names, self._steps.slot_names)

    def _in_paddle(self, key: str) -> str:
        return renamed(key, self._steps.slot_names, self._steps.parameter_names)

    def _concerns(self, optimizer: Any) -> bool:
        mine = set(self._steps.parameter_names)
        return any(getattr(p, "name", None) in mine for p in parameters_of(optimizer))

    def _decide(self, optimizer: Any) -> bool:
        found = describe_optimizer(optimizer, self._steps.parameter_names)
        if self._steps.gradients_changed():
            found = "the program changes gradients between backward and step"
        if isinstance(found, str):
            if self._servers.choice == "server":
                raise UsageError(f"--update server: servers cannot make this update: {found}; use --update auto")
            if self._rank == 0:
                print(f"gradsync: the trainers update, not the servers: {found}", file=sys.stderr, flush=True)
            self._by_trainers = True
            return False
        state = tensors_of(optimizer.state_dict())
        self._optimizer = optimizer
        self._servers.configure(found, self._steps.slot_names)
        self._steps.leave_to_servers()
        if state:
            self._loaded = state
            optimizer._accumulators.clear()
            optimizer._accumulators_holder = {}
        return True


def describe_optimizer(optimizer: Any, names: Sequence[str]) -> Optimizer | str:
    """What servers need to know of a Paddle optimizer, or why they cannot make its update.

    Args:
        names: Paddle's names of the model's trainable parameters; "" are left out.
    """
    describe = DESCRIPTIONS.get(type(optimizer))
    kind = type(optimizer).__name__
    if describe is None:
        return f"servers know {', '.join(d.__name__ for d in DESCRIPTIONS)}, not {kind}"
    parameters = parameters_of(optimizer)
    if any(isinstance(p, dict) for p in optimizer._parameter_list):
        return "the optimizer has parameter groups"
    if optimizer._grad_clip is not None:
        return f"the optimizer clips gradients ({type(optimizer._grad_clip).__name__})"
    theirs = {p.name for p in parameters if not p.stop_gradient}
    mine = {name for name in names if name}
    if theirs != mine:
        return f"the optimizer has {len(theirs & mine)} of the model's {len(mine)} parameters" + (
            f", and {len(theirs - mine)} others" if theirs - mine else ""
        )
    if len({p.dtype for p in parameters if not p.stop_gradient}) > 1:
        return "the model has parameters of several dtypes"
    for p in parameters:
        if p.optimize_attr.get("learning_rate", 1.0) != 1.0 or getattr(p, "regularizer", None) is not None:
            return f"parameter {p.name} has a learning rate or regularizer of its own"
    for attribute, usual in UNUSUAL.items():
        if getattr(optimizer, attribute, usual) != usual:
            return f"{kind} has {attribute.lstrip('_')} set"
    decay = weight_decay_of(optimizer)
    if isinstance(decay, str):
        return decay
    return describe(optimizer, decay)


# What servers do not know, and its usual value.
UNUSUAL: dict[str, Any] = {
    "_lazy_mode": False,
    "_amsgrad": False,
    "_apply_decay_param_fun": None,
    "_lr_ratio": None,
    "_rescale_grad": 1.0,
}

DESCRIPTIONS: dict[type[Any], Callable[[Any, float], Optimizer]] = {
    paddle.optimizer.SGD: lambda _, decay: SGD(weight_decay=decay),
    paddle.optimizer.Momentum: lambda o, decay: Momentum(
        momentum=o._momentum, use_nesterov=o._use_nesterov, weight_decay=decay
    ),
    paddle.optimizer.Adagrad: lambda o, decay: Adagrad(
        epsilon=o._epsilon, initial_accumulator_value=o.initial_accumulator_value, weight_decay=decay
    ),
    paddle.optimizer.RMSProp: lambda o, decay: RMSProp(
        rho=o._rho, epsilon=o._epsilon, momentum=o._momentum, centered=o._centered, weight_decay=decay
    ),
    paddle.optimizer.Adam: lambda o, decay: Adam(
        beta1=o._beta1, beta2=o._beta2, epsilon=o._epsilon, weight_decay=decay
    ),
    paddle.optimizer.AdamW: lambda o, decay: AdamW(
        beta1=o._beta1, beta2=o._beta2, epsilon=o._epsilon, weight_decay=decay
    ),
}


def weight_decay_of(optimizer: Any) -> float | str:
    """The coefficient of L2 (AdamW: of decoupled) decay, or why it is none."""
    if isinstance(optimizer, paddle.optimizer.AdamW):
        return float(optimizer._weight_decay)
    if isinstance(optimizer, paddle.optimizer.Momentum) and optimizer._regularization_method == "l2_decay":
        return float(optimizer._regularization_coeff)
    found = optimizer.regularization
    if found is None:
        return 0.0
    if isinstance(found, paddle.regularizer.L2Decay):
        return float(found._coeff)
    return f"the optimizer has {type(found).__name__}"


def parameters_of(optimizer: Any) -> list[Any]:
    found: list[Any] = []
    for each in optimizer._parameter_list or []:
        found += each["params"] if isinstance(each, dict) else [each]
    return found


def renamed(key: str, names: Sequence[str], others: Sequence[str]) -> str:
    """The key of an optimizer's state with its parameter's name replaced by that of the same number in `others`."""
    index = slot_of_key(key, names)
    if index is None:
        raise UsageError(f"the optimizer state has {key}, which belongs to no parameter of this model")
    return others[index] + key[len(names[index]) :]


def tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    """The accumulators in an optimizer's state_dict, without the scheduler's state."""
    return {k: v for k, v in state.items() if k not in ("LR_Scheduler", "master_weights")}


_listener: UpdateByServers | None = None
_originals: dict[str, Any] = {}


def listen_to_steps(listener: UpdateByServers) -> None:
    """Ask `listener` first, from now on, whenever a Paddle optimizer updates, or its state is read or set."""
    global _listener
    _listener = listener
    if _originals:
        return
    for name in ("_apply_optimize", "state_dict", "set_state_dict"):
        _originals[name] = getattr(PaddleOptimizer, name)

    def apply_optimize(self: Any, loss: Any, startup_program: Any, params_grads: Any, param_group_idx: int = 0) -> Any:
        if _listener and _listener.step(self):
            return []
        return _originals["_apply_optimize"](self, loss, startup_program, params_grads, param_group_idx)

    def state_dict(self: Any) -> dict[str, Any]:
        found: dict[str, Any] = _originals["state_dict"](self)
        served = _listener.state(self) if _listener else None
        return found if served is None else {**served, **{k: v for k, v in found.items() if k == "LR_Scheduler"}}

    def set_state_dict(self: Any, state: dict[str, Any]) -> None:
        _originals["set_state_dict"](self, state)
        if _listener and _listener.load(self, state):
            self._accumulators_holder = {}

    PaddleOptimizer._apply_optimize = apply_optimize
    PaddleOptimizer.state_dict = state_dict
    PaddleOptimizer.set_state_dict = PaddleOptimizer.load_state_dict = set_state_dict


def stop_listening() -> None:
    """Give Paddle's optimizers their own methods back."""
    global _listener
    _listener = None
    for name, original in _originals.items():
        setattr(PaddleOptimizer, name, original)
    if _originals:
        PaddleOptimizer.load_state_dict = _originals["set_state_dict"]
    _originals.clear()
