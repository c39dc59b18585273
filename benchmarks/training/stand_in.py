"""Files as MNIST's are published, of synthetic data, for programs that read files where there are none."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

from common.trainer.data import SIDE, load_dataset

__all__ = ["write_idx_files"]


def write_idx_files(folder: Path) -> Path:
    """The four IDX files of the data set `synthetic` (6,000 + 1,000 images); returns `folder`, which may hold them."""
    data = load_dataset("synthetic")
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, split in (("train", data.train), ("t10k", data.test)):
        images = np.rint(255 * split.images).astype(np.uint8)
        parts = {
            f"{prefix}-images-idx3-ubyte.gz": struct.pack(">4I", 0x0803, len(split), SIDE, SIDE) + images.tobytes(),
            f"{prefix}-labels-idx1-ubyte.gz": struct.pack(">2I", 0x0801, len(split))
            + split.labels.astype(np.uint8).tobytes(),
        }
        for name, content in parts.items():
            (folder / name).write_bytes(gzip.compress(content, compresslevel=1, mtime=0))
    return folder
