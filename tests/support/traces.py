"""What must hold of every trace: its form, that spans nest, and that what causes comes before what is caused."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

__all__ = ["check_causes", "check_trace", "moments", "read_trace", "spans"]

ROUNDING_US = 0.002
PHASES = {"wait", "sync"}


def read_trace(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def spans(trace: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """The spans with these values, of fields or arguments."""
    found = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    return [e for e in found if all({**e, **e["args"]}.get(key) == value for key, value in wanted.items())]


def check_trace(
    trace: dict[str, Any],
    *,
    nranks: int,
    servers: int = 0,
    steps: range,
    buckets: int,
    phases: frozenset[str] = frozenset(),
    missing: tuple[str, ...] = (),
) -> None:
    """Form, nesting, and that every process, step, bucket and phase is there."""
    for event in trace["traceEvents"]:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys()
        assert event["ph"] in "XM"
        assert event["ts"] >= 0
        assert event["ph"] == "M" or event["dur"] >= 0
    named = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    everybody = {r: f"rank {r}" for r in range(nranks)} | {nranks + s: f"server {s}" for s in range(servers)}
    assert named == {pid: name for pid, name in everybody.items() if name not in missing}
    assert trace["otherData"]["missing"] == list(missing)
    for track in by_track(trace).values():
        check_nesting(track)
    for pid in [pid for pid in named if pid < nranks]:
        assert [e["args"]["step"] for e in spans(trace, pid=pid, cat="step")] == list(steps)
        for step in steps:
            assert {e["name"] for e in spans(trace, pid=pid, cat="phase", step=step)} >= PHASES | phases
            assert {e["args"]["bucket"] for e in spans(trace, pid=pid, cat="bucket", step=step)} >= set(range(buckets))


def by_track(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    tracks = defaultdict(list)
    for event in spans(trace):
        tracks[event["pid"], event["tid"]].append(event)
    return tracks


def check_nesting(track: list[dict[str, Any]]) -> None:
    """Two spans of a track follow each other, or one contains the other."""
    open_until: list[float] = []
    for event in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
        while open_until and open_until[-1] <= event["ts"] + ROUNDING_US:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1] + ROUNDING_US, event
        open_until.append(end)


def moments(trace: dict[str, Any], pid: int, step: int, bucket: int) -> dict[str, float]:
    """Of a bucket on a rank, in order."""
    found: dict[str, float] = {}
    for event in spans(trace, pid=pid, cat="bucket", step=step, bucket=bucket):
        first, following = event["name"].split(" → ")
        assert first not in found or abs(found[first] - event["ts"]) < ROUNDING_US
        found |= {first: event["ts"], following: event["ts"] + event["dur"]}
    return found


def check_causes(
    trace: dict[str, Any], *, nranks: int, steps: range, buckets: int, slack_us: float = ROUNDING_US
) -> None:
    """The order of a bucket's moments over all processes, of ranks in step."""
    servers = sorted({e["pid"] for e in spans(trace, cat="server")})
    for step in steps:
        for bucket in range(buckets):
            times = [moments(trace, rank, step, bucket) for rank in range(nranks)]
            if servers:
                assert all(list(t) == ["ready", "sent", "received"] for t in times), times
                check_servers(trace, servers, times, step, bucket, slack_us)
            else:
                assert all(list(t) == ["ready", "started", "reduced"] for t in times), times
                assert max(t["started"] for t in times) <= min(t["reduced"] for t in times) + slack_us


def check_servers(
    trace: dict[str, Any], servers: list[int], times: list[dict[str, float]], step: int, bucket: int, slack_us: float
) -> None:
    holders = 0
    for pid in servers:
        reductions = spans(trace, pid=pid, name=f"reduce bucket {bucket}", step=step)
        if reductions:  # its shard has a part of the bucket
            (reduction,), updates = reductions, spans(trace, pid=pid, name="update", step=step)
            assert max(t["sent"] for t in times) <= reduction["ts"] + slack_us
            assert reduction["ts"] + reduction["dur"] <= max(u["ts"] + u["dur"] for u in updates) + slack_us
            assert max(u["ts"] + u["dur"] for u in updates) <= min(t["received"] for t in times) + slack_us
            holders += 1
    assert holders
