"""A fingerprint of parameters shows every change, whether machine code or NumPy takes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kernels.loader import mix_kernel, why_not
from common.tensors import fingerprint as fingerprint_module
from common.tensors.arena import FloatArray
from common.tensors.fingerprint import FINGERPRINT, fingerprint, fingerprint_and_look
from tests.support.thorough import examples

ROWS, WIDTH = FINGERPRINT
EDGES = [n + d for n in (2 * WIDTH, 2 * WIDTH * ROWS, 5 * WIDTH * ROWS) for d in (-16, 0, 16)]
lengths = st.one_of(st.integers(1, 40).map(lambda n: 16 * n), st.sampled_from(EDGES))  # as arenas have


@pytest.fixture(params=["machine code", "NumPy"], autouse=True, scope="module")
def by(request: pytest.FixtureRequest) -> Iterator[None]:
    assert mix_kernel(), why_not()
    with patch("common.tensors.fingerprint.LARGE", 0 if request.param == "machine code" else sys.maxsize):
        yield


def values_in(length: int) -> FloatArray:
    return np.random.default_rng(length).standard_normal(length).astype(np.float32)


@settings(max_examples=examples(30, 300))
@given(lengths, st.data())
def test_a_fingerprint_shows_the_change_of_any_bit(length: int, data: st.DataObject) -> None:
    array = values_in(length)
    before = fingerprint(array)
    assert fingerprint(array.copy()) == before
    where = data.draw(st.sampled_from([0, length - 1, data.draw(st.integers(0, length - 1))]))
    array.view(np.uint32)[where] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    assert fingerprint(array) != before


@settings(max_examples=examples(30, 300))
@given(lengths, st.data())
def test_a_fingerprint_shows_values_that_have_changed_places(length: int, data: st.DataObject) -> None:
    """Two, or two whole runs of them, as when the weights of two layers are exchanged."""
    array = values_in(length)
    before = fingerprint(array)
    size = data.draw(st.sampled_from([1, 2, 8, length // 2, min(length // 2, 2 * WIDTH)]))
    a = data.draw(st.integers(0, length - 2 * size))
    b = data.draw(st.integers(a + size, length - size))
    array[a : a + size], array[b : b + size] = array[b : b + size].copy(), array[a : a + size].copy()
    assert fingerprint(array) != before


@settings(max_examples=examples(30, 300))
@given(lengths, st.sampled_from([np.nan, -np.nan, np.inf, -np.inf, 3.4e38, -0.0, 1e-45]), st.data())
def test_values_that_are_not_finite_are_seen_besides(length: int, value: float, data: st.DataObject) -> None:
    """NumPy's sums do not see them, and say so."""
    array = values_in(length)
    by_code = fingerprint_module.LARGE == 0
    assert fingerprint_and_look(array)[1] == by_code
    array[data.draw(st.sampled_from([0, length - 1, data.draw(st.integers(0, length - 1))]))] = value
    assert fingerprint_and_look(array) == (fingerprint(array), by_code and bool(np.isfinite(value)))


@pytest.mark.parametrize("length", [16, 4096, 100_000])
def test_a_fingerprint_shows_a_change_of_sign_or_scale_of_all(length: int) -> None:
    array = values_in(length)
    fingerprints = {fingerprint(array * np.float32(factor)) for factor in (1, -1, 0.5, 2, 0)}
    assert len(fingerprints) == 5
    assert fingerprint(array[::-1].copy()) not in fingerprints


@pytest.mark.parametrize("length", [4096, 4096 + 16])
def test_a_fingerprint_shows_signs_that_change_in_pairs(length: int) -> None:
    array = values_in(length)
    before = fingerprint(array)
    for other in (256, 512, 256 * 15):  # in the same column of machine code's rows
        changed = array.copy()
        changed[[1, 1 + other]] *= -1
        assert fingerprint(changed) != before
