"""Calls what waits for a module right after this process has imported it, whoever imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["call_after_import"]

Call = Callable[[], None]


class AfterImport:
    """Finds the awaited modules as Python does, and has what waits for one called once it is executed."""

    def __init__(self) -> None:
        self.awaited: dict[str, list[Call]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.awaited:
            return None
        calls = self.awaited.pop(name)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            self.awaited[name] = calls
            return spec
        execute = spec.loader.exec_module

        def then_call(module: ModuleType) -> None:
            execute(module)
            for call in calls:
                call()

        spec.loader.exec_module = then_call  # type: ignore[method-assign]
        return spec


_finder = AfterImport()


def call_after_import(name: str, call: Call) -> None:
    """Have `call` called once, after the module of that name was imported; not if it has been by now."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    calls = _finder.awaited.setdefault(name, [])
    if call not in calls:
        calls.append(call)
