"""`python -m common.launch.script script.py ARGS`: a user's program as one rank; our errors in one line."""

from __future__ import annotations

import ast
import runpy
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from common.errors import GradSyncError, UsageError
from common.system.process import end_quietly_on_sigterm, last_words, prepare_process

__all__ = ["main"]

OURS = {"ps", "collective"}
HINT = "change its import of paddle.distributed, or run it unchanged with python -m benchmarks compare"


class AfterPaddle:
    """Finds Paddle as Python does and, once it is imported, takes its handler of SIGTERM away: a rank that the launcher
    ends, be it of a program that uses neither scheme, writes nothing that looks like a crash; nor do its children."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "paddle":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_quiet(module: ModuleType) -> None:
                execute(module)
                end_quietly_on_sigterm()

            spec.loader.exec_module = then_quiet  # type: ignore[method-assign]
        return spec


def main() -> int:
    prepare_process()
    sys.meta_path.insert(0, AfterPaddle())
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        if not Path(script).is_file():
            raise UsageError(f"no such script: {script}")
        runpy.run_path(script, run_name="__main__")
    except BaseException as exc:
        if isinstance(exc, SystemExit) and not exc.code:
            raise
        sys.last_value = exc  # as Python does for what it reports; the group is told why this rank leaves
        with last_words():
            return report(script, exc)
    return 0


def report(script: str, error: BaseException) -> int:
    """Write to stderr what ended the program, and return the exit code."""
    if isinstance(error, GradSyncError):
        print(f"{script}: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code
    elif isinstance(error, SystemExit):
        code = 1
        print(error.code, file=sys.stderr)
    else:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    if not may_use_ours(script, error):  # last, where a launcher's few lines of a log still show it
        print(f"\n{script} uses neither ps nor collective: {HINT}", file=sys.stderr)
    return code


def may_use_ours(script: str, error: BaseException) -> bool:
    """Whether the program uses a scheme, or ended before it came to that: at an import, or above its import of one."""
    if OURS & sys.modules.keys() or isinstance(error, (ImportError, SyntaxError)):
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its run has shown them
            tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    named = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    named += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return any(name.partition(".")[0] in OURS for name in named)


if __name__ == "__main__":
    sys.exit(main())
