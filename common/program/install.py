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
from common.launch.adopting import adopt
from common.launch.first_calls import call_in_ranks
from common.paddle_api.names import OWN, entry_of, put_in_place_in, why_refused
from common.paddle_api.names_table import DISTRIBUTED, FLEET, Source
from common.system.after_import import call_after_import

__all__ = ["found_in", "install", "installed"]

APART = __name__.removesuffix("common.program.install")  # where our packages are loaded; "" as usual
PARTS = ("collective", "communication", "parallel", "sharding")  # of paddle.distributed; programs import from them, too
COMMUNICATION = f"{DISTRIBUTED}.communication"
STREAM = f"{COMMUNICATION}.stream"
CALLS = (  # modules of these two
    *("all_gather", "all_reduce", "all_to_all", "batch_isend_irecv", "broadcast", "gather", "group", "recv", "reduce"),
    *("reduce_scatter", "scatter", "send"),
)
LAYERS_PARTS = f"{FLEET}.layers.mpu.mp_ops"  # what Paddle's layers that are divided over ranks are made of
DIVIDED = {
    **dict.fromkeys(
        ("_c_identity", "_c_concat", "_c_split", "_c_lookup_table", "_mp_allreduce"),
        "A layer that is divided over ranks calls it; here each rank has the whole layer: leave out mp_group=.",
    ),
    **dict.fromkeys(
        ("_c_softmax_with_cross_entropy", "_c_softmax_with_multi_label_cross_entropy"),
        "ParallelCrossEntropy calls it, which gives None in Paddle, too, where each rank has the whole model: use "
        "paddle.nn.CrossEntropyLoss(reduction='none').",
    ),
}
WHERE = {  # a module of Paddle's: that of which the table has its names
    DISTRIBUTED: DISTRIBUTED,
    **{f"{DISTRIBUTED}.{part}": DISTRIBUTED for part in PARTS},
    STREAM: DISTRIBUTED,
    **{f"{part}.{call}": DISTRIBUTED for part in (COMMUNICATION, STREAM) for call in CALLS},
    FLEET: FLEET,
}

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
    adopt()
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
    replace(sys.modules["paddle"], {"DataParallel": replacement("paddle", "DataParallel")})
    for where, table in WHERE.items():
        if (module := sys.modules.get(where)) is None:  # not in every Paddle
            continue
        there = {name: v for name, v in vars(module).items() if not isinstance(v, ModuleType)}
        names = {name for name in put_in_place_in(table) if name in there and replaceable(there[name], table, name)}
        if where == DISTRIBUTED:
            names |= {*OWN}
        if where == FLEET:  # also what the table does not know: every function of Paddle's one Fleet
            fleet = there["fleet"]
            names |= {name for name, v in there.items() if isinstance(v, MethodType) and v.__self__ is fleet}
        replace(module, {name: replacement(where, name) for name in names})
    if parts := sys.modules.get(LAYERS_PARTS):
        replace(parts, {name: replacement(LAYERS_PARTS, name) for name in DIVIDED.keys() & vars(parts).keys()})


def replaceable(own: Any, table: str, name: str) -> bool:
    """Types that we do not have stay, so that a library may still ask whether something is of them."""
    return not (isinstance(own, type) and why_refused(name, table))


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
    if where == FLEET and name in ("fleet", "all_reduce"):  # its all_reduce is of arrays, not of tensors
        return surface if name == "fleet" else surface.util.all_reduce
    ours = getattr(surface, "stream", None) if where.startswith(STREAM) else surface
    if hasattr(ours, name):
        return getattr(ours, name)
    words = refusal(where, name)

    def refuse(*_: Any, **__: Any) -> Any:
        raise UsageError(words)

    return refuse


def refusal(where: str, name: str) -> str:
    """What is said to a program that calls a name which the scheme has not."""
    entry = entry_of(name, WHERE.get(where, where))
    if entry is not None and entry.source is Source.SERVERS:
        return f"{where}.{name}: {entry.words}"
    begin = f"{where}.{name} is not supported by {_scheme}, which is installed in the place of Paddle's groups. "
    words = DIVIDED.get(name, "Leave it out, or start with --no-install.") if entry is None else entry.words
    return begin + words
