"""Puts the parts of a trace on one clock and writes them as Chrome's trace events, which ui.perfetto.dev reads.

The parts are those of common/sync/trace.py; tracing.py gathers them.

Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

A process of the trace is a rank or a server; its tracks hold spans that follow or contain one another:

    rank    steps       step N > input, forward, backward, wait (for slower ranks), sync > update
            bucket B    ready -> started, started -> reduced         ring
                        ready -> sent, sent -> received              parameter servers
    server  updates     reduce bucket B, update
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from common import __version__
from common.sync.trace import FINISH, Part
from common.system.atomic_file import write_file
from common.system.lateness import Lateness

__all__ = ["save_trace", "to_chrome", "write_trace"]

Event = dict[str, Any]
STEPS, BUCKETS = 0, 1  # tracks: of the steps, and of the first bucket


def save_trace(file: Path, parts: Sequence[Part]) -> None:
    """Write the file, and say so with the table of stragglers; nothing of no parts."""
    if parts:
        print_summary(file, write_trace(file, parts))


def write_trace(file: Path, parts: Sequence[Part]) -> dict[str, Any]:
    """Write the file; returns what it is about."""
    trace = to_chrome(parts)
    write_file(file, json.dumps(trace, separators=(",", ":"), ensure_ascii=False))
    about: dict[str, Any] = trace["otherData"]
    return about


def to_chrome(parts: Sequence[Part]) -> dict[str, Any]:
    """The file's content: times in microseconds from the first event on; what it is about under "otherData"."""
    first_step = max(part["first_step"] for part in parts)
    parties = [Party(part, first_step) for part in parts]
    ranks = {p.index: p for p in parties if p.kind == "rank"}
    servers = {p.index: p for p in parties if p.kind == "server"}
    of = parts[0]["of"] if ranks else {}
    nranks, nservers, late = of.get("nranks", 0), of.get("servers", 0), of.get("staleness")
    begin = min((e.begin for p in parties for e in p.events), default=0)
    events: list[Event] = []
    for rank, party in sorted(ranks.items()):
        page = Page(rank, f"rank {rank}", begin)
        write_steps(page, party, ranks, late)
        write_buckets(page, party)
        events += page.events
    for server, party in sorted(servers.items()):
        page = Page(nranks + server, f"server {server}", begin)
        page.name_track(STEPS, "updates")
        for e in party.events:
            page.add(STEPS, "server", f"{e.name} bucket {e.bucket}" if e.bucket >= 0 else e.name, e, e.begin, e.end)
        events += page.events
    missing = [f"rank {r}" for r in range(nranks) if r not in ranks]
    missing += [f"server {s}" for s in range(nservers) if s not in servers]
    about = {
        "gradsync": __version__,
        **of,
        "first_step": first_step,
        "missing": missing,  # processes that left no part: killed, or out of reach
        "clocks": [party.clock for party in parties],
        "stragglers": stragglers(ranks, nranks) if late is not None else [],
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


@dataclass(frozen=True)
class Timed:
    """An event on rank 0's clock, ns; bucket -1: of the step as a whole."""

    begin: int
    end: int
    name: str
    step: int
    bucket: int


class Party:
    """One process's part."""

    def __init__(self, part: Part, first_step: int) -> None:
        self.kind, self.index, self.buckets = part["kind"], part["index"], part["buckets"]
        self._readings = part["readings"] or [[0, 0, 0]]
        self._host = part["host"]
        kept = [e for e in part["events"] if e[3] >= first_step]
        times = np.array([e[:2] for e in kept], np.int64).reshape(-1, 2)
        at, offset, _ = np.array(self._readings, np.int64).T
        times -= np.interp(times, at, offset).astype(np.int64)  # between two readings clocks drift evenly
        self.events = [Timed(begin, end, *e[2:]) for (begin, end), e in zip(times.tolist(), kept, strict=True)]

    @property
    def clock(self) -> Mapping[str, Any]:
        """By how much it was ahead of rank 0's, at the first and the last comparison, give or take the uncertainty."""
        return {
            "process": f"{self.kind} {self.index}",
            "host": self._host,
            "offset_ms": [offset / 1e6 for _, offset, _ in self._readings],
            "uncertainty_ms": [uncertainty / 1e6 for _, _, uncertainty in self._readings],
        }

    @cached_property
    def by_step(self) -> dict[int, list[Timed]]:
        """What concerns steps as a whole."""
        found = defaultdict(list)
        for event in self.events:
            if event.bucket < 0:
                found[event.step].append(event)
        return found

    @cached_property
    def finish(self) -> dict[int, Timed]:
        return {event.step: event for event in self.events if event.name == FINISH}

    @cached_property
    def moments(self) -> dict[tuple[int, int], dict[str, int]]:
        """Of each step and bucket, in order. A bucket that was not told to be ready is so when backward is done."""
        found: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
        for e in self.events:
            if e.bucket >= 0:
                names = ("started", "reduced") if e.name == "reduce" else (e.name,)
                for name, at in zip(names, (e.begin, e.end), strict=False):
                    found[e.step, e.bucket].setdefault(name, at)  # to the first of several servers
        for (step, _), times in found.items():
            if step in self.finish:
                times.setdefault("ready", self.finish[step].begin)
            received = [e.end for e in self.by_step[step] if e.name == "received"]
            if received and "sent" in times:
                times["received"] = received[0]
        return {key: dict(sorted(times.items(), key=lambda item: item[1])) for key, times in found.items()}


class Page:
    """The events of one process of the trace."""

    def __init__(self, pid: int, name: str, begin: int) -> None:
        self.pid, self._begin = pid, begin
        self.events: list[Event] = []
        self._tell("process_name", 0, name=name)
        self._tell("process_sort_index", 0, sort_index=pid)

    def name_track(self, tid: int, name: str) -> None:
        self._tell("thread_name", tid, name=name)
        self._tell("thread_sort_index", tid, sort_index=tid)

    def add(self, tid: int, category: str, name: str, of: Timed, begin: int, end: int) -> None:
        """A span from `begin` to `end`, ns, of what belongs to the step and bucket of another one."""
        args = {"step": of.step, **({"bucket": of.bucket} if of.bucket >= 0 else {})}
        times = {"ts": (begin - self._begin) / 1e3, "dur": (end - begin) / 1e3}
        self.events.append(
            {"name": name, "cat": category, "ph": "X", **times, "pid": self.pid, "tid": tid, "args": args}
        )

    def _tell(self, what: str, tid: int, **args: Any) -> None:
        self.events.append({"name": what, "ph": "M", "ts": 0, "pid": self.pid, "tid": tid, "args": args})


def write_steps(page: Page, party: Party, ranks: Mapping[int, Party], late: int | None) -> None:
    page.name_track(STEPS, "steps")
    for step, events in sorted(party.by_step.items()):
        whole = [e for e in events if e.name != "received"]
        if whole:
            page.add(STEPS, "step", f"step {step}", whole[0], min(e.begin for e in whole), max(e.end for e in whole))
        updates = [e.begin for e in whole if e.name == "update"]
        for e in whole:
            if e.name != FINISH:
                page.add(STEPS, "phase", e.name, e, e.begin, e.end)
                continue
            ready = all_ready(ranks, step, late)
            waited = min(max(ready, e.begin), *updates, e.end)
            page.add(STEPS, "phase", "wait", e, e.begin, waited)
            page.add(STEPS, "phase", "sync", e, waited, e.end)


def all_ready(ranks: Mapping[int, Party], step: int, late: int | None) -> int:
    """When all ranks had made the step without which this one cannot end, 0 if there is none; never if some has not."""
    if late is None or step < late:
        return 0
    made = [party.finish.get(step - late) for party in ranks.values()]
    return max((1 << 63 if event is None else event.begin for event in made), default=0)


def write_buckets(page: Page, party: Party) -> None:
    for bucket in sorted({bucket for _, bucket in party.moments}):
        size = f" ({party.buckets[bucket] / 1e6:,.2f} MB)" if bucket < len(party.buckets) else ""
        page.name_track(BUCKETS + bucket, f"bucket {bucket}{size}")
    for (step, bucket), times in sorted(party.moments.items()):
        of, moments = Timed(0, 0, "", step, bucket), list(times.items())
        for (name, begin), (following, end) in pairwise(moments):
            page.add(BUCKETS + bucket, "bucket", f"{name} → {following}", of, begin, end)


def stragglers(ranks: Mapping[int, Party], nranks: int) -> list[dict[str, Any]]:
    """Of each rank: in which share of the buckets it was the last to have it ready, and how long after the first."""
    if len(ranks) < max(2, nranks):
        return []
    lateness = Lateness(nranks)
    for times in ready_times(ranks):
        order = sorted(times, key=lambda rank: times[rank])
        for rank in order:
            lateness.arrived(rank, times[rank] / 1e9, last=rank == order[-1])
    return [
        {
            "rank": rank,
            "last": lateness.share_last(rank),
            "median_ms": 1e3 * lateness.lag(rank),
            "max_ms": 1e3 * lateness.longest(rank),
        }
        for rank in sorted(ranks)
    ]


def ready_times(ranks: Mapping[int, Party]) -> Iterator[dict[int, int]]:
    """By rank, when each bucket of each step was ready, ns, of those that were on all ranks."""
    for key in ranks[0].moments:
        times = {rank: party.moments.get(key, {}).get("ready") for rank, party in ranks.items()}
        found = {rank: at for rank, at in times.items() if at is not None}
        if len(found) == len(ranks):
            yield found


def print_summary(file: Path, about: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    missing = f", without {', '.join(about['missing'])}" if about["missing"] else ""
    again = about.get("restarts", 0)
    since = f", since restart {again}" if again else ""  # what was recorded before is lost with its processes
    console.print(f"trace: {file}{since}{missing} (open it at ui.perfetto.dev)")
    if about["stragglers"]:
        table = Table("rank", "last in", "lag ms", "max ms", box=None, pad_edge=False, header_style="bold")
        for each in about["stragglers"]:
            figures = (f"{each['last']:.0%}", f"{each['median_ms']:.1f}", f"{each['max_ms']:.1f}")
            table.add_row(str(each["rank"]), *figures)
        console.print("when buckets were ready, after the first rank's:", table, sep="\n")
