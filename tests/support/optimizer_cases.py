"""Optimizers of every kind and the rates they are run with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

paddle = pytest.importorskip("paddle")

from common.tensors.optimizers import SGD, Adagrad, Adam, AdamW, Momentum, Optimizer, RMSProp  # noqa: E402

__all__ = ["CASES", "RATES", "Make"]

Make = Callable[[list[Any]], Any]
O = paddle.optimizer  # noqa: E741
RATES = [0.1, 0.1, 0.05, 0.2, 1e-3]  # a step each
CASES: dict[str, tuple[Optimizer, Make]] = {
    "sgd": (SGD(), lambda p: O.SGD(parameters=p)),
    "sgd decay": (SGD(weight_decay=0.01), lambda p: O.SGD(parameters=p, weight_decay=0.01)),
    "momentum": (Momentum(), lambda p: O.Momentum(parameters=p)),
    "nesterov decay": (
        Momentum(momentum=0.8, use_nesterov=True, weight_decay=0.01),
        lambda p: O.Momentum(momentum=0.8, use_nesterov=True, weight_decay=0.01, parameters=p),
    ),
    "adagrad": (Adagrad(), lambda p: O.Adagrad(0.001, parameters=p)),
    "adagrad start": (
        Adagrad(epsilon=1e-4, initial_accumulator_value=0.5),
        lambda p: O.Adagrad(0.001, epsilon=1e-4, initial_accumulator_value=0.5, parameters=p),
    ),
    "rmsprop": (RMSProp(), lambda p: O.RMSProp(0.001, parameters=p)),
    "rmsprop centered": (
        RMSProp(rho=0.9, momentum=0.5, centered=True),
        lambda p: O.RMSProp(0.001, rho=0.9, momentum=0.5, centered=True, parameters=p),
    ),
    "adam": (Adam(), lambda p: O.Adam(parameters=p)),
    "adam decay": (
        Adam(beta1=0.8, beta2=0.99, epsilon=1e-6, weight_decay=0.1),
        lambda p: O.Adam(beta1=0.8, beta2=0.99, epsilon=1e-6, weight_decay=0.1, parameters=p),
    ),
    "adamw": (AdamW(), lambda p: O.AdamW(parameters=p)),
    "adamw strong": (AdamW(weight_decay=0.3), lambda p: O.AdamW(weight_decay=0.3, parameters=p)),
    "adamw none": (AdamW(weight_decay=0.0), lambda p: O.AdamW(weight_decay=0.0, parameters=p)),
}
