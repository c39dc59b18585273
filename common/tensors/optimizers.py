"""Frozen descriptions of Paddle's optimizers: what a rank tells a server to use, no Paddle needed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from common.errors import choose

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Momentum",
    "Optimizer",
    "RMSProp",
    "make_optimizer",
]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The base of the descriptions below; fields are keyword arguments of the class in `paddle.optimizer`."""

    learning_rate: float = 0.001

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def settings(self) -> dict[str, float]:
        return {key: float(value) for key, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """p -= lr * g."""

    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Momentum(Optimizer):
    """v = momentum * v + g; p -= lr * v."""

    momentum: float = 0.9
    use_nesterov: bool = False
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Adagrad(Optimizer):
    """Duchi et al. 2011."""

    epsilon: float = 1e-6
    initial_accumulator_value: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RMSProp(Optimizer):
    """Hinton's lecture 6e, as Paddle has it."""

    rho: float = 0.95
    epsilon: float = 1e-6
    momentum: float = 0.0
    centered: bool = False
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Kingma and Ba 2015; weight_decay is L2, added to the gradient."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Loshchilov and Hutter 2019; weight_decay is decoupled from the gradient."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01


OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.__name__.lower(): kind for kind in (SGD, Momentum, Adagrad, RMSProp, Adam, AdamW)
}


def make_optimizer(name: str, settings: dict[str, float]) -> Optimizer:
    """The description called `name` with the given fields.

    Raises:
        UsageError: unknown name, or a setting that this optimizer does not have.
    """
    kind = OPTIMIZERS[choose("optimizer", name, OPTIMIZERS)]
    known: dict[str, Any] = {field.name: field.default for field in fields(kind)}
    for key in settings:
        choose(f"setting of {name}", key, known)
    return kind(**{key: type(known[key])(value) for key, value in settings.items()})
