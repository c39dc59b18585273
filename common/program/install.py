"""`install`: a scheme's functions and classes at Paddle's own names, so that a program needs no changed import.

Nothing is loaded for it: the names are put there when the process imports Paddle, and what stands behind them comes
when the first one is used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

from common.errors import UsageError
from common.launch.first_calls import call_in_ranks
from common.paddle_api.communication import STREAM
from common.paddle_api.names import PUBLIC, SERVER_SIDE
from common.system.after_import import call_after_import

__all__ = ["found_in", "install", "installed"]

APART = __name__.removesuffix("common.program.install")  # where our packages are loaded; "" as usual
FLEET = "paddle.distributed.fleet"
COMMUNICATION_MODULE = "paddle.distributed.communication"
STREAM_MODULE = f"{COMMUNICATION_MODULE}.stream"
REFUSED = ("gloo_barrier", "gloo_init_parallel_env")  # of paddle.distributed; they work on groups that nobody joins
MODULES = (  # of COMMUNICATION_MODULE, from which a program may import, too
    *("all_gather", "all_reduce", "all_to_all", "batch_isend_irecv", "broadcast", "gather", "group", "recv", "reduce"),
    *("reduce_scatter", "scatter", "send"),
)
WHERE = {
    "paddle": ("DataParallel",),
    "paddle.distributed": (*PUBLIC, *REFUSED),
    "paddle.distributed.collective": PUBLIC,
    "paddle.distributed.parallel": PUBLIC,
    COMMUNICATION_MODULE: PUBLIC,
    **{f"{COMMUNICATION_MODULE}.{name}": PUBLIC for name in MODULES},
    STREAM_MODULE: STREAM,
    **{f"{STREAM_MODULE}.{name}": STREAM for name in MODULES},
    FLEET: (*PUBLIC, *(n for n in SERVER_SIDE if not n.endswith("RoleMaker")), "fleet"),  # `init` takes Paddle's own
}
WITHOUT_SERVERS: dict[str, Callable[[], bool]] = {"is_server": lambda: False, "is_worker": lambda: True}

_scheme = _module = ""  # installed, and where its functions are; "": none


def install(scheme: str, module: str = "") -> None:
    """Put a scheme in the place of Paddle's own groups in this process, now or when it imports Paddle.

    Args:
        scheme: "ps" or "collective".
        module: has its functions as `surface`; "" for the scheme's own.

    Raises:
        UsageError: another one was installed before.
    """
    global _scheme, _module
    chosen = module or f"{scheme}.fleet"
    if _module not in ("", chosen):
        raise UsageError(
            f"{scheme}.install(): {_scheme} was installed in this process before, and a process synchronises by one "
            "scheme: install only one"
        )
    if _module:
        return
    _scheme, _module = scheme, chosen
    call_in_ranks(install, scheme, module)
    if "paddle" in sys.modules:
        put_in_place()
    else:
        call_after_import("paddle", put_in_place)


def installed() -> str:
    """The scheme that stands in the place of Paddle's groups in this process; "" if none does."""
    return _scheme


def put_in_place() -> None:
    for where, names in WHERE.items():
        if where not in sys.modules:  # of another Paddle
            continue
        module = sys.modules[where]
        found = {name: name for name in names if not isinstance(vars(module).get(name, module), ModuleType)}
        if where == FLEET:  # its functions are methods of one Fleet, some under two names
            methods = {name: v for name, v in vars(module).items() if isinstance(v, MethodType)}
            found |= {name: v.__name__ for name, v in methods.items() if v.__self__ is module.fleet}
        replace(module, {name: replacement(where, ours) for name, ours in found.items()})


def replacement(where: str, name: str) -> Callable[[], Any]:
    return lambda: found_in(importlib.import_module(APART + _module).surface, where, name)


def replace(module: ModuleType, names: dict[str, Callable[[], Any]]) -> None:
    """Have a module give others what these find for its names; its own functions keep what it has itself."""
    places = {name: Place(find) for name, find in names.items()}
    module.__class__ = type("module", (type(module),), places)


class Place:
    """A name of a module: what is found for it when it is first used, or what the program puts there."""

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find = find

    def __get__(self, module: ModuleType | None, _: type | None = None) -> Any:
        if "value" not in vars(self):
            self.value = self._find()
        return self.value

    def __set__(self, module: ModuleType, value: Any) -> None:
        self.value = value


def found_in(surface: Any, where: str, name: str) -> Any:
    """What a scheme has for a name of one of Paddle's modules.

    Returns:
        For a name that it has not: a function that raises UsageError when it is called.
    """
    if where == FLEET and name == "fleet":
        return surface
    if where.startswith(STREAM_MODULE):
        return getattr(surface.stream, name)
    if hasattr(surface, name):
        return getattr(surface, name)
    if name in WITHOUT_SERVERS:
        return WITHOUT_SERVERS[name]
    if name in SERVER_SIDE:
        words = f"fleet.{name}: a parameter-server program cannot run as a ring; run it with ps"
    else:
        words = (
            f"{where}.{name} is not supported by {_scheme}, which is installed in the place of Paddle's groups; "
            "leave it out, or run the program without install() under Paddle's own launcher"
        )

    def refuse(*_: Any, **__: Any) -> Any:
        raise UsageError(words)

    return refuse
