"""Collective scheme: no server; every rank keeps a full copy, and the ranks ring-all-reduce their gradients."""

from __future__ import annotations

import os
from typing import Any

import common

if getattr(common, "__version__", None) is None:
    raise ImportError(
        f"GradSync needs its own package 'common', but {common.__file__} comes first on the path; rename that module"
    )

from collective.group import Group, connect
from common.paddle_api.names import PUBLIC, missing_name
from common.system.mkl import set_cpu_type

__all__ = ["Group", "connect", *PUBLIC]

if "PADDLE_TRAINER_ID" in os.environ:  # started by Paddle's launcher: before the program computes anything
    set_cpu_type()


def __getattr__(name: str) -> Any:
    """The names for Paddle programs, loaded with Paddle when first used."""
    if name not in PUBLIC:
        raise missing_name(__name__, name, __all__)
    from collective.fleet import surface

    return getattr(surface, name)


def __dir__() -> list[str]:
    return sorted(__all__)
