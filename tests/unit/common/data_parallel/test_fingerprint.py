"""A fingerprint of parameters shows every change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

paddle = pytest.importorskip("paddle")

from common.tensors.arena import FloatArray  # noqa: E402
from common.tensors.fingerprint import FINGERPRINT, fingerprint  # noqa: E402
from tests.support.thorough import examples  # noqa: E402

ROWS, WIDTH = FINGERPRINT
EDGES = [n + d for n in (2 * WIDTH, 2 * WIDTH * ROWS, 5 * WIDTH * ROWS) for d in (-16, 0, 16)]
lengths = st.one_of(st.integers(1, 40).map(lambda n: 16 * n), st.sampled_from(EDGES))  # as arenas have


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


@pytest.mark.parametrize("length", [16, 4096, 100_000])
def test_a_fingerprint_shows_a_change_of_sign_or_scale_of_all(length: int) -> None:
    array = values_in(length)
    fingerprints = {fingerprint(array * np.float32(factor)) for factor in (1, -1, 0.5, 2, 0)}
    assert len(fingerprints) == 5
    assert fingerprint(array[::-1].copy()) not in fingerprints
