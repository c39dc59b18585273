"""Every figure and table that the pages quote, computed from the committed results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from docs.tools.results import crossover, over_seeds, part, read, step_ms, sweep_row

__all__ = ["FIGURES", "LINKS", "MODES", "SIZES", "TABLES", "TRAININGS", "best", "kept", "ring_is_faster"]

TRAINING = "epyc-2026-11-23/training/suite.json"
FULL = "epyc-2026-11-23/full/suite.json"
TUTORIAL_MNIST = "epyc-2026-11-23/tutorial-mnist/script.json"
TUTORIAL_CIFAR = "epyc-2026-11-23/tutorial-cifar/script.json"
ALL_REDUCE = "epyc-2026-11-22/all-reduce/sweep.json"
RING_4_HOSTS = "epyc-2026-11-22/all-reduce-4-hosts/sweep.json"
ONE_SERVER = "epyc-2026-11-22/push-pull-5-hosts/sweep.json"
FOUR_SERVERS = "epyc-2026-11-22/push-pull-8-hosts/sweep.json"
SHARDED = "epyc-2026-11-22/sharded-optimizer/results.json"
EXAMPLE = "xeon-2026-11-21/mnist-cnn/results.json"
ACCURACY = "xeon-2026-11-21/accuracy/accuracy.json"

SIZES = {"4 KiB": 4096, "64 KiB": 65536, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "100 MB": 100_000_000}
TRAININGS = [("mnist-cnn", 2), ("mnist-cnn", 4), ("resnet18", 2), ("mlp-25m", 2), ("mlp-25m", 4)]
LINKS = ["100mbit", "1gbit", "10gbit"]
MODES = {"ring": "ring/shm N=2", "sync": "ps/shm N=2", "ssp:2": "ps/shm N=2 ssp:2"}
MODES |= {"async": "ps/shm N=2 async", "geo:4": "ps/shm N=2 geo:4"}


def best(model: str, scheme: str, nranks: int) -> float:
    """The speed of a scheme's fastest way: samples a second, or steps a second of ResNet-18."""
    results = part(TRAINING, model)
    runs = [run for run in results["runs"] if (run["scheme"], run["nranks"]) == (scheme, nranks)]
    return max(float(run.get("samples_per_s") or 1000 / run["step_ms"]) for run in runs)


def ring_is_faster(link: str, nranks: int, servers: int, size: int) -> float:
    """How many times faster the ring's step is than the servers'."""
    cell = crossover(part(FULL, "crossover"), link, nranks, servers, size)
    return float(cell["ps"]["time_ms"] / cell["ring"]["time_ms"])


def kept(contestant: str, straggler: str) -> float:
    """Of the samples a second without a straggler, the share that is left with one."""
    results = read(ACCURACY)
    return over_seeds(results, contestant, straggler, "samples_per_s") / over_seeds(
        results, contestant, "none", "samples_per_s"
    )


def _time(backend: str, nranks: int, size: int) -> float:
    return float(sweep_row(read(ALL_REDUCE), backend, nranks, size)["time_ms"])


def _times_as_fast(ours: str, others: list[str], nranks: int) -> list[str]:
    """How many times as fast as the fastest of the others an all-reduce is, for each size."""
    ratios = [
        min(_time(other, nranks, size) for other in others) / _time(ours, nranks, size) for size in SIZES.values()
    ]
    return [f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}" for ratio in ratios]


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
    results = part(FULL, "push-pull")
    backends = ["ps-shm", "ps-shm-copied", "ps-grpc", "ray", "torch-rpc", "tcp-sgd"]
    return [[_ms(sweep_row(results, name, 4, size)["time_ms"]) for size in PUSHED] for name in backends]


PUSHED = (80_000, 16_000_000, 100_000_000)


def _between_hosts() -> list[list[str]]:
    runs = [(RING_4_HOSTS, "tcp"), (FOUR_SERVERS, "ps-grpc"), (ONE_SERVER, "ps-grpc")]
    size = 50_000_000
    times = [sweep_row(read(file), backend, 4, size)["time_ms"] / 1000 for file, backend in runs]
    return [[f"{time:.2f}", _of_limit(file, backend, size)] for time, (file, backend) in zip(times, runs, strict=True)]


def _crossover() -> list[list[str]]:
    cells = [(2, 1, 1_000_000), (2, 2, 1_000_000), (2, 1, 25_000_000), (2, 2, 25_000_000)]
    cells += [(4, 1, 1_000_000), (4, 4, 1_000_000), (4, 1, 25_000_000), (4, 4, 25_000_000)]
    return [[f"{ring_is_faster(link, *cell):.1f}" for link in LINKS] for cell in cells]


def _stragglers() -> list[list[str]]:
    return [[f"{kept(name, straggler):.0%}".replace("%", " %") for straggler in STRAGGLERS] for name in MODES.values()]


STRAGGLERS = ("permanent", "random")


