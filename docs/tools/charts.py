"""Draw the pictures of the committed results: python -m docs.tools.charts [--check]."""

from __future__ import annotations

import sys
from math import log
from pathlib import Path

from docs.tools.catalogue import (
    ALL_REDUCE,
    CELLS,
    LINKS,
    MODES,
    PUSH_PULL,
    PUSHED,
    TRAININGS,
    best,
    in_words,
    kept,
    lead,
)
from docs.tools.results import SIZES, read, sweep_row
from docs.tools.svg import bars, grid, lines

__all__ = ["FOLDER", "draw", "main"]

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "charts"
TITLES = {"mnist-cnn": "MNIST CNN", "resnet18": "ResNet-18", "mlp-25m": "MLP, 25 M"}


def draw() -> dict[str, str]:
    """Every picture by its file's name."""
    return {
        "training.svg": _training(),
        "all-reduce.svg": _all_reduce(),
        "push-pull.svg": _push_pull(),
        "crossover.svg": _crossover(),
        "stragglers.svg": _stragglers(),
    }


def _training() -> str:
    groups = []
    for model, nranks in TRAININGS:
        paddle = best(model, "paddle", nranks)
        speeds = [best(model, scheme, nranks) / paddle for scheme in ("ps", "ring")]
        groups.append((f"{TITLES[model]}, N={nranks}", speeds))
    return bars(groups, ["ps", "collective"], unit="×", line=1.0)


def _all_reduce() -> str:
    backends = {"GradSync shm": "shm", "GradSync tcp": "tcp", "Open MPI": "mpi", "Gloo": "gloo"}
    panels = []
    for nranks in (2, 4):
        sweep = read(ALL_REDUCE)
        curves = {
            name: [sweep_row(sweep, backend, nranks, size)["time_ms"] for size in SIZES.values()]
            for name, backend in backends.items()
        }
        panels.append((f"N={nranks}", curves))
    return lines(panels, list(SIZES), unit=" ms")


def _push_pull() -> str:
    backends = {"GradSync shm": "ps-shm", "GradSync TCP": "ps-tcp", "GradSync gRPC": "ps-grpc"}
    backends |= {"PyTorch RPC": "torch-rpc", "Ray": "ray"}
    curves = {
        name: [sweep_row(read(PUSH_PULL), backend, 4, size)["time_ms"] for size in PUSHED.values()]
        for name, backend in backends.items()
    }
    return lines([("N=4", curves)], list(PUSHED), unit=" ms")


def _crossover() -> str:
    """Orange where the ring is faster beyond noise, blue where the servers are."""
    rows = [
        f"N={nranks}, S={servers}{' apart' if apart else ''}, {size // 1_000_000} MB"
        for nranks, servers, apart, size in CELLS
    ]
    found = [[lead(link, cell) for link in LINKS] for cell in CELLS]
    cells = [[(f"{in_words(ratio, won)}×", log(ratio) if won else 0.0) for ratio, won in row] for row in found]
    return grid(rows, ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s"], cells)


def _stragglers() -> str:
    groups = [(name, [kept(contestant, "permanent") * 100]) for name, contestant in MODES.items()]
    return bars(groups, ["samples/s"], unit=" %", line=100.0)


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        wrong = [name for name, text in draw().items() if (FOLDER / name).read_text("utf-8") != text]
        for name in wrong:
            print(f"docs/assets/charts/{name} is not what the committed results make; run 'make figures'")
        return 1 if wrong else 0
    for name, text in draw().items():
        (FOLDER / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
