"""What compiled loops and data connections were to show, held against the committed results: the table of a note."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from docs.tools.results import SIZES, read, sweep_row

__all__ = ["targets"]

Results = dict[str, Any]
MB_100 = SIZES["100 MB"]
MPI_2, MPI_4 = [1.1, 1.4, 2.5, 2.5, 4.0], [2.0, 2.0, 2.5, 2.5, 4.0]  # times Open MPI's speed, by size
COPIED = [1.0, 1.0, 1.0, 1.0, 2.0]  # the same of ordinary arrays
OR_OF_LIMIT = {2: 0.90, 4: 0.85}  # of the memory's limit at 100 MB, where that asks for less


def targets(*machines: Sequence[str]) -> list[list[str]]:
    """For each target what was measured on each machine, with a word where that does not meet it; "-": nothing was.

    Args:
        machines: of each, files below benchmarks/results: an all-reduce and a server's round on one host; then perhaps
            the round of 50 MB between hosts with one server, with four on the ranks' hosts and with four on hosts of
            their own.
    """
    columns = [_measured(*map(read, files)) for files in machines]
    return [list(cells) for cells in zip(*columns, strict=True)]


def _measured(all_reduce: Results, push_pull: Results, *between_hosts: Results) -> list[str]:
    return [
        _over_mpi(all_reduce, "shm", 2, MPI_2),
        _over_mpi(all_reduce, "shm", 4, MPI_4),
        _over_mpi(all_reduce, "shm-copied", 2, COPIED),
        _over_mpi(all_reduce, "shm-copied", 4, COPIED),
        _at_least(_row(all_reduce, "shm", MB_100, 2)["of_limit"], 0.85),
        _at_least(_row(all_reduce, "shm", MB_100, 4)["of_limit"], 0.75),
        *_rounds(push_pull),
        *(_between_hosts(*between_hosts) if between_hosts else ["-"] * 4),
        _at_most(_over(all_reduce, "tcp", "loopback-limit", SIZES["4 KiB"], 2), 2.5),
    ]


def _row(results: Results, backend: str, size: int, nranks: int = 4) -> dict[str, Any]:
    return sweep_row(results, backend, nranks, size)


def _over(results: Results, one: str, other: str, size: int, nranks: int = 4) -> float:
    """One's time over the other's."""
    return float(_row(results, one, size, nranks)["time_ms"] / _row(results, other, size, nranks)["time_ms"])


def _over_mpi(results: Results, ours: str, nranks: int, wanted: list[float]) -> str:
    ratios = {name: _over(results, "mpi", ours, size, nranks) for name, size in SIZES.items()}
    missed = [name for (name, ratio), least in zip(ratios.items(), wanted, strict=True) if ratio < least]
    enough = ours == "shm" and _row(results, ours, MB_100, nranks)["of_limit"] >= OR_OF_LIMIT[nranks]
    missed = [name for name in missed if name != "100 MB" or not enough]
    shown = ", ".join(f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}" for ratio in ratios.values())
    return f"{shown}: not {', '.join(missed)}" if missed else shown


def _rounds(results: Results) -> list[str]:
    memory = _row(results, "ps-tcp", MB_100)["server_memory"]
    return [
        _at_least(_row(results, "ps-shm", MB_100)["of_limit"], 0.80),
        _at_most(_over(results, "ps-shm-copied", "memcpy", MB_100), 8),
        _at_most(_over(results, "ps-tcp", "memcpy", MB_100), 25),
        _met(f"{memory['pss']:.0f} MB", met=memory["pss"] <= memory["limit"]),
    ]


def _between_hosts(one_server: Results, beside: Results, apart: Results) -> list[str]:
    size = 50_000_000
    lead = _over(apart, "tcp-sgd", "ps-tcp", size)
    return [
        _at_least(_row(one_server, "ps-tcp", size)["of_limit"], 0.92),
        _at_most(_over(beside, "ps-tcp", "tcp-sgd", size), 1.10),
        _at_least(_row(apart, "ps-tcp", size)["of_limit"], 0.85),
        _met(f"{lead:.2f}", met=lead > 1),
    ]


def _at_least(share: float, least: float) -> str:
    return _met(f"{share:.0%}".replace("%", " %"), met=share >= least)


def _at_most(ratio: float, most: float) -> str:
    return _met(f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}", met=ratio <= most)


def _met(shown: str, *, met: bool) -> str:
    return shown if met else f"{shown}: not met"
