"""Results of a comparison as a run would have written them, and a page's parser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

from tests.support.typed_results import completed

__all__ = ["Page", "Results", "a_run", "digest_of", "results_of", "strong"]

Results = dict[str, Any]


def a_run(contestant: str, rate: float, *, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    nranks = int(re.search(r"N=(\d+)", contestant)[1])  # type: ignore[index]
    scheme = re.split(r"[ /]", contestant)[0]
    return {
        "contestant": contestant,
        "scheme": scheme,
        "nranks": nranks,
        "model": "mnist-cnn",
        "dataset": "digits",
        "batch_size": 32,
        "optimizer": "adam",
        "learning_rate": 0.001,
        "seed": 1,
        "steps": 60,
        "warmup_steps": 5,
        "samples_per_s": rate,
        "samples_per_s_interval": [low or rate - 5, high or rate + 5],
        "repetitions": 3,
        "step_ms": {"p50": 33.1, "p99": 40.2},
        "sync_ms": {"p50": 0.7, "p99": 1.9},
        "wait_ms": {"p50": 0.4, "p99": 3.0},
        "phases_ms": {"input": 0.3, "forward": 12.0, "backward": 19.5, "wait": 0.4, "sync": 0.7},
        "loss": {"first": 2.3, "last": 0.4},
        "accuracy": 0.93 if scheme != "local" else None,
        "curve": [[0.0, 2.3], [0.03, 2.1]],
    }


def results_of(*runs: dict[str, Any]) -> Results:
    sizes = sorted({run["nranks"] for run in runs})
    names = {nranks: [run["contestant"] for run in runs if run["nranks"] == nranks] for nranks in sizes}
    check = {"difference": 1.2e-7, "bound": 1e-3, "within": True}
    return completed(
        {
            "schema": 1,
            "created": "2026-11-21T08:30:00+00:00",
            "command": "python -m benchmarks compare",
            "environment": {
                "cpu": "AMD EPYC",
                "cores": 2,
                "memory_bytes": 25_000_000_000,
                "memcpy_gb_per_s": 8.1,
                "kernel": "6.18",
                "python": "3.11.7",
                "versions": {"numpy": "2.4.6"},
                "commit": None,
                "noise": 0.03,
            },
            "certificate": {
                "identical": True,
                "passed": True,
                "steps": 5,
                "schemes": {run["contestant"]: digest_of(run["nranks"]) for run in runs},
                "groups": [
                    {
                        "nranks": nranks,
                        "identical": True,
                        "contestants": names[nranks],
                        "sha256": digest_of(nranks),
                        "whole_batch": check if nranks > 1 else None,
                    }
                    for nranks in sizes
                ],
                "differences": [],
            },
            "runs": list(runs),
            "missing": {},
        },
        "compare",
    )


def strong() -> Results:
    """One batch of 64 shared by the ranks, and two other libraries within the bound."""
    results = results_of(a_run("local N=1", 1000), a_run("ps/shm N=2", 1500), a_run("ring/shm N=2", 1600))
    peers = [a_run(name, rate) for name, rate in (("paddle N=2", 1200), ("torch-ddp N=2", 1300))]
    results["runs"] += peers
    for run in results["runs"]:
        run["batch_size"] = 64 // run["nranks"]
    results["certificate"]["schemes"] |= {peer["contestant"]: "e" * 64 for peer in peers}
    near = {"reference": "ps/shm N=2", "difference": 2e-7, "bound": 1e-4, "within": True}
    results["certificate"]["peers"] = [{"contestant": peer["contestant"], **near} for peer in peers]
    return {**results, "scaling": "strong"}


def digest_of(nranks: int) -> str:
    return f"{nranks:x}" * 64


class Page(HTMLParser):
    """What a browser would make of a page: its elements, its texts, what it links to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "line"):
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "data", "action", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open[-1:] == ["script"] else self.texts).append(data)
