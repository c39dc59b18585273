"""Results of `python -m benchmarks crossover` as it would write them."""

from __future__ import annotations

from typing import Any

from benchmarks.netlab.config import ClusterConfig
from benchmarks.operations import link_settings as settings
from benchmarks.operations.link_settings import Scheme
from benchmarks.records.result_files import plain
from tests.support.typed_results import completed

__all__ = ["MB", "cell", "made", "results_of", "sample"]

MB = 10**6


def cell(*measured: Any) -> dict[str, Any]:
    """As it stands in crossover.json."""
    return plain(settings.cell(*measured))


def made(
    link: str,
    servers: int,
    nbytes: int,
    ring: float,
    ps: float,
    *,
    nranks: int = 4,
    apart: bool = False,
    spread: float = 0.01,
) -> Any:
    times = [[time * (1 - spread), time, time * (1 + spread)] for time in (ring, ps)]
    cluster = ClusterConfig(hosts=nranks, link=link)
    rate = 0.95 * cluster.links()[0]
    return cell(cluster, nranks, Scheme(servers, apart), nbytes, [rate, rate], *times)


def results_of(*cells: Any, repetitions: int = 3) -> dict[str, Any]:
    machine = {"cpu": "<b>CPU</b>", "cores": 2, "memory_bytes": 8 * 10**9, "memcpy_gb_per_s": 8.0, "noise": 0.03}
    return completed(
        {
            "schema": 1,
            "kind": "crossover",
            "created": "2026-11-21T08:30:00+00:00",
            "command": "python -m benchmarks crossover",
            "environment": {**machine, "kernel": "6", "python": "3.11", "versions": {"numpy": "2"}, "commit": None},
            "congestion_control": "cubic",
            "repetitions": repetitions,
            "interrupted": False,
            "cells": list(cells),
        },
        "crossover",
    )


def sample() -> dict[str, Any]:
    """Either wins somewhere; one tie; and the fastest link is not what limits."""
    return results_of(
        made("100mbit", 1, 25 * MB, 3.3, 12.9),
        made("1gbit", 1, 25 * MB, 0.35, 1.4),
        made("10gbit", 1, 25 * MB, 0.3, 0.45),
        made("100mbit", 4, MB, 0.130, 0.131),
        made("1gbit", 4, MB, 0.015, 0.018),
        made("10gbit", 4, MB, 0.010, 0.014),
        made("100mbit", 4, 25 * MB, 3.3, 3.0),
        made("1gbit", 4, 25 * MB, 0.35, 0.3),
        made("10gbit", 4, 25 * MB, 0.3, 0.45),
    )
