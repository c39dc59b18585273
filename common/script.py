"""`python -m common.script script.py ARGS`: a user's program as one rank, with errors of ours told in one line."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from common.errors import GradSyncError, UsageError
from common.process import prepare_process

__all__ = ["main"]

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
    except GradSyncError as exc:
        sys.last_value = exc  # as Python does for what it reports; the group is told why this rank leaves
        print(f"{script}: {type(exc).__name__}: {exc}", file=sys.stderr)
        return exc.exit_code
    except BaseException as exc:
        if not (isinstance(exc, SystemExit) and not exc.code):
            sys.last_value = exc
            if not {"ps.fleet", "collective.fleet"} & sys.modules.keys():
                print(f"{script} uses neither ps nor collective: {HINT}", file=sys.stderr)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
