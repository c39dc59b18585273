"""The tables of kills in the pages, from the results of `python -m benchmarks faults --random-kills` and `--soak`."""

from __future__ import annotations

from statistics import median
from typing import Any

from docs.tools.results import read

__all__ = ["random_kills", "soak"]

RANDOM, SOAK = 1, 19  # rows


def outcomes(files: list[str], row: int) -> list[dict[str, Any]]:
    return [each for file in files for each in read(file)["outcomes"] if each["row"] == row]


def random_kills(*files: str) -> list[list[str]]:
    """Of each scheme and number of ranks: jobs, how many ended in the same bits, after how many kills the others went
    on, and steps that they replayed at most; seconds until the group was complete again, the median and the most; then
    that without the new process's start and imports."""
    rows = []
    for each in outcomes([*files], RANDOM):
        whole = [recovery["whole_s"] for recovery in each["recoveries"]]
        rest = [recovery["whole_s"] - recovery["starting_s"] for recovery in each["recoveries"]]
        seconds = [f"{figure:.1f}" for figure in (median(whole), max(whole), median(rest), max(rest))]
        replayed = [count for recovery in each["recoveries"] if (count := recovery.get("replayed")) is not None]
        rows.append([*map(str, (each["times"], each["kept"], len(replayed), max(replayed, default=0))), *seconds])
    return rows


def soak(*files: str) -> list[list[str]]:
    """Of the launcher and a rank of each scheme: MB, descriptors and threads, before the first kill and the last."""
    rows = []
    for each in outcomes([*files], SOAK):
        for who in ("launcher", "rank 0"):
            mine = [process for sample in each["usage"] for process in sample if process["who"] == who]
            first, last = mine[0], mine[-1]
            both = [
                [f"{process['memory_mb']:.0f}", process["descriptors"], process["threads"]] for process in (first, last)
            ]
            rows.append([f"{before} → {after}" for before, after in zip(*both, strict=True)])
    return rows
