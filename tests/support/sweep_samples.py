"""Measured rounds of a sweep without any process."""

from __future__ import annotations

from typing import Any

from benchmarks.operations import rows
from benchmarks.records.result_files import plain
from tests.support.typed_results import completed

__all__ = ["over_tls", "results_of", "row_of", "sample"]


def row_of(*measured: Any, **flags: Any) -> dict[str, Any]:
    """As it stands in sweep.json."""
    return plain(rows.row_of(*measured, **flags))


def results_of(*found: dict[str, Any]) -> dict[str, Any]:
    """sweep.json with these rows."""
    machine = {"cpu": "x", "cores": 2, "memory_bytes": 10**9, "memcpy_gb_per_s": 8.0, "noise": 0.1}
    about = {"kernel": "6", "python": "3", "versions": {}, "commit": None}
    return completed(
        {
            "schema": 1,
            "op": "all_reduce",
            "command": "python -m benchmarks sweep",
            "created": "2026-11-21T08:30:00+00:00",
            "cluster": None,
            "environment": {**machine, **about},
            "absent": {"mpi": "no <mpirun>"},
            "rows": list(found),
        },
        "sweep",
    )


def sample() -> dict[str, Any]:
    """Twice as fast as Gloo at 100 MB, half as fast at 4 KiB, within noise at 1 MiB."""
    return results_of(
        row_of("shm", 4, 10**8, [0.1, 0.2, 0.4], 0, 0.1),
        row_of("gloo", 4, 10**8, [0.5, 0.55, 0.6], 0, None),
        row_of("memory-limit", 4, 10**8, [0.1], 0, None),
        row_of("shm", 4, 4096, [1.9e-4, 2e-4, 2.1e-4], 0, 9e-5),
        row_of("gloo", 4, 4096, [1e-4] * 3, 0, None),
        row_of("shm", 4, 1 << 20, [2e-3, 1.5e-3, 1e-3], 0, 9e-4),
        row_of("gloo", 4, 1 << 20, [2e-3, 3e-3, 4e-3], 0, None),
    )


def over_tls() -> dict[str, Any]:
    """4.25 times as long as plain text at 100 MB, a tenth more at 4 KiB."""
    return results_of(
        row_of("tcp", 2, 10**8, [0.04], 0, None),
        row_of("tcp-tls", 2, 10**8, [0.17], 0, None),
        row_of("tcp", 2, 4096, [1e-4], 0, None),
        row_of("tcp-tls", 2, 4096, [1.1e-4], 0, None),
    )
