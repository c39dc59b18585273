"""`python -m benchmarks VERB`: compare."""

from __future__ import annotations

import sys

from common.cli import run_command, split_script
from common.errors import UsageError, choose

__all__ = ["main"]

VERBS = ("compare",)
USAGE = """usage: python -m benchmarks compare [OPTIONS]                    the built-in training
       python -m benchmarks compare [OPTIONS] script.py ARGS...  your own Paddle program, unchanged

Prove that all schemes compute the same, then measure them. --help after the verb lists the options.
"""


def main() -> int:
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        choose("verb", verb, VERBS)
    except UsageError as exc:
        print(f"benchmarks: {exc}", file=sys.stderr)
        return exc.exit_code
    flags, script = split_script(sys.argv[2:])
    if script:
        from benchmarks.compare_script import compare_script
        from benchmarks.script_config import CompareScriptConfig

        return run_command(
            CompareScriptConfig, lambda config: compare_script(config, script), prog="benchmarks compare", args=flags
        )
    from benchmarks.compare import compare
    from benchmarks.config import CompareConfig

    return run_command(CompareConfig, compare, prog="benchmarks compare", args=flags)


if __name__ == "__main__":
    sys.exit(main())
