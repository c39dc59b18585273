"""Parameter-server scheme: trainers push gradients to servers, which make one global update and serve the result."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.argv[:1] == ["-m"]:  # a command of ours: a folder `common` where it is started is not meant
    sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
    import common

    del sys.path[0]
import common

if getattr(common, "__version__", None) is None:
    raise ImportError(
        f"GradSync needs its own package 'common', but {common.__file__} comes first on the path; rename that module"
    )

from common.launch.adopting import adopt
from common.paddle_api.names import OWN, PASSED_ON, PUBLIC, SERVER_SIDE, own_of_paddle
from common.program.install import install as put_in_place
from common.system.mkl import set_cpu_type
from common.tensors.optimizers import SGD, Adagrad, Adam, AdamW, Momentum, RMSProp

if TYPE_CHECKING:
    from ps.connection import Connection, connect

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Connection",
    "Momentum",
    "RMSProp",
    "connect",
    "install",
    *OWN,
    *PUBLIC,
    *SERVER_SIDE,
]

if sys.argv[:1] != ["-m"]:
    adopt()
if "PADDLE_TRAINER_ID" in os.environ:  # a rank, but for our launchers: before the program computes anything
    set_cpu_type()


def install() -> None:
    """Put this scheme in the place of Paddle's own groups in this process, so that a program that imports
    `paddle.distributed`, `fleet` or `paddle.DataParallel` uses it. A launcher of ours does that itself.

    Raises:
        UsageError: the other scheme was installed before.
    """
    put_in_place("ps")


def __getattr__(name: str) -> Any:
    """Loaded when first used: the names for NumPy users with gRPC, those for Paddle programs with Paddle."""
    if name not in __all__:
        return own_of_paddle(__name__, name, __all__)
    if name in ("Connection", "connect"):
        from ps import connection

        return getattr(connection, name)
    fleet = import_module(f"{__name__}.fleet")
    return fleet if name == "fleet" else getattr(fleet, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *PASSED_ON})
