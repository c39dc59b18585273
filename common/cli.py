"""Command lines: flags made from a dataclass by tyro, and errors as one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from common.errors import GradSyncError
from common.process import last_words

__all__ = ["run_command", "split_script"]

T = TypeVar("T")


def run_command(
    config: type[T], main: Callable[[T], int | None], *, prog: str, args: Sequence[str] | None = None
) -> int:
    """Parse the command line into `config`, call `main` with it, and return the exit code.

    An error of ours is one line on stderr, without a traceback; anything else is a bug and keeps it.
    """
    import tyro

    try:
        return main(tyro.cli(config, prog=prog, args=args)) or 0
    except GradSyncError as exc:
        with last_words():
            print(getattr(exc, "words", "") or f"{prog}: {type(exc).__name__}: {exc}", file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130


def split_script(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """(our flags, the user's script and its arguments): the script is the first argument that ends in .py."""
    for index, arg in enumerate(args):
        if arg.endswith(".py") and not arg.startswith("-"):
            return list(args[:index]), list(args[index:])
    return list(args), []
