"""Read single figures out of the committed result files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

__all__ = ["RESULTS", "SIZES", "MapCell", "crossover", "over_seeds", "part", "read", "step_ms", "sweep_row"]

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SIZES = {"4 KiB": 4096, "64 KiB": 65536, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "100 MB": 100_000_000}


class MapCell(NamedTuple):
    """A cell of a crossover map, for each link."""

    nranks: int
    servers: int
    apart: bool  # servers on hosts of their own, else on the ranks'
    bytes: int


@cache
def read(name: str) -> dict[str, Any]:
    """The results in `name`, a path below benchmarks/results."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def part(name: str, of: str) -> dict[str, Any]:
    """The results of one part of a job's suite.json."""
    return _only(read(name)["parts"], name=of)["results"]  # type: ignore[no-any-return]


def sweep_row(results: dict[str, Any], backend: str, nranks: int, size: int) -> dict[str, Any]:
    """What a sweep measured of one backend at one number of ranks and bytes."""
    return _only(results["rows"], backend=backend, nranks=nranks, bytes=size)


def step_ms(results: dict[str, Any], contestant: str) -> float:
    """Milliseconds a step of a contestant of `compare script.py`."""
    return float(_only(results["runs"], contestant=contestant)["step_ms"])


def crossover(results: dict[str, Any], link: str, cell: MapCell) -> dict[str, Any]:
    return _only(results["cells"], link=link, **cell._asdict())


def over_seeds(results: dict[str, Any], contestant: str, straggler: str, what: str) -> float:
    """The median over seeds of a figure of `accuracy`, such as "samples_per_s"."""
    runs = [run for run in results["runs"] if (run["contestant"], run["straggler"]) == (contestant, straggler)]
    return median(float(run[what]) for run in runs)


def _only(items: list[dict[str, Any]], **values: object) -> dict[str, Any]:
    """The one item whose keys have these values."""
    found = [item for item in items if all(item[key] == value for key, value in values.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} entries, not one, have {values}")
    return found[0]
