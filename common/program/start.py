"""Starts a rank with a user's program: `python common/program/start.py [--install SCHEME] script.py ARGS`, or
`... -m package.module ARGS`. Run as a file, it has imported nothing of ours yet.

A program may have packages with the names of ours. Then its imports find its own, and ours are loaded as parts of a
package `_gradsync_`, where the import statements of our modules, and no others, look for them.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["main"]

OURS = ("collective", "common", "ps")
APART = "_gradsync_"
ROOT = os.path.realpath(Path(__file__).parents[2])  # of our packages


def main() -> int:
    program = sys.argv[3:] if sys.argv[1] == "--install" else sys.argv[1:]
    folder = os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))
    if sys.path[:1] == [str(Path(__file__).parent)]:  # as Python does for a file
        del sys.path[0]
    sys.path.insert(0, folder)
    if theirs := {name for name in OURS if program_has(name)}:
        keep_apart(theirs)
        script = import_module(f"{APART}.common.program.script")
    else:
        if ROOT not in map(os.path.realpath, sys.path):
            sys.path.append(ROOT)
        script = import_module("common.program.script")
    code: int = script.main()
    return code


def program_has(name: str) -> bool:
    """Whether modules of that name come before ours on the path; a folder needs no __init__.py for that."""
    for entry in sys.path:
        if os.path.realpath(entry) == ROOT:
            return False
        folder = Path(entry, name)
        if folder.with_suffix(".py").is_file() or any(any(folder.glob(each)) for each in ("*.py", "*/*.py")):
            return True
    return False


def keep_apart(theirs: Collection[str]) -> None:
    """Have ours loaded beside the program's packages of these names."""
    package = ModuleType(APART)
    package.__path__ = [ROOT]
    sys.modules[APART] = package
    sys.meta_path.insert(0, Apart(theirs))


class Apart:
    """Finds our modules within `_gradsync_`, the program's under the names that it has, and ours under the others.

    Args:
        theirs: which of our packages' names are the program's.
    """

    def __init__(self, theirs: Collection[str]) -> None:
        self._theirs = theirs

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top, _, below = name.partition(".")
        if top == APART:
            spec = PathFinder.find_spec(name, path, target)
            return None if spec is None else with_own_imports(spec)
        if top in self._theirs and not below:
            return PathFinder.find_spec(name, [each for each in sys.path if os.path.realpath(each) != ROOT], target)
        if top in OURS and top not in self._theirs:
            loader: Any = Same(import_module(f"{APART}.{name}"))
            return ModuleSpec(name, loader)
        return None


class Same:
    """Loads nothing: another name for a module that is there."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def with_own_imports(spec: ModuleSpec) -> ModuleSpec:
    """Have the module's import statements find our packages within `_gradsync_`."""
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_ours}
        execute(module)

    loader.exec_module = exec_module
    return spec


def import_ours(name: str, scope: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
    """As `__import__`, for the import statements of our modules."""
    top = name.partition(".")[0]
    if level or top not in OURS:
        return builtins.__import__(name, scope, local, names, level)
    found = builtins.__import__(f"{APART}.{name}", scope, local, names or ("__name__",), 0)
    return found if names else sys.modules[f"{APART}.{top}"]


if __name__ == "__main__":
    sys.exit(main())
