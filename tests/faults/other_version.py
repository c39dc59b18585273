"""`python -m tests.faults.other_version MODULE ARGS...`: a command of ours as an older version of it would be."""

from __future__ import annotations

import sys
from importlib import import_module

import common

VERSION = "0.0.1"


def main() -> int:
    module = import_module(sys.argv[1])
    import_module("collective.group")
    import_module("ps.client.client")
    ours = common.__version__
    for name, each in list(sys.modules.items()):
        if name.split(".")[0] in OURS and getattr(each, "__version__", None) == ours:
            each.__version__ = VERSION  # type: ignore[attr-defined]
    code: int = module.main(sys.argv[2:])
    return code


OURS = ("common", "ps", "collective")
if __name__ == "__main__":
    sys.exit(main())
