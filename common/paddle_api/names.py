"""What becomes of every name of `paddle.distributed` and Fleet: found in one table, known without importing Paddle."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from common.paddle_api.names_table import TABLE, Group, Source, State

__all__ = [
    "OWN",
    "PASSED_ON",
    "PUBLIC",
    "SERVER_SIDE",
    "entry_of",
    "groups_of",
    "missing_name",
    "own_of_paddle",
    "put_in_place_in",
    "why_refused",
]


def groups_of(module: str) -> list[Group]:
    return [group for group in TABLE if group.module == module]


def names_with(source: Source) -> list[str]:
    return [name for group in TABLE if group.source is source for name in group.names]


# What both schemes have of their own, for `import ps as dist` and `import collective as fleet`.
PUBLIC = tuple(sorted(set(names_with(Source.OURS))))

# What both schemes have beside Paddle's names; where one is installed, `paddle.distributed` has it too.
OWN = ("TrainingState",)

# Of Paddle's removed parameter server; `ps` only. The role makers' own are in the place of Paddle's there.
ROLE_MAKERS = ("PaddleCloudRoleMaker", "UserDefinedRoleMaker")
SERVER_SIDE = tuple(sorted((*ROLE_MAKERS, *names_with(Source.SERVERS))))

# Paddle's own, which a scheme hands on: they need no group.
PASSED_ON = tuple(sorted(set(names_with(Source.PADDLE))))


def entry_of(name: str, module: str = "") -> Group | None:
    """What the table says of a name, of either module unless one is given; None: nothing.

    Of a name of both modules it is what `paddle.distributed` has, unless that is not supported.
    """
    found = [group for group in TABLE if name in group.names and module in ("", group.module)]
    return min(found, key=lambda group: group.state is State.REFUSED, default=None)


def why_refused(name: str, module: str = "") -> str:
    """Why a scheme does not have a name of Paddle's, and what instead; "": the table does not say so."""
    entry = entry_of(name, module)
    return entry.words if entry is not None and entry.state is State.REFUSED else ""


def put_in_place_in(module: str) -> tuple[str, ...]:
    """The names that `install` puts into a module of Paddle's: all but those that stay Paddle's own."""
    ours = [group for group in groups_of(module) if group.source is not Source.PADDLE]
    return tuple(name for group in ours for name in group.names)


def own_of_paddle(module: str, name: str, known: Sequence[str]) -> Any:
    """What Paddle itself has under a name that needs no group, as a scheme's module hands it on.

    Raises:
        AttributeError: the table has no such name, or one that is not supported.
    """
    entry = entry_of(name)
    if entry is None or entry.source is not Source.PADDLE:
        raise missing_name(module, name, known)
    try:
        return getattr(import_module(entry.module), name)
    except AttributeError as exc:
        words = f"module {module!r} has no attribute {name!r}: the installed Paddle has no {entry.module}.{name}"
        raise AttributeError(words) from exc


def missing_name(module: str, name: str, known: Sequence[str]) -> AttributeError:
    """The error for a name that a scheme's module does not have.

    Of a name of Paddle's it says what the table does. For others the nearest one is named, but only where it may well
    be meant: to somebody who looks for `shard_optimizers`, `distributed_optimizer` would be no help.
    """
    begin = f"module {module!r} has no attribute {name!r}"
    entry = entry_of(name)
    if entry is not None and entry.source is Source.SERVERS:
        return AttributeError(f"{begin}: {entry.words}")
    if entry is not None and entry.state is State.REFUSED:
        return AttributeError(f"{begin}: {entry.module}.{name} is not supported. {entry.words}")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return AttributeError(f"{begin}; " + (f"the nearest it has is {near[0]!r}" if near else listing(module)))


def listing(module: str) -> str:
    return f"dir({module}) lists what it has"
