"""Every figure and table that the pages quote, computed from the committed results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.reports.runs import milliseconds
from benchmarks.stats.interval import measured
from docs.tools.kills import random_kills, soak
from docs.tools.programs import ends, sums
from docs.tools.results import SIZES, MapCell, crossover, over_seeds, part, read, step_ms, sweep_row
from docs.tools.targets import targets

__all__ = ["CELLS", "FIGURES", "LINKS", "MODES", "PUSHED", "TABLES", "TRAININGS", "best", "in_words", "kept", "lead"]

TRAINING = "epyc-2026-11-23/training/suite.json"
TUTORIAL_MNIST = "epyc-2026-11-23/tutorial-mnist/script.json"
TUTORIAL_CIFAR = "epyc-2026-11-23/tutorial-cifar/script.json"
ALL_REDUCE = "epyc-2026-11-27/all-reduce/sweep.json"
EVENING = "xeon-2026-11-28/all-reduce-evening/sweep.json"
PUSH_PULL = "epyc-2026-11-27/push-pull/sweep.json"
ONE_SERVER = "epyc-2026-11-27/push-pull-5-hosts/sweep.json"
FOUR_BESIDE = "epyc-2026-11-27/push-pull-4-hosts/sweep.json"
FOUR_APART = "epyc-2026-11-27/push-pull-8-hosts/sweep.json"
FIRST_EPYC = [
    "epyc-2026-11-26/all-reduce/sweep.json",
    "epyc-2026-11-26/push-pull/sweep.json",
    "epyc-2026-11-26/push-pull-5-hosts/sweep.json",
    "epyc-2026-11-26/push-pull-4-hosts/sweep.json",
    "epyc-2026-11-26/push-pull-8-hosts/sweep.json",
]
XEON = [
    "xeon-2026-11-28/all-reduce/sweep.json",
    "xeon-2026-11-28/push-pull/sweep.json",
    "xeon-2026-11-28/push-pull-5-hosts/sweep.json",
    "xeon-2026-11-28/push-pull-4-hosts/sweep.json",
    "xeon-2026-11-28/push-pull-8-hosts/sweep.json",
]
TLS, TLS_TWO_HOSTS = "epyc-2026-11-25/all-reduce-tls/sweep.json", "epyc-2026-11-25/all-reduce-tls-2-hosts/sweep.json"
CROSSOVER = "epyc-2026-11-24/crossover/crossover.json"
KILLS = ["epyc-2026-11-30/kills-ring/faults.json", "epyc-2026-11-30/kills-ps/faults.json"]
SOAKS = ["epyc-2026-11-30/soak-ring/faults.json", "epyc-2026-11-30/soak-ps/faults.json"]
PROGRAMS = "xeon-2026-11-29/programs/programs.json"
SCALE = "epyc-2026-11-25/scale/scale.json"
SCALE_BEFORE = "epyc-2026-11-25/scale-before/scale.json"  # each rank connected with each
SHARDED = "epyc-2026-11-22/sharded-optimizer/results.json"
NCCL = "h200-2026-11-26/all-reduce-nccl/sweep.json"
EXAMPLE = "xeon-2026-11-28/mnist-cnn/results.json"
ACCURACY = "xeon-2026-11-21/accuracy/accuracy.json"

TRAININGS = [("mnist-cnn", 2), ("mnist-cnn", 4), ("resnet18", 2), ("mlp-25m", 2), ("mlp-25m", 4)]
LINKS = ["100mbit", "1gbit", "10gbit"]
PUSHED = {"80 KB": 80_000, "16 MB": 16_000_000, "100 MB": 100_000_000}
STRAGGLERS = ("permanent", "random")
CELLS = [
    MapCell(nranks, servers, apart, size)
    for nranks in (2, 4)
    for servers, apart in ((1, False), (nranks, False), (nranks, True))
    for size in (1_000_000, 25_000_000)
]
MODES = {"ring": "ring/shm N=2", "sync": "ps/shm N=2", "ssp:2": "ps/shm N=2 ssp:2"}
MODES |= {"async": "ps/shm N=2 async", "geo:4": "ps/shm N=2 geo:4"}


def best(model: str, scheme: str, nranks: int) -> float:
    """The speed of a scheme's fastest way: samples a second, or steps a second of ResNet-18."""
    results = part(TRAINING, model)
    runs = [run for run in results["runs"] if (run["scheme"], run["nranks"]) == (scheme, nranks)]
    return max(float(run.get("samples_per_s") or 1000 / run["step_ms"]) for run in runs)


