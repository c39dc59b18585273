"""What can be set: frozen dataclasses from which the command lines are made, so one place says name and unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from common.errors import UsageError, choose
from common.launch.ranks import name_of
from common.launch.settings import Settings
from common.tensors.optimizers import OPTIMIZERS, Optimizer, make_optimizer

__all__ = ["DATASETS", "MODELS", "Training", "TrainingConfig", "flags_with_a_script"]

MODELS = ("mnist-cnn", "mlp")  # mlp:1024,1024 names its hidden sizes
DATASETS = ("digits", "mnist", "fashion-mnist", "mnist-json", "synthetic")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and how long; the same for every scheme."""

    model: str = "mnist-cnn"
    """mnist-cnn, or mlp with hidden sizes as in mlp:1024,1024."""
    dataset: str = "digits"
    """digits (needs no download), mnist, fashion-mnist, mnist-json or synthetic."""
    data_dir: Path | None = None
    """Folder of the data set's files; without it Paddle's cache is used, and filled by download."""
    batch_size: int = 32
    """Samples per rank and step."""
    steps: int | None = None
    """Length of the training in steps, running on over epoch ends. (default: from --epochs)"""
    epochs: int | None = None
    """Length of the training in passes over the data. (default: 1)"""
    optimizer: str = "adam"
    """sgd, momentum, adagrad, rmsprop, adam or adamw: Paddle's own."""
    lr: float = 0.001
    """Learning rate."""
    seed: int = 1
    """Of the initial parameters and of the synthetic data."""
    json: Path | None = None
    """Rank 0 writes its run record to this file."""
    save: Path | None = None
    """Rank 0 writes the model's state dict to this file (paddle.save); a name of your choice, usually *.pdparams."""
    checkpoint_dir: Path | None = None
    """Keep commits of the training in this folder, from which it can go on; all hosts must share it."""
    commit_every: int | None = None
    """Steps between two commits. (default: 100)"""
    keep: int | None = None
    """How many commits stay, the newest. (default: 3)"""
    resume: bool = False
    """Go on from the newest whole commit in --checkpoint-dir."""
    elastic: bool = False
    """With --resume: also where the commit is of another number of ranks, whose bits are another run's."""
    trace: Path | None = None
    """Write what all ranks and servers did when to this file, for ui.perfetto.dev."""
    log_dir: Path | None = None
    """Folder for workerlog.N and serverlog.N. (default: a host's first rank writes to the terminal)"""


LAUNCHERS = ("trace", "log_dir")  # of these, what a launcher does, whatever is trained


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Settings, Training):
    """A training, and how its processes synchronise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("model", self.model.partition(":")[0], MODELS)
        choose("dataset", self.dataset, DATASETS)
        choose("optimizer", self.optimizer, OPTIMIZERS)
        if self.steps is not None and self.epochs is not None:
            raise UsageError("give --steps or --epochs, not both")
        for flag, value in (
            ("batch-size", self.batch_size),
            ("steps", self.steps),
            ("epochs", self.epochs),
            ("commit-every", self.commit_every),
            ("keep", self.keep),
        ):
            if value is not None and value < 1:
                raise UsageError(f"--{flag} must be at least 1 (got {value})")
        self.check_commits()
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed must be in 0..{2**32 - 1} (got {self.seed})")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UsageError(f"--lr must be a positive number (got {self.lr})")

    def check_commits(self) -> None:
        """Raise UsageError where commits are described, but no folder is named for them."""
        given = {"commit-every": self.commit_every, "keep": self.keep, "resume": self.resume or None}
        for flag, value in given.items():
            if value is not None and self.checkpoint_dir is None:
                raise UsageError(f"--{flag} needs --checkpoint-dir, the folder of the commits")
        if self.elastic and not self.resume:
            raise UsageError(
                "--elastic needs --resume: it says how to go on from a commit; "
                "a program of your own asks for it by TrainingState(elastic=True)"
            )

    def check_script(self, script: Sequence[str], given: Sequence[str]) -> None:
        """With a script of the user's, what is trained is its own affair.

        Args:
            given: the command line before the script: a flag is of no use with its default either.

        Raises:
            UsageError: a flag of the built-in trainer was given before the script.
        """
        named = {word.partition("=")[0].replace("_", "-") for word in given}
        for entry in fields(Training) if script else ():
            flag = "--" + entry.name.replace("_", "-")
            if entry.name not in LAUNCHERS and flag in named:
                raise UsageError(
                    f"{flag} is for the built-in trainer; give {name_of(script)} its own arguments after its name"
                )
        if not script and "--no-install" in named:
            raise UsageError("--no-install is for a program of your own; name one after the flags")
        if script == ["-m"]:
            raise UsageError("-m needs the name of a module, as in -m package.module")

    def for_ranks(self, nranks: int) -> TrainingConfig:  # noqa: ARG002 - of those that share a batch
        """What each of so many ranks is given: `batch_size` is a rank's own."""
        return self

    def make_optimizer(self) -> Optimizer:
        return make_optimizer(self.optimizer, {"learning_rate": self.lr})

    def total_steps(self, steps_per_epoch: int, ahead: int = 0) -> int:
        """
        Args:
            ahead: see Manifest.
        """
        return self.steps if self.steps is not None else (self.epochs or 1) * steps_per_epoch + ahead


def flags_with_a_script(kind: Any, *, without: Sequence[str] = ()) -> set[str]:
    """The flags that a launcher's configuration takes where a script is given, aliases too.

    Args:
        without: fields that are for the built-in trainer, beside those of `Training`.
    """
    left_out = {*without, *(entry.name for entry in fields(Training))} - {*LAUNCHERS}
    flags: set[str] = set()
    for name, hint in get_type_hints(kind, include_extras=True).items():
        first, *notes = get_args(hint) or (hint,)
        if is_dataclass(first):
            flags |= flags_with_a_script(first)
        elif name not in left_out:
            flags |= {each + name.replace("_", "-") for each in ("--", "--no-")[: 1 + (first is bool)]}
            flags |= {alias for note in notes for alias in getattr(note, "aliases", None) or ()}
    return flags
