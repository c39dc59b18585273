"""`make fuzz`: many inputs for every parser; prints a table, and keeps what broke one in tests/fuzz/corpus."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from multiprocessing import get_context

from tests.fuzz.running import fuzz, keep

__all__: list[str] = []


def main() -> int:
    from tests.fuzz.test_parsers import ALL

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", help="parsers; by default all")
    parser.add_argument("--inputs", type=int, default=100_000, help="for each")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other inputs")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    flags = parser.parse_args()
    names = flags.names or list(ALL)
    print(f"{'parser':<24}{'inputs':>10}{'seconds':>10}{'findings':>10}", flush=True)
    broken = 0
    pool = get_context("spawn").Pool(flags.workers, maxtasksperchild=1)
    with closing(pool):
        for each in [pool.apply_async(fuzz, (name, flags.inputs, flags.seed)) for name in names]:
            row = each.get()
            print(f"{row.name:<24}{row.inputs:>10,}{row.seconds:>10.1f}{len(row.findings):>10}", flush=True)
            broken += len(row.findings)
            for what, data in row.findings.items():
                print(f"  {what[:200]}\n    {keep(row.name, data)}", flush=True)
    pool.join()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