def lead(link: str, where: MapCell) -> tuple[float, int]:
    """How many times faster the ring's step is than the servers', and who is faster beyond noise, as `_won` says."""
    cell = crossover(read(CROSSOVER), link, where)
    return float(cell["ps"]["time_ms"] / cell["ring"]["time_ms"]), _won(cell)


def in_words(ratio: float, won: int) -> str:
    return _ratio(ratio) if won else f"≈ {_ratio(ratio)}"


def _won(cell: dict[str, Any]) -> int:
    """-1 where the ring is faster beyond noise, 1 where the servers are, else 0."""
    return measured(cell["ring"], "time_ms").against(measured(cell["ps"], "time_ms"))


def kept(contestant: str, straggler: str) -> float:
    """Of the samples a second without a straggler, the share that is left with one."""
    results = read(ACCURACY)
    return over_seeds(results, contestant, straggler, "samples_per_s") / over_seeds(
        results, contestant, "none", "samples_per_s"
    )


def _times_as_fast(ours: str, others: list[str], nranks: int, file: str = ALL_REDUCE) -> list[str]:
    """How many times as fast as the fastest of the others an all-reduce is, for each size."""

    def time(backend: str, size: int) -> float:
        return float(sweep_row(read(file), backend, nranks, size)["time_ms"])

    return [_ratio(min(time(other, size) for other in others) / time(ours, size)) for size in SIZES.values()]


def _over_mpi(file: str) -> list[list[str]]:
    return [_times_as_fast(ours, ["mpi"], n, file) for ours in ("shm", "shm-copied") for n in (2, 4)]


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 0.995 else f"{ratio:.1f}"


def _of_limit(file: str, backend: str, size: int, nranks: int = 4) -> str:
    return f"{sweep_row(read(file), backend, nranks, size)['of_limit']:.0%}".replace("%", " %")


def _which_scheme() -> list[list[str]]:
    rows = []
    for model, nranks in TRAININGS:
        speeds = [best(model, scheme, nranks) for scheme in ("ps", "ring", "paddle")]
        rows.append([f"{1000 / speed:.0f}" if model == "resnet18" else f"{speed:,.0f}" for speed in speeds])
    return rows


def _tutorials() -> list[list[str]]:
    schemes = {"ps": "ps/shm", "ring": "ring/shm", "paddle": "paddle", "paddle-default": "paddle-default"}
    programs = [(read(TUTORIAL_MNIST), 4), (part(TRAINING, "resnet18"), 2)]
    programs += [(read(TUTORIAL_CIFAR), 2), (read(TUTORIAL_CIFAR), 4)]
    rows = []
    for results, nranks in programs:
        times = [step_ms(results, f"{contestant} N={nranks}") for contestant in schemes.values()]
        rows.append([f"{time:,.0f}" if time >= 100 else f"{time:.1f}" for time in times])
    return rows


def _push_pull() -> list[list[str]]:
    backends = ["ps-shm", "ps-shm-copied", "ps-tcp", "ps-grpc", "ray", "torch-rpc", "tcp-sgd"]
    sizes = PUSHED.values()
    return [[_ms(sweep_row(read(PUSH_PULL), name, 4, size)["time_ms"]) for size in sizes] for name in backends]


def _between_hosts() -> list[list[str]]:
    files = (ONE_SERVER, FOUR_BESIDE, FOUR_APART)
    return [[_seconds(file, backend) for backend in ("ps-tcp", "ps-grpc", "tcp-sgd")] for file in files]


def _encryption() -> list[list[str]]:
    rows = []
    for file in (TLS_TWO_HOSTS, TLS):
        plain, encrypted = (sweep_row(read(file), name, 2, 100_000_000)["time_ms"] for name in ("tcp", "tcp-tls"))
        rows.append([_ms(plain), _ms(encrypted), f"{encrypted / plain:.2f}"])
    return rows


