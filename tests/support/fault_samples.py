"""Results of `python -m benchmarks faults` as it would write them."""

from __future__ import annotations

from typing import Any

from tests.support.typed_results import completed

__all__ = ["kills", "matrix", "results_of", "soak"]


def results_of(*outcomes: dict[str, Any]) -> dict[str, Any]:
    found = [
        {"promise": "the bits of an undisturbed job", "times": 3, "kept": 3, "row": 1, **each} for each in outcomes
    ]
    return completed({"kind": "faults", "outcomes": found})


def matrix() -> dict[str, Any]:
    """Cases of each kind, one that was broken and one that could not be tried."""
    hubs = ("rank", "server", "rank where all met")
    names = [f"kill -9 of {'a' if hub == 'rank' else 'the'} {hub}" for hub in hubs]
    names += [f"{'a' if hub == 'rank' else 'the'} {hub} frozen{long}" for hub in hubs for long in ("", " for 0.5 s")]
    cuts = ("cut", "that carries nothing to the others", "that carries nothing from the others")
    names += [f"a link {cut}{long}" for cut in cuts for long in ("", " for 0.5 s")]
    names += [f"5 % of the packets {what}" for what in ("lost", "twice", "late, behind later ones")]
    names += [f"a message {fate}" for fate in ("lost", "doubled", "overtaken", "delayed", "of an old epoch")]
    names += ["bits flip, over TLS", "bits flip, with --insecure"]
    made = [{"name": name, "scheme": "ps", "backend": "tcp", "detection_s": [0.25, 0.5, 1.0]} for name in names]
    made[0] |= {"promise": "PeerLost within 1 s"}
    made[1] |= {"promise": "the bits of an undisturbed run", "kept": 2, "why_not": "x"}
    made[2] |= {"scheme": "ring"}
    made[-2] |= {"promise": "a named error"}
    made[-1] |= {"promise": "the bits of an undisturbed run, or a named error"}
    why = "emulated hosts need root, for network namespaces: run as root (sudo)"
    made.append({"name": "a link cut", "scheme": "ring", "backend": "tcp", "times": 0, "kept": 0, "skipped": why})
    promise = "each message once, and the bits of an undisturbed run"
    made.append({"name": "5 seeds", "scheme": "", "backend": "", "row": 21, "promise": promise})
    promise = "the bits of an undisturbed job, or RecoveryFailed once restarts are used up"
    made.append({"name": "5 seeds", "scheme": "ring", "backend": "simulated", "row": 21, "promise": promise})
    return results_of(*made)


def kills() -> dict[str, Any]:
    """Random ones under both schemes."""
    two = [{"whole_s": 2.0, "starting_s": 1.5}, {"whole_s": 4.0, "starting_s": 3.0}]
    three = [*two, {"whole_s": 9.0, "starting_s": 1.0}]
    return results_of(
        {"name": "random kills, 2 ranks", "scheme": "ps", "backend": "shm+tcp", "recoveries": two},
        {"name": "random kills, 4 ranks", "scheme": "ring", "backend": "shm+tcp", "recoveries": three},
    )


def soak() -> dict[str, Any]:
    promise = "the bits of an undisturbed job, and no process grows"
    names = ("launcher", "server 0", "rank 0")
    usage = [[{"who": w, "memory_mb": m, "descriptors": 5, "threads": 2} for w in names] for m in (30.0, 31.0)]
    return results_of(
        {"name": "10,000 steps, 19 kills", "scheme": "ps", "backend": "shm", "promise": promise, "usage": usage}
    )
