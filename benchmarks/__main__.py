"""`python -m benchmarks VERB`: compare."""

from __future__ import annotations

import sys

from common.cli import run_command
from common.errors import UsageError, choose

__all__ = ["main"]

VERBS = ("compare",)


def main() -> int:
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("-h", "--help"):
        print("usage: python -m benchmarks compare [OPTIONS]\n\n  compare   prove that the schemes agree, measure them")
        return 0
    try:
        choose("verb", verb, VERBS)
    except UsageError as exc:
        print(f"benchmarks: {exc}", file=sys.stderr)
        return exc.exit_code
    from benchmarks.compare import compare
    from benchmarks.config import CompareConfig

    return run_command(CompareConfig, compare, prog="benchmarks compare", args=sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
