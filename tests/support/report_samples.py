"""Results of every kind, good and bad, whose reports together say every sentence that there is."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from tests.support import compare_samples as compare
from tests.support import crossover_samples as crossover
from tests.support import fault_samples as faults
from tests.support import sweep_samples as sweep
from tests.support.compare_samples import a_run
from tests.support.crossover_samples import MB, made
from tests.support.sweep_samples import row_of
from tests.support.typed_results import completed
from tests.unit.benchmarks import test_accuracy_report as accuracy
from tests.unit.benchmarks import test_suite_report as suite

__all__ = ["every_job", "every_sample"]

Results = dict[str, Any]
EVERY_REASON = (
    "not run",
    "interrupted",
    "interrupted after 3 of 7 rounds",
    "it took longer than 0.5 minutes (limit)",
    "it took longer than 0.5 minutes (limit) after 3 of 7 rounds",
    "it ended well but left no results",
    "Fleet is not installed; use a checkout of GradSync",
    "NCCL through cupy needs cupy, which is not installed; pip",
    "torch is not installed (pip)",
    "there is no mpi (pip).",
    "PyTorch has no optimizer that computes what Paddle's adam does",
    "the model mnist-cnn has not been rebuilt in PyTorch",
    "PyTorch sees no GPU (install one built for CUDA)",
    "one GPU, which NCCL (2, 21) lets no ranks share (install NCCL >= 2.30)",
    "emulated hosts need ip and tc (pip)",
    "emulated hosts need tc (pip)",
    "emulated hosts need root, for network namespaces: run as root (sudo)",
    "the program ran longer than 5 s (--run-timeout)",
    "the program ended early on rank 1, 2, without an error",
    "ranks ended with different parameters",
    "the program ended well, but gave no model to paddle.DataParallel or fleet.distributed_model, so there is "
    "nothing to compare; wrap the model that it trains in one of them",
    "3 backwards leave no step to time after --warmup-steps 2",
    "exit code 1: ps",
    "exit code 1, without naming an error; its last lines are in gloo",
    "exit code 1, without a word",
)
CLUSTER = {"words": "4 hosts, 1gbit, 0.5ms late, host 2 3x slower, 1 core each", "links_bytes_per_s": [125e6, 60e6]}


def every_sample() -> Iterator[tuple[str, Results]]:
    """Of one file each; all names in them are of letters that stay as they are in any language."""
    for kind in (comparisons, programs, sweeps, maps, accuracies, mishaps):
        for number, results in enumerate(kind()):
            yield f"{kind.__name__}-{number}", results


def mishaps() -> Iterator[Results]:
    yield from (faults.matrix(), faults.kills(), faults.soak(), large_groups(), public_programs())


def public_programs() -> Results:
    """One of each end."""
    ends = [{"how": how} for how in ("same bits", "same output", "ok", "other output", "not run")]
    ends += [{"how": "differs", "distance": 0.5}, {"how": "failed", "error": "x"}]
    made = [{"name": "x", "settings": "", "paddle": {"how": "ok"}, "collective": end, "ps": end} for end in ends]
    return completed({"kind": "programs", "nranks": 2, "programs": made, "skipped": {"x": "x"}})


def large_groups() -> Results:
    held = {"sockets": [3, 4, 5], "descriptors": [6, 7, 8], "threads": [3, 4, 9]}
    groups = [{"nranks": 20, "backend": "shm", "complete_s": 1.5, "named": 19, "named_s": 0.5, **held}]
    fields = ("nranks", "joins", "reply_bytes", "connections_shm", "connections_tcp", "all_with_all", "steps")
    return completed({"kind": "scale", "groups": groups, "at_start": [{**dict.fromkeys(fields, 7), "passed_on": 2}]})


def every_job() -> Iterator[Results]:
    """Whole jobs: with a verdict for each outcome."""
    fast, slow = a_run("ring/shm N=2", 1000), a_run("ps/shm N=2", 1100)
    other = compare.results_of(fast, slow)
    tied = compare.results_of(a_run("ps/shm N=2", 1001), fast)
    parts = {
        "A": suite.a_compare(),
        "B": suite.a_script(),
        "C": {**sweep.sample(), "absent": {}},
        "D": crossover.sample(),
        "E": accuracy.results_of(),
    }
    whole = titled(*(suite.a_part(name, results) for name, results in parts.items()))
    whole["parts"][0]["title"] = "MLP of 25 million parameters"
    yield {**whole, "title": "GradSync on this machine: a quick comparison"}
    statuses = {"A": "failed", "B": "absent", "C": "missing"}
    bad = [suite.a_part(name, None, status, "not run") for name, status in statuses.items()]
    bad.append(suite.a_part("D", failed_comparison(), "wrong", "interrupted"))
    bad.append(suite.a_part("E", suite.a_compare(), "incomplete", "interrupted after 3 of 7 rounds"))
    yield {**titled(*bad), "synthetic": True}
    yield titled(suite.a_part("A", suite.a_compare()), suite.a_part("B", other))
    yield titled(suite.a_part("A", tied))
    yield titled(suite.a_part("A", once(suite.a_compare())), suite.a_part("B", once(suite.a_script())))
    near = suite.a_script()
    near["runs"][2].update(step_ms=101, step_ms_interval=[96, 106])
    twice = deepcopy(suite.a_compare())
    for run in twice["runs"]:
        run["repetitions"] = 2
        if run["nranks"] == 1:
            run["samples_per_s_interval"] = [1, 10_000]
    clear = compare.results_of(a_run("ring/shm N=2", 1100), a_run("ps/shm N=2", 1000))
    more = compare.results_of(a_run("ring/shm N=2", 1200), a_run("ps/shm N=2", 1000))
    found = {"A": twice, "B": near, "C": clear, "D": more}
    yield titled(*(suite.a_part(name, results) for name, results in found.items()))


def titled(*parts: dict[str, Any]) -> Results:
    return {**suite.a_suite(*parts), "title": "T"}


def once(results: Results) -> Results:
    for run in results["runs"]:
        run["repetitions"] = 1
    return results


def failed_comparison() -> Results:
    """One differs from the rest, and another one from its own other ranks."""
    results = suite.a_compare()
    results["certificate"].update(identical=False, passed=False)
    results["certificate"]["schemes"]["ring/shm N=2"] = "f" * 64
    found = {"contestant": "ring/shm N=2", "reference": "ps/shm N=2", "bucket": 1, "parameter": "p", "max_abs": 3.1e-5}
    results["certificate"]["differences"] = [
        found,
        {**found, "reference": "its own rank 0 (rank 1 differs)", "bucket": None, "parameter": None, "max_abs": None},
    ]
    return results


def comparisons() -> Iterator[Results]:
    whole = suite.a_compare()
    for run in whole["runs"]:
        run["least_sync_ms"] = 0.5 if run["nranks"] == 2 else 90.0
    free = {**a_run("ps/shm N=2 async", 9000), "mode": "async", "least_sync_ms": 0.0}
    near = {**a_run("ring/tcp N=2", 1835), "least_sync_ms": 0.0}
    peer = {**a_run("paddle N=2", 900), "least_sync_ms": 0.0}
    whole["runs"] += [free, near, peer]
    whole["certificate"]["schemes"] |= {run["contestant"]: "e" * 64 for run in (free, peer)}
    whole["certificate"]["schemes"][near["contestant"]] = compare.digest_of(2)
    whole["certificate"]["groups"][1]["contestants"].append(near["contestant"])
    whole["certificate"]["other_order"] = [free["contestant"]]
    about = {"contestant": "paddle N=2", "reference": "ps/shm N=2"}
    whole["certificate"]["peers"] = [{**about, "difference": 2e-7, "bound": 1e-4, "within": True}]
    yield {**compare.strong(), "missing": {"torch-ddp": "PyTorch is not installed (pip)"}}
    whole["cluster"] = {**CLUSTER, "stream_bytes_per_s": 55e6}
    whole["missing"] = {"paddle": "gloo"}
    yield whole
    yield once(compare.results_of(a_run("ps/shm N=2", 900), a_run("ring/shm N=2", 1000)))
    yield compare.results_of(a_run("ps/shm N=2", 900))
    yield once(compare.results_of(a_run("ps/shm N=2", 900)))
    yield compare.results_of()
    yield failed_comparison()
    unnamed = suite.a_compare()
    unnamed["certificate"]["identical"] = False
    yield unnamed
    far = suite.a_compare()
    far["certificate"]["passed"] = far["certificate"]["groups"][1]["whole_batch"]["within"] = False
    yield far
    multiplied = suite.a_compare()
    multiplied["certificate"]["groups"][1]["whole_batch"]["first_gradient"] = {"difference": 3e-7, "bound": 1e-5}
    yield multiplied


def programs() -> Iterator[Results]:
    def changed(change: Callable[[Results], object]) -> Results:
        results = suite.a_script()
        change(results)
        return results

    yield suite.a_script()
    four = {**suite.a_script()["runs"][0], "contestant": "ps/shm N=4", "nranks": 4}
    yield changed(lambda results: results["runs"].append(four))
    yield changed(lambda results: results["runs"].pop(0))  # whom no other comes near is the fastest
    yield changed(once)
    yield changed(lambda results: results["runs"].pop())
    for count in (3, 7):
        yield changed(lambda results, count=count: suite.make_busy(results, count))
    yield changed(lambda results: results["runs"][0].update(steps=32))
    yield changed(lambda results: results["certificate"].update(identical=False, passed=False))
    apart = {"paddle N=2": {"5": 1e-7, "20": 0.5}}
    yield changed(lambda results: results["certificate"].update(passed=False, against_paddle=apart))
    yardsticks = {"paddle N=2": {steps: {"distance": 2e-3, "bound": 2e-2} for steps in ("5", "20")}}
    yield changed(lambda results: results["certificate"].update(against_paddle=apart, yardsticks=yardsticks))
    yield changed(lambda results: results["certificate"].update(against_paddle=apart, own_kernels=list(apart)))
    alone = changed(lambda results: results["certificate"].update(ours=["ps/shm N=2"], against_paddle={}))
    yield changed(lambda results: results["certificate"].update(ours=["ps/shm N=2"]))
    yield changed(lambda results: results["certificate"].update(ours=["ps/shm N=2"], passed=False))
    yield suite.all_failed()
    yield {**alone, "runs": alone["runs"][:1], "failed": {"ring/shm N=2": {"reason": "gloo", "output": []}}}


def sweeps() -> Iterator[Results]:
    absent = dict(zip(string.ascii_uppercase, EVERY_REASON, strict=False))
    waiting = [{"backend": "shm", "nranks": 4, "late_s": 2.0, "core": 0.002}]
    plain = {**sweep.sample(), "absent": absent, "failed": {"ray": "gloo"}, "waiting": waiting}
    yield plain
    pushed = deepcopy({**plain, "op": "push_pull", "cluster": CLUSTER})
    pushed["rows"][0]["server_memory"] = {"pss": 500.0, "own": 200.0, "limit": 300.0}
    yield pushed
    yield {**plain, "op": "broadcast"}
    yield {
        **sweep.results_of(row_of("shm", 4, 4096, [2e-4], 0, 9e-5), row_of("gloo", 4, 4096, [1e-4], 0, None)),
        "absent": {},
    }
    wrong = deepcopy(plain)
    wrong["rows"][0]["wrong"] = 3
    yield wrong
    yield {**sweep.results_of(row_of("shm", 4, 10**8, [0.1], 0, 0.1)), "absent": {}}
    yield {**sweep.over_tls(), "absent": {}}


def maps() -> Iterator[Results]:
    yield crossover.sample()
    yield crossover.results_of(made("1gbit", 1, MB, 1, 2), repetitions=1)
    links = ("100mbit", "200mbit", "400mbit", "1gbit", "10gbit")
    rings = (2.0, 1.0, 1.0, 2.0, 1.0)
    cells = [made(link, 2, MB, ring, 1.4) for link, ring in zip(links, rings, strict=True)]
    cells += [made("1gbit", 4, MB, 1.0, 1.0), made("10gbit", 4, 25 * MB, 1.0, 2.0), made("1gbit", 4, 25 * MB, 1, 2)]
    cells[-1]["stream_bytes_per_s"] /= 2
    cells += [made("1gbit", 1, size, 1.0, 1.0) for size in (MB, 2 * MB)]
    cells += [made("100mbit", 1, 2 * MB, 1.0, 2.0)]
    cells += [made("1gbit", servers, 50 * MB, 0.7, 2.0, apart=True) for servers in (1, 4)]
    yield {**crossover.results_of(*cells), "interrupted": True}


def accuracies() -> Iterator[Results]:
    yield accuracy.results_of()
    missed = accuracy.results_of()
    accuracy.never(missed, "ps/shm N=2", "none", 1, 2, 3)
    accuracy.never(missed, "ring/shm N=2", "none", 1, 2)
    for name in accuracy.PACE:
        accuracy.never(missed, name, "random", 1, 2, 3)
    for run in missed["runs"]:
        if run["straggler"] == "permanent" and run["contestant"] == "ps/shm N=2":
            run["target_s"] = 10.1
    accuracy.never(missed, "ps/shm N=2 async", "permanent", 1)
    yield missed
    yield accuracy.results_of((1,))