def _seconds(file: str, backend: str) -> str:
    """And the share of its bound."""
    row = sweep_row(read(file), backend, 4, 50_000_000)
    return f"{row['time_ms'] / 1000:.2f} ({_of_limit(file, backend, 50_000_000)})"


def _crossover() -> list[list[str]]:
    return [[in_words(*lead(link, cell)) for link in LINKS] for cell in CELLS]


def _stragglers() -> list[list[str]]:
    return [[f"{kept(name, straggler):.0%}".replace("%", " %") for straggler in STRAGGLERS] for name in MODES.values()]


def _server_memory() -> list[list[str]]:
    backends = ("ps-shm", "ps-shm-copied", "ps-tcp", "ps-grpc")
    rows = [sweep_row(read(PUSH_PULL), name, 4, 100_000_000)["server_memory"] for name in backends]
    return [[f"{memory['pss']:.0f}", f"{memory['own']:.0f}"] for memory in rows]


def _ms(time: float) -> str:
    if time >= 100:
        return f"{time:,.0f}"
    return f"{time:.1f}" if time >= 1 else f"{time:.2f}"


def _sync_ms(contestant: str) -> float:
    runs = read(SHARDED)["runs"]
    return float(next(run for run in runs if run["contestant"] == contestant)["sync_ms"]["p50"])


def _cells_won(by: int) -> str:
    """Of the crossover map: by the ring (-1), by nobody (0), by the servers (1)."""
    return str([_won(cell) for cell in read(CROSSOVER)["cells"]].count(by))


def _servers_of_limit(link: str) -> float:
    """Of the crossover map: the most that servers reach over such links."""
    return max(float(cell["ps"]["of_bound"]) for cell in read(CROSSOVER)["cells"] if cell["link"] == link)


def _resnet(ours: str, theirs: str) -> Callable[[], str]:
    def ratio() -> str:
        results = part(TRAINING, "resnet18")
        return f"{step_ms(results, f'{theirs} N=2') / step_ms(results, f'{ours} N=2'):.1f}"

    return ratio


def _rounds_of_resnet(contestant: str) -> list[float]:
    """Ascending, in ms a step."""
    runs = part(TRAINING, "resnet18")["runs"]
    rounds: list[float] = next(run for run in runs if run["contestant"] == contestant)["step_ms_rounds"]
    return sorted(rounds)


def _faster(model: str, one: str, other: str, nranks: int) -> Callable[[], str]:
    return lambda: f"{best(model, one, nranks) / best(model, other, nranks):.1f}"


def _of_memory(size: str, nranks: int) -> Callable[[], str]:
    """In percent, without the sign."""
    return lambda: _of_limit(ALL_REDUCE, "shm", SIZES[size], nranks).removesuffix(" %")


