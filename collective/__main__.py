"""`python -m collective`: which commands there are."""

from __future__ import annotations

import sys

from common.launch.commands import list_commands

COMMANDS = {
    "run": "train here or on several hosts by all-reduce; your own program with script.py ARGS",
    "trainer": "one rank, started by hand",
}

if __name__ == "__main__":
    sys.exit(list_commands("collective", COMMANDS))
