"""What compiled loops and data connections were to show, held against the committed results: the table of a note."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from docs.tools.results import SIZES, read, sweep_row

__all__ = ["Files", "on_one_host", "targets"]

MB_100 = SIZES["100 MB"]
MPI_2, MPI_4 = [1.1, 1.4, 2.5, 2.5, 4.0], [2.0, 2.0, 2.5, 2.5, 4.0]  # times Open MPI's speed, by size
COPIED = [1.0, 1.0, 1.0, 1.0, 2.0]  # the same of ordinary arrays
OR_OF_LIMIT = {2: 0.90, 4: 0.85}  # of the memory's limit at 100 MB, where that asks for less


@dataclass(frozen=True)
class Files:
    """Below benchmarks/results: sweeps on one host, and of 50 MB between hosts with one server, with four on the
    ranks' hosts and with four on hosts of their own."""

    all_reduce: str
    push_pull: str
    one_server: str
    beside: str
    apart: str


def targets(files: Files) -> list[list[str]]:
    """For each target: what was measured, and whether that meets it."""
    between = [read(files.one_server), read(files.beside), read(files.apart)]
    *first, last = on_one_host(files.all_reduce, files.push_pull)
    return [*first, *_between_hosts(*between), last]


def on_one_host(all_reduce: str, push_pull: str) -> list[list[str]]:
    """Likewise, without those between hosts."""
    on_host = read(all_reduce)
    return [
        _over_mpi(on_host, "shm", 2, MPI_2),
        _over_mpi(on_host, "shm", 4, MPI_4),
        _over_mpi(on_host, "shm-copied", 2, COPIED),
        _over_mpi(on_host, "shm-copied", 4, COPIED),
        _at_least(_row(on_host, "shm", MB_100, 2)["of_limit"], 0.85),
        _at_least(_row(on_host, "shm", MB_100, 4)["of_limit"], 0.75),
        *_rounds(read(push_pull)),
        _at_most(_over(on_host, "tcp", "loopback-limit", SIZES["4 KiB"], 2), 2.5),
    ]


def _row(results: dict[str, Any], backend: str, size: int, nranks: int = 4) -> dict[str, Any]:
    return sweep_row(results, backend, nranks, size)


def _over(results: dict[str, Any], one: str, other: str, size: int, nranks: int = 4) -> float:
    """One's time over the other's."""
    return float(_row(results, one, size, nranks)["time_ms"] / _row(results, other, size, nranks)["time_ms"])


def _over_mpi(results: dict[str, Any], ours: str, nranks: int, wanted: list[float]) -> list[str]:
    ratios = {name: _over(results, "mpi", ours, size, nranks) for name, size in SIZES.items()}
    missed = [name for (name, ratio), least in zip(ratios.items(), wanted, strict=True) if ratio < least]
    enough = ours == "shm" and _row(results, ours, MB_100, nranks)["of_limit"] >= OR_OF_LIMIT[nranks]
    missed = [name for name in missed if name != "100 MB" or not enough]
    shown = ", ".join(f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}" for ratio in ratios.values())
    return [shown, f"not {', '.join(missed)}" if missed else "yes"]


def _rounds(results: dict[str, Any]) -> list[list[str]]:
    memory = _row(results, "ps-tcp", MB_100)["server_memory"]
    return [
        _at_least(_row(results, "ps-shm", MB_100)["of_limit"], 0.80),
        _at_most(_over(results, "ps-shm-copied", "memcpy", MB_100), 8),
        _at_most(_over(results, "ps-tcp", "memcpy", MB_100), 25),
        [f"{memory['pss']:.0f} MB", _met(met=memory["pss"] <= memory["limit"])],
    ]


def _between_hosts(one_server: dict[str, Any], beside: dict[str, Any], apart: dict[str, Any]) -> list[list[str]]:
    size = 50_000_000
    lead = _over(apart, "tcp-sgd", "ps-tcp", size)
    return [
        _at_least(_row(one_server, "ps-tcp", size)["of_limit"], 0.92),
        _at_most(_over(beside, "ps-tcp", "tcp-sgd", size), 1.10),
        _at_least(_row(apart, "ps-tcp", size)["of_limit"], 0.85),
        [f"{lead:.2f}", _met(met=lead > 1)],
    ]


def _at_least(share: float, least: float) -> list[str]:
    return [f"{share:.0%}".replace("%", " %"), _met(met=share >= least)]


def _at_most(ratio: float, most: float) -> list[str]:
    return [f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}", _met(met=ratio <= most)]


def _met(*, met: bool) -> str:
    return "yes" if met else "no"
