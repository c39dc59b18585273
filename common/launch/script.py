"""`python -m common.launch.script script.py ARGS`: a user's program as one rank; our errors in one line."""

from __future__ import annotations

import ast
import runpy
import sys
import warnings
from pathlib import Path

from common.errors import GradSyncError, UsageError
from common.launch.settings import placement_from
from common.system.process import last_words, prepare_process

__all__ = ["main"]

OURS = {"ps", "collective"}
HINT = "change its import of paddle.distributed, or run it unchanged with python -m benchmarks compare"


def main() -> int:
    prepare_process()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        if not Path(script).is_file():
            raise UsageError(f"no such script: {script}")
        runpy.run_path(script, run_name="__main__")
    except BaseException as exc:
        if isinstance(exc, SystemExit) and not exc.code:
            hint_after_training(script)
            raise
        sys.last_value = exc  # as Python does for what it reports; the group is told why this rank leaves
        with last_words():
            return report(script, exc)
    hint_after_training(script)
    return 0


def hint_after_training(script: str) -> None:
    """What has ended well has trained nothing together, if it is one of several ranks and knew nothing of them."""
    nranks = placement_from().nranks
    if nranks > 1 and "paddle" in sys.modules and not OURS & sys.modules.keys() and placement_from().rank == 0:
        print(f"\n{script} uses neither ps nor collective: its {nranks} ranks ran apart; {HINT}", file=sys.stderr)


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