FIGURES: dict[str, Callable[[], str]] = {
    "example-rate": lambda: f"{_example()['samples_per_s']:,.0f}",
    "example-interval": lambda: "({:,.0f}–{:,.0f})".format(*_example()["samples_per_s_interval"]),
    "example-step": lambda: _percentiles("step_ms"),
    "example-sync": lambda: _percentiles("sync_ms"),
    "example-wait": lambda: milliseconds(_example()["wait_ms"]["p50"]),
    "example-loss": lambda: "{first:#.3g}→{last:#.3g}".format(**_example()["loss"]),
    "example-accuracy": lambda: f"{_example()['accuracy'] * 100:.1f}",
    "mlp-servers-over-paddle-2": _faster("mlp-25m", "ps", "paddle", 2),
    "mlp-servers-over-paddle-4": _faster("mlp-25m", "ps", "paddle", 4),
    "mlp-servers-ahead": lambda: f"{best('mlp-25m', 'ps', 4) / best('mlp-25m', 'ring', 4) - 1:.0%}".replace("%", ""),
    "resnet-ring-over-default": _resnet("ring/shm", "paddle-default"),
    "resnet-servers-least": lambda: f"{_rounds_of_resnet('ps/shm N=2')[0]:.0f}",
    "resnet-servers-most": lambda: f"{_rounds_of_resnet('ps/shm N=2')[-1]:.0f}",
    "resnet-ring-least": lambda: f"{_rounds_of_resnet('ring/shm N=2')[0]:.0f}",
    "resnet-ring-most": lambda: f"{_rounds_of_resnet('ring/shm N=2')[-1]:.0f}",
    "ring-wins": lambda: _cells_won(-1),
    "servers-win": lambda: _cells_won(1),
    "nobody-wins": lambda: _cells_won(0),
    "servers-of-limit-10gbit": lambda: f"{_servers_of_limit('10gbit') * 100:.0f}",
    "crossover-cells": lambda: str(len(read(CROSSOVER)["cells"])),
    "memory-of-limit-2": _of_memory("100 MB", 2),
    "memory-of-limit-4": _of_memory("100 MB", 4),
    "memory-of-limit-2-16mib": _of_memory("16 MiB", 2),
    "memory-of-limit-4-16mib": _of_memory("16 MiB", 4),
    "round-of-limit": lambda: _of_limit(PUSH_PULL, "ps-shm", 100_000_000).removesuffix(" %"),
    "nccl-of-limit": lambda: _of_limit(NCCL, "nccl", 16_000_000, 2).removesuffix(" %"),
    "nccl-ring-of-limit": lambda: _of_limit(NCCL, "nccl-ring", 16_000_000, 2).removesuffix(" %"),
    "sync-ring": lambda: f"{_sync_ms('ring/shm N=4'):.0f}",
    "sync-sharded": lambda: f"{_sync_ms('ring/shm N=4 sharded'):.0f}",
    "sync-ratio": lambda: f"{_sync_ms('ring/shm N=4') / _sync_ms('ring/shm N=4 sharded'):.1f}",
    "mpi-waiting": lambda: f"{_waiting('mpi', 2) * 100:.0f}",
    "shm-waiting": lambda: f"{_waiting('shm', 2) * 100:.1f}",
    **sums(PROGRAMS),
}


def _example() -> dict[str, Any]:
    """The line that the pages explain."""
    found: dict[str, Any] = next(run for run in read(EXAMPLE)["runs"] if run["contestant"] == "ps/shm N=2")
    return found


def _percentiles(time: str) -> str:
    """Of the example, in ms: the median and the 99th."""
    return "/".join(milliseconds(_example()[time][name]) for name in ("p50", "p99"))


def _waiting(backend: str, nranks: int) -> float:
    rows = read(ALL_REDUCE)["waiting"]
    return float(next(row["core"] for row in rows if (row["backend"], row["nranks"]) == (backend, nranks)))


def _scale() -> list[list[str]]:
    """Of each group: seconds until complete, the most of a rank besides rank 0, how many named a killed one."""
    return [[*_group(each)[:-1], str(each["named"]), _group(each)[-1]] for each in read(SCALE)["groups"]]


def _scale_before() -> list[list[str]]:
    """The same of 64 ranks, before and now, over shm and tcp."""
    files = [
        {each["backend"]: each for each in read(file)["groups"] if each["nranks"] == 64}
        for file in (SCALE_BEFORE, SCALE)
    ]
    return [_group(file[backend]) for backend in ("shm", "tcp") for file in files]


def _group(each: dict[str, Any]) -> list[str]:
    most = [str(each[what][1]) for what in ("sockets", "descriptors", "threads")]
    return [f"{each['complete_s']:.1f}", *most, f"{each['named_s']:.2f}"]


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "which-scheme": _which_scheme,
    "tutorials": _tutorials,
    "all-reduce-over-mpi": lambda: _over_mpi(ALL_REDUCE),
    "all-reduce-evening": lambda: _over_mpi(EVENING),
    "all-reduce-over-gloo": lambda: (
        [_times_as_fast("shm", ["gloo"], n) for n in (2, 4)]
        + [_times_as_fast("tcp", ["gloo", "torch-gloo"], n) for n in (2, 4)]
    ),
    "push-pull": _push_pull,
    "between-hosts": _between_hosts,
    "encryption": _encryption,
    "crossover": _crossover,
    "stragglers": _stragglers,
    "server-memory": _server_memory,
    "random-kills": lambda: random_kills(*KILLS),
    "soak": lambda: soak(*SOAKS),
    "scale": _scale,
    "scale-before": _scale_before,
    "programs": lambda: ends(PROGRAMS),
    "targets": lambda: targets(FIRST_EPYC, XEON, [ALL_REDUCE, PUSH_PULL, ONE_SERVER, FOUR_BESIDE, FOUR_APART]),
}
