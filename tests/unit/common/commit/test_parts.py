"""Parts: arrays of any dtype and shape, and plain values, come back from bytes; anything else is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from common.commit.parts import Part, from_buffers, from_bytes, to_buffers, to_bytes

DTYPES = st.sampled_from(["float32", "float64", "float16", "int64", "uint64", "int32", "uint8", "bool"])
ARRAYS = DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=4)))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def through_a_file(part: Part) -> Part:
    return from_bytes(to_bytes(part))


def through_memory(part: Part) -> Part:
    return from_buffers(b"".join(to_buffers(part)))


both = pytest.mark.parametrize("through", [through_a_file, through_memory])


@both
@given(st.dictionaries(st.text(min_size=1), ARRAYS, max_size=4), st.dictionaries(st.text(), PLAIN, max_size=4))
def test_what_is_written_is_read(
    through: Callable[[Part], Part], named: dict[str, np.ndarray], state: dict[str, object]
) -> None:
    named.pop("__metadata__", None)
    found = through(Part(named, state))
    assert json.dumps(found.state, sort_keys=True) == json.dumps(state, sort_keys=True)
    assert found.arrays.keys() == named.keys()
    for name, array in named.items():
        assert (found.arrays[name].shape, found.arrays[name].dtype) == (array.shape, array.dtype)
        assert found.arrays[name].tobytes() == array.tobytes()


@both
def test_views_that_are_not_contiguous_are_written_as_they_look(through: Callable[[Part], Part]) -> None:
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = through(Part({"turned": whole.T, "some": whole[:, 1::2]}))
    assert (found.arrays["turned"] == whole.T).all()
    assert (found.arrays["some"] == whole[:, 1::2]).all()


def test_an_array_that_lies_contiguous_is_not_copied_before_it_is_written() -> None:
    array = np.zeros(3, np.float32)
    *_, values = to_buffers(Part({"a": array}))
    array[:] = 1.0
    assert bytes(values) == array.tobytes()


def test_arrays_are_found_by_the_beginning_of_their_names() -> None:
    part = Part({"parameters.a": np.zeros(1), "parameters.b": np.ones(1), "random.a": np.zeros(2)})
    assert part.beginning("parameters.").keys() == {"a", "b"}


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a part of a commit"):
        from_bytes(content)


def test_torn_bytes_are_refused() -> None:
    content = to_bytes(Part({"a": np.zeros(400, np.float32)}, {"b": 1}))
    for length in range(0, len(content), 97):
        with pytest.raises(ValueError, match="not a part of a commit"):
            from_bytes(content[:length])


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Bird:
        def __reduce__(self) -> object:
            return Path.touch, (canary,)

    with pytest.raises(ValueError, match="not a part of a commit"):
        from_bytes(pickle.dumps(Bird()))
    assert not canary.exists()
