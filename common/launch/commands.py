"""`python -m PACKAGE`: which commands a package has."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from common.errors import UsageError, choose
from common.launch.cli import VERSION, to_reader

__all__ = ["list_commands"]


def list_commands(package: str, commands: Mapping[str, str]) -> int:
    """Print the commands, a line each, and return the exit code: 0, or that of a UsageError where words were given that
    are not --help or --version.

    Args:
        commands: what each module that can be run does.
    """
    return to_reader(lambda: listed(package, commands, sys.argv[1:]))


def listed(package: str, commands: Mapping[str, str], words: list[str]) -> int:
    if words and words[0] not in ("-h", "--help", "--version"):
        try:
            choose("command", words[0].removeprefix(f"{package}."), [*commands])
            what = (
                f"{words[0]} is a module of its own: write python -m {package}.{words[0].removeprefix(f'{package}.')}"
            )
        except UsageError as exc:
            what = str(exc)
        print(f"{package}: UsageError: {what}", file=sys.stderr)
        return UsageError.exit_code
    if words == ["--version"]:
        print(VERSION)
        return 0
    width = max(map(len, commands))
    for number, (name, does) in enumerate(commands.items()):
        print(f"{'usage:' if number == 0 else '      '} python -m {package}.{name:{width}}  {does}")
    print("\n--help after any of them lists its options.")
    return 0
