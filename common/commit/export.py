"""A commit as the two files that Paddle programs load: `.pdparams` and `.pdopt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt

from common.commit.folder import CommitFolder
from common.commit.manifest import Manifest
from common.commit.resuming import ACCUMULATORS, BUFFERS, PARAMETERS, optimizer_slices
from common.commit.slices import cut
from common.errors import CommitCorrupt, FileNotWritten, UsageError
from common.system.atomic_file import writing
from common.tensors.parts import is_number

__all__ = ["export"]

Array = npt.NDArray[Any]


def export(folder: CommitFolder, step: int, prefix: Path) -> list[Path]:
    """Write PREFIX.pdparams, which a model's `set_state_dict(paddle.load(...))` takes, with rank 0's BatchNorm
    statistics, and PREFIX.pdopt, which an optimizer's takes; returns their names.

    Raises:
        CommitCorrupt: the commit is not whole.
        UsageError: Paddle is not installed here.
        FileNotWritten: a file, or the folder that it is to be in, could not be written.
    """
    try:
        import paddle
    except ImportError as exc:
        raise UsageError("export needs Paddle, which writes the files: pip install paddlepaddle") from exc

    manifest = folder.verify(step)
    part = folder.part(manifest, "rank-0")
    model = part.beginning(PARAMETERS) | part.beginning(BUFFERS)
    optimizer: dict[str, Any] = dict(part.state.get("optimizer", {}))
    arrays = part.beginning(ACCUMULATORS) | of_slices(folder, manifest)
    optimizer |= {key: paddle.to_tensor(array) for key, array in arrays.items()}
    make_folder(prefix.parent)
    files = [prefix.with_name(prefix.name + suffix) for suffix in (".pdparams", ".pdopt")]
    contents = {name: paddle.to_tensor(array) for name, array in model.items()}, optimizer
    for file, content in zip(files, contents, strict=True):
        with writing(file) as unfinished:
            paddle.save(content, str(unfinished))
    return files


def make_folder(folder: Path) -> None:
    """With those that it is in, if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise FileNotWritten(f"cannot make the folder {folder} for what is exported: {exc.strerror}") from exc


def of_slices(folder: CommitFolder, manifest: Manifest) -> dict[str, Array]:
    """What the built-in trainer's optimizer keeps, parameter by parameter, by Paddle's keys."""
    try:
        arrays = cut(optimizer_slices(folder, manifest), 0, manifest.length).arrays
    except ValueError as exc:
        raise CommitCorrupt(f"{folder.of_step(manifest.step)}: of the optimizer's state {exc}") from exc
    return {
        f"{entry.paddle}_{kind}": array
        if is_number(kind)
        else array[slot.start : slot.stop].view(slot.dtype).reshape(slot.shape)
        for kind, array in arrays.items()
        for entry, slot in zip(manifest.layout, manifest.arena_layout().slots, strict=True)
    }