def _server_memory() -> list[list[str]]:
    rows = [sweep_row(part(FULL, "push-pull"), name, 4, 100_000_000) for name in ("ps-shm", "ps-shm-copied", "ps-grpc")]
    return [[f"{row['server_memory']['pss']:.0f}", f"{row['server_memory']['own']:.0f}"] for row in rows]


def _ms(time: float) -> str:
    if time >= 100:
        return f"{time:,.0f}"
    return f"{time:.1f}" if time >= 1 else f"{time:.2f}"


def _sync_ms(contestant: str) -> float:
    runs = read(SHARDED)["runs"]
    return float(next(run for run in runs if run["contestant"] == contestant)["sync_ms"]["p50"])


def _ring_wins() -> int:
    """Cells of the crossover map in which the ring's interval lies below the servers'."""
    cells = part(FULL, "crossover")["cells"]
    return sum(_below(cell["ring"], cell["ps"]) for cell in cells)


def _below(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether one was faster in so many of the rounds in common as `crossover` asks for, and by 1 % at least."""
    rounds = list(zip(one["time_ms_rounds"], other["time_ms_rounds"], strict=True))
    ahead = sum(first < second for first, second in rounds)
    return ahead == len(rounds) and bool(one["time_ms"] < 0.99 * other["time_ms"])


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


def _round_ratio(other: str, size: int = 100_000_000) -> Callable[[], str]:
    def ratio() -> str:
        results = part(FULL, "push-pull")
        return f"{sweep_row(results, other, 4, size)['time_ms'] / sweep_row(results, 'ps-shm', 4, size)['time_ms']:.1f}"

    return ratio


FIGURES: dict[str, Callable[[], str]] = {
    "example-rate": lambda: f"{_example()['samples_per_s']:,.0f}",
    "example-step": lambda: f"{_example()['step_ms']['p50']:.1f}",
    "mlp-servers-over-paddle-2": _faster("mlp-25m", "ps", "paddle", 2),
    "mlp-servers-over-paddle-4": _faster("mlp-25m", "ps", "paddle", 4),
    "mlp-servers-ahead": lambda: f"{best('mlp-25m', 'ps', 4) / best('mlp-25m', 'ring', 4) - 1:.0%}".replace("%", ""),
    "resnet-ring-over-default": _resnet("ring/shm", "paddle-default"),
    "resnet-servers-least": lambda: f"{_rounds_of_resnet('ps/shm N=2')[0]:.0f}",
    "resnet-servers-most": lambda: f"{_rounds_of_resnet('ps/shm N=2')[-1]:.0f}",
    "resnet-ring-least": lambda: f"{_rounds_of_resnet('ring/shm N=2')[0]:.0f}",
    "resnet-ring-most": lambda: f"{_rounds_of_resnet('ring/shm N=2')[-1]:.0f}",
    "ring-wins": lambda: str(_ring_wins()),
    "ring-wins-of": lambda: str(len(part(FULL, "crossover")["cells"])),
    "memory-of-limit-2": lambda: _of_limit(ALL_REDUCE, "shm", 100_000_000, 2).removesuffix(" %"),
    "memory-of-limit-4": lambda: _of_limit(ALL_REDUCE, "shm", 100_000_000).removesuffix(" %"),
    "round-of-limit": lambda: f"{sweep_row(part(FULL, 'push-pull'), 'ps-shm', 4, 100_000_000)['of_limit'] * 100:.0f}",
    "round-ray": _round_ratio("ray"),
    "sync-ring": lambda: f"{_sync_ms('ring/shm N=4'):.0f}",
    "sync-sharded": lambda: f"{_sync_ms('ring/shm N=4 sharded'):.0f}",
    "sync-ratio": lambda: f"{_sync_ms('ring/shm N=4') / _sync_ms('ring/shm N=4 sharded'):.1f}",
    "mpi-waiting": lambda: f"{_waiting('mpi', 2) * 100:.0f}",
    "shm-waiting": lambda: f"{_waiting('shm', 2) * 100:.1f}",
}


def _example() -> dict[str, Any]:
    """The line that the pages explain."""
    found: dict[str, Any] = next(run for run in read(EXAMPLE)["runs"] if run["contestant"] == "ps/shm N=2")
    return found


def _waiting(backend: str, nranks: int) -> float:
    rows = read(ALL_REDUCE)["waiting"]
    return float(next(row["core"] for row in rows if (row["backend"], row["nranks"]) == (backend, nranks)))


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "which-scheme": _which_scheme,
    "tutorials": _tutorials,
    "all-reduce-over-mpi": lambda: [_times_as_fast(ours, ["mpi"], n) for ours in ("shm", "shm-copied") for n in (2, 4)],
    "all-reduce-over-gloo": lambda: (
        [_times_as_fast("shm", ["gloo"], n) for n in (2, 4)]
        + [_times_as_fast("tcp", ["gloo", "torch-gloo"], n) for n in (2, 4)]
    ),
    "push-pull": _push_pull,
    "between-hosts": _between_hosts,
    "crossover": _crossover,
    "stragglers": _stragglers,
    "server-memory": _server_memory,
}
