"""`python -m ps`: which commands there are."""

from __future__ import annotations

import sys

from common.launch.commands import list_commands

COMMANDS = {
    "run": "train here or on several hosts: trainers and servers; your own program with script.py ARGS",
    "server": "one parameter server, started by hand",
    "trainer": "one trainer, started by hand",
    "status": "how the training of running servers goes",
}

if __name__ == "__main__":
    sys.exit(list_commands("ps", COMMANDS))
