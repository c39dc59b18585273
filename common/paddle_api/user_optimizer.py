"""A user's Paddle optimizer, described for servers: its name and numbers, or why they cannot make its update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle

from common.errors import UsageError
from common.tensors.optimizers import SGD, Adagrad, Adam, AdamW, Momentum, Optimizer, RMSProp
from common.tensors.parts import slot_of_key

__all__ = ["describe_optimizer", "parameters_of", "renamed", "tensors_of"]


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
    mine = {name for name in names if name}  # a parameter may be frozen for now
    theirs = {p.name for p in parameters if not p.stop_gradient or p.name in mine}
    if theirs != mine:
        return f"the optimizer has {len(theirs & mine)} of the model's {len(mine)} parameters" + (
            f", and {len(theirs - mine)} others (sparse tables, or another model's)" if theirs - mine else ""
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
    """The accumulators in an optimizer's state_dict, without the scheduler's state and the names that a file has."""
    others = ("LR_Scheduler", "master_weights", "StructuredToParameterName@@")
    return {k: v for k, v in state.items() if k not in others}
