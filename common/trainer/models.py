"""The built-in models, made from Paddle's layers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import paddle
from paddle import nn

from common.errors import UsageError, choose
from common.launch.flags import MODELS

__all__ = ["make_model"]

PIXELS, CLASSES = 28 * 28, 10
DEFAULT_MLP = "256"


def make_model(name: str, *, seed: int) -> Any:
    """A paddle.nn.Layer from images [n, 1, 28, 28] to logits [n, 10], initialised from `seed`.

    Raises:
        UsageError: unknown model, or hidden sizes that are no numbers.
    """
    kind, colon, sizes = name.partition(":")
    choose("model", kind, MODELS)
    if colon and kind != "mlp":
        raise UsageError(f"{kind} has no sizes to be given (got {name!r}); only mlp has, as in mlp:1024,1024")
    paddle.seed(seed)
    with paddle.utils.unique_name.guard():  # equal parameter names in every run of a process
        return mnist_cnn() if kind == "mnist-cnn" else mlp(sizes if colon else DEFAULT_MLP)


def mnist_cnn() -> Any:
    """The network of Paddle's MNIST tutorial: 20,350 parameters, 81 KB."""
    return nn.Sequential(
        nn.Conv2D(1, 20, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2D(2, 2),
        nn.Conv2D(20, 20, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2D(2, 2),
        nn.Flatten(),
        nn.Linear(980, CLASSES),
    )


def mlp(sizes: str) -> Any:
    """Linear layers with ReLU between, for sweeps of the parameter count."""
    try:
        hidden = [int(size) for size in sizes.split(",")]
    except ValueError as exc:
        raise UsageError(f"hidden sizes of mlp must be numbers, as in mlp:1024,1024 (got {sizes!r})") from exc
    widths = [PIXELS, *hidden, CLASSES]
    if min(widths) < 1:
        raise UsageError(f"hidden sizes of mlp must be at least 1 (got {sizes!r})")
    if sum(a * b for a, b in pairwise(widths)) >= 2**31:
        raise UsageError(f"mlp of sizes {sizes} would have more than 2^31 parameters")
    layers: list[Any] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
