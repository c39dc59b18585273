"""Parameter-server scheme: trainers push gradients to servers, which make one global update and serve the result."""

from __future__ import annotations

from typing import Any

import common

if getattr(common, "__version__", None) is None:
    raise ImportError(
        f"GradSync needs its own package 'common', but {common.__file__} comes first on the path; rename that module"
    )

from common.names import PUBLIC, SERVER_SIDE, missing_name
from common.optimizers import SGD, Adagrad, Adam, AdamW, Momentum, RMSProp

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Momentum", "RMSProp", *PUBLIC, *SERVER_SIDE]


def __getattr__(name: str) -> Any:
    """The names for Paddle programs, loaded with Paddle when first used."""
    if name not in __all__:
        raise missing_name(__name__, name, __all__)
    from ps import fleet

    return getattr(fleet, name, None) or getattr(fleet.surface, name)


def __dir__() -> list[str]:
    return sorted(__all__)
