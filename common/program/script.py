"""Runs a user's program as one rank, with a scheme in the place of Paddle's groups; our errors in one line. The command
line is that of start.py, which calls it."""

from __future__ import annotations

import ast
import builtins
import os
import pkgutil
import runpy
import sys
import sysconfig
import traceback
import warnings
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType

from common.errors import GradSyncError, UsageError
from common.launch.settings import placement_from
from common.program.install import install, installed
from common.system.process import last_words, note_children, prepare_process

__all__ = ["main", "origin_of", "run_script"]

APART = __name__.removesuffix("common.program.script")  # where our packages are loaded; "" as usual
OURS = {APART + "ps", APART + "collective"}
PACKAGES = Path(__file__).parents[2]  # where ours are
STARTED_IN = os.getcwd() + os.sep  # wherever the program goes
NOT_THE_PROGRAM = (  # how files of Python, of libraries and of ours begin
    "<",
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(str(PACKAGES / name) + os.sep for name in ("benchmarks", "collective", "common", "ps")),
)
HINT = "leave out --no-install, or change its import of paddle.distributed"


def main() -> int:
    prepare_process(of_user=True)
    words = sys.argv[1:]
    if words[0] == "--install":
        install(words[1])
        words = words[2:]
    name = words[1] if words[0] == "-m" else words[0]
    try:
        run_module(words[1:]) if words[0] == "-m" else run_script(words)
    except BaseException as exc:
        if isinstance(exc, SystemExit) and not exc.code:
            hint_after_training(name)
            raise
        note_children()
        sys.last_value = exc  # as Python does for what it reports; the group is told why this rank leaves
        with last_words():
            return report(name, exc)
    hint_after_training(name)
    return 0


def run_script(words: list[str]) -> None:
    """As `python script.py ARGS` does."""
    script = words[0]
    sys.argv = words
    if not Path(script).is_file():
        raise UsageError(f"no such script: {script}")
    path = os.path.abspath(script)
    if script.endswith(".pyc") or pkgutil.get_importer(path) is not None:  # compiled, or an archive
        runpy.run_path(path, run_name="__main__")
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    main.__loader__ = SourceFileLoader("__main__", path)
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))


def run_module(words: list[str]) -> None:
    """As `python -m package.module ARGS` does."""
    module = words[0]
    sys.argv = words  # the first of which run_module replaces by the module's file
    try:
        found = find_spec(module) is not None
    except ModuleNotFoundError as exc:
        if not f"{module}.".startswith(f"{exc.name}."):
            raise
        found = False
    if not found:
        raise UsageError(f"no such module: {module} (in {Path.cwd()} or installed)")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def hint_after_training(script: str) -> None:
    """What has ended well has trained nothing together, if it is one of several ranks and has joined none of them, or
    has trained a static graph."""
    nranks = placement_from().nranks
    if nranks == 1 or "paddle" not in sys.modules or placement_from().rank > 0:
        return
    if not getattr(sys.modules["paddle"], "in_dynamic_mode", lambda: True)():
        words = f"nothing is synchronised: what its {nranks} ranks trained there, they trained apart"
        print(f"\n{script} ended in a static graph, of which {words}", file=sys.stderr)
    elif OURS & sys.modules.keys():
        return
    elif installed():
        words = "uses nothing of paddle.distributed, fleet, paddle.DataParallel or paddle.Model"
        print(f"\n{script} {words}: its {nranks} ranks ran apart", file=sys.stderr)
    else:
        print(f"\n{script} uses neither ps nor collective: its {nranks} ranks ran apart; {HINT}", file=sys.stderr)


def report(script: str, error: BaseException) -> int:
    """Write to stderr what ended the program, and return the exit code."""
    if isinstance(error, GradSyncError):
        print(f"{origin_of(error) or script}: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code
    elif isinstance(error, SystemExit):
        code = 1
        print(error.code, file=sys.stderr)
    else:
        code = 1
        sys.excepthook(type(error), error.with_traceback(below_ours(error)), error.__traceback__)
    if not may_use_ours(script, error):  # last, where a launcher's few lines of a log still show it
        print(f"\n{script} uses neither ps nor collective: {HINT}", file=sys.stderr)
    return code


def origin_of(error: BaseException) -> str:
    """FILE:LINE of the program's innermost statement that led to it; "": none did."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(NOT_THE_PROGRAM):
            found = f"{file}:{line}"
    return found.removeprefix(STARTED_IN)


def below_ours(error: BaseException) -> TracebackType | None:
    """Its traceback as Python shows it of a program that it runs itself; whole, if it is no error of the program's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        frames = frames.tb_next
    return frames if frames or isinstance(error, SyntaxError) else error.__traceback__


def may_use_ours(script: str, error: BaseException) -> bool:
    """Whether the program uses a scheme, or ended before it came to that: at an import, or above its import of one."""
    if installed() or OURS & sys.modules.keys() or isinstance(error, (ImportError, SyntaxError)):
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its run has shown them
            tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    named = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    named += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return any(name.partition(".")[0] in ("ps", "collective") for name in named)
