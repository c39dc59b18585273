"""Large copies: every byte, wherever arrays begin, and nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest

from common.kernels.loader import copy_kernel, why_not
from common.tensors import copying
from common.tensors.copying import LARGE, copy
from tests.support.groups import assert_same_bits

MARGIN = 64


@pytest.mark.parametrize(("out_at", "values_at", "size"), [(0, 0, LARGE), (4, 60, LARGE), (60, 4, LARGE + 100)])
def test_all_is_copied_and_nothing_else_written(out_at: int, values_at: int, size: int) -> None:
    assert copy_kernel(), why_not()
    source = np.random.default_rng(0).integers(0, 256, size + MARGIN, np.uint8)
    memory = np.full(size + 2 * MARGIN, 7, np.uint8)
    values = source[values_at : values_at + size].view(np.float32)
    copy(memory[out_at : out_at + size].view(np.float32), values)
    assert_same_bits(memory[out_at : out_at + size].view(np.float32), values)
    assert (memory[:out_at] == 7).all()
    assert (memory[out_at + size :] == 7).all()


@pytest.mark.parametrize("case", ["small", "another type", "not contiguous", "no kernel"])
def test_other_copies_are_numpys(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = LARGE // 4
    out, values = np.zeros(count, np.float32), np.arange(count, dtype=np.float32)
    if case == "small":
        out, values = out[:10], values[:10]
    elif case == "another type":
        values = values.astype(np.float64)
    elif case == "not contiguous":
        out, values = np.zeros((2, count), np.float32).T, np.stack([values, values], 1)

    def none() -> None:
        assert case == "no kernel", "the kernel must not be asked for"

    monkeypatch.setattr(copying, "copy_kernel", none)
    copy(out, values)
    assert (out == values).all()
