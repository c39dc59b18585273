"""Compiled loops: the same bits as NumPy's, found again, compiled once, and done without where they cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path
from unittest.mock import patch

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UsageError
from common.kernels import loader
from common.kernels.compiler import machine_code, target_machine
from common.kernels.names import COPY, MIX, MIX_AND_LOOK, NEW, REPEAT, Reduce
from common.tensors import reduction as module
from common.tensors.reduction import Compiled, Reduction, Watched
from tests.support.groups import ROOT, assert_same_bits
from tests.support.thorough import examples

KINDS = [
    ("mean", "float32", 2),
    ("mean", "float64", 3),
    ("sum", "int32", 2),
    ("sum", "int64", 4),
    ("max", "float32", 4),
]
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, 1.5]
USE = """
import sys
import numpy as np
from common.tensors.reduction import Compiled, Reduction
arrays = [np.full(100, k, np.float32) for k in range(3)]
todo = Reduction.of("sum", arrays[0].dtype, 3).prepared(arrays, arrays)
todo()
print(type(todo) is Compiled, arrays[0][0], "numba" in sys.modules)
"""


@settings(max_examples=examples(60, 600), deadline=None)
@given(st.data(), st.sampled_from(KINDS), st.integers(0, 300), st.integers(0, 3), st.integers(0, 3))
def test_the_same_bits_as_numpy(
    data: st.DataObject, kind: tuple[str, str, int], size: int, offset: int, where: int
) -> None:
    """Any length, any place that an element may have, any of the ways to write; zeros' signs and infinities too."""
    op, dtype, count = kind
    kernel = Reduce(op, dtype, count, ()).siblings()[where]
    seed = data.draw(st.integers(0, 1 << 32))
    values = [values_of(np.random.default_rng([seed, k]), dtype, size) for k in range(count)]
    inputs, expected = ([placed(each, offset + k) for k, each in enumerate(values)] for _ in range(2))
    new, model = placed(values[0], offset), placed(values[0], offset)
    reduction = Reduction.of(op, np.dtype(dtype), count)
    compiled = reduction.prepared(inputs, [new if k == NEW else inputs[k] for k in kernel.outputs])
    assert isinstance(compiled, Compiled), loader.why_not()
    compiled()
    by_numpy(reduction, expected, [model if k == NEW else expected[k] for k in kernel.outputs])
    for mine, theirs in zip([*inputs, new], [*expected, model], strict=True):
        assert_same_bits(canonical_nan(mine), canonical_nan(theirs))


@settings(max_examples=examples(60, 600), deadline=None)
@given(
    st.sampled_from(["float32", "float64"]), st.integers(2, 16), st.integers(0, 300), st.sets(st.integers(0, 15)),
    st.sampled_from([np.nan, -np.nan, np.inf, -np.inf]), st.integers(0, 1 << 32), st.booleans(),
)  # fmt: skip
def test_a_watched_mean_tells_which_inputs_are_not_finite(
    dtype: str, count: int, size: int, spoiled: set[int], value: float, seed: int, compiled: bool
) -> None:
    """By machine code and by NumPy; with the bits of any other mean."""
    values = [np.nan_to_num(values_of(np.random.default_rng([seed, k]), dtype, size)) for k in range(count)]
    for k in spoiled:
        if k < count and size:
            values[k][seed % size] = value
    arrays, expected = ([placed(each, k) for k, each in enumerate(values)] for _ in range(2))
    reduction = Reduction.of("mean", np.dtype(dtype), count)
    with patch.object(Reduction, "_loop", Reduction._loop if compiled else lambda *_, **__: None):
        mean = reduction.watched(arrays)
    assert isinstance(mean, Watched) == compiled, loader.why_not()
    with np.errstate(all="ignore"):
        assert list(mean()) == sorted(k for k in spoiled if k < count and size)
    by_numpy(reduction, expected, expected)
    for mine, theirs in zip(arrays, expected, strict=True):
        assert_same_bits(canonical_nan(mine), canonical_nan(theirs))


@pytest.mark.parametrize("size", [0, 1, 1000])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_inputs_that_stay_for_one_output_after_the_other(kind: tuple[str, str, int], size: int) -> None:
    op, dtype, count = kind
    inputs = [values_of(np.random.default_rng(k), dtype, size) for k in range(count)]
    expected = np.empty(size, dtype)
    reduction = Reduction.of(op, np.dtype(dtype), count)
    by_numpy(reduction, [each.copy() for each in inputs], [expected])
    into = reduction.into(inputs)
    outputs = [placed(inputs[0], 1), placed(inputs[0], 3), np.empty(2 * size, dtype)[::2]]
    with patch.object(Reduction, "reduce", side_effect=AssertionError("not by a compiled loop")):
        for out in outputs[:2]:
            into(out)
    with np.errstate(all="ignore"):
        into(outputs[2])  # not contiguous
    for out in outputs:
        assert_same_bits(canonical_nan(out), canonical_nan(expected))


@pytest.mark.parametrize(
    "values", [np.arange(9, dtype=np.float16), np.arange(18, dtype=np.float32)[::2]], ids=["float16", "not contiguous"]
)
def test_inputs_that_stay_and_have_no_compiled_loop(values: np.ndarray) -> None:
    out = np.empty(9, values.dtype)
    Reduction.of("sum", values.dtype, 2).into([values, values])(out)
    assert_same_bits(out, 2 * values)


def test_a_compiled_loop_keeps_its_arrays() -> None:
    arrays = [np.ones(9, np.float32), np.ones(9, np.float32)]
    kept = [weakref.ref(array) for array in arrays]
    todo = Reduction.of("sum", arrays[0].dtype, 2).prepared(arrays, arrays[1:])
    del arrays
    todo()
    assert all(each() is not None for each in kept)


def values_of(random: np.random.Generator, dtype: str, size: int) -> np.ndarray:
    if dtype.startswith("int"):
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, size, dtype, endpoint=True)
    found = (random.standard_normal(size) * 10.0 ** random.integers(-30, 30, size)).astype(dtype)
    special = random.random(size) < 0.2
    found[special] = random.choice(np.array(SPECIAL, dtype), special.sum())
    return found


def placed(values: np.ndarray, offset: int) -> np.ndarray:
    """A copy that begins `offset` elements after a cache line."""
    found = np.zeros(values.size + 64, values.dtype)
    start = -found.ctypes.data % 64 // values.itemsize + offset
    found[start : start + values.size] = values
    return found[start : start + values.size]


def by_numpy(reduction: Reduction, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
    """With errors of overflow and of infinities that cancel out, which it tells and compiled loops do not, ignored."""
    with np.errstate(all="ignore"):
        total = inputs[0].copy()
        for each in inputs[1:]:
            reduction.combine(total, each, out=total)
        if reduction.scale is not None:
            total *= reduction.scale
    for out in outputs:
        out[...] = total


def canonical_nan(array: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array) if array.dtype.kind == "f" else array


def test_what_has_no_compiled_loop_is_done_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_loops", {})  # as in a new process
    half = [np.ones(9, np.float16)] * 2
    assert not isinstance(Reduction.of("sum", half[0].dtype, 2).prepared(half, half), Compiled)
    arrays = [np.ones(9, np.float32) for _ in range(3)]
    total = Reduction.of("sum", arrays[0].dtype, 3)
    assert not isinstance(total.prepared(arrays, arrays[1:2]), Compiled)
    apart = [array[::2] for array in arrays]
    assert not isinstance(total.prepared(apart, apart), Compiled)
    for count in (16, 17):
        many = [np.ones(9, np.float32) for _ in range(count)]
        todo = total.prepared(many, many[-1:])
        assert isinstance(todo, Compiled) == (count == 16)
        todo()
        assert (many[-1] == count).all()


def test_names_say_what_is_done() -> None:
    kernel = Reduce("mean", "float32", 2, (NEW, 1))
    assert str(kernel) == "mean-float32-of-2-to-new-1"
    for each in (kernel, *kernel.siblings()):
        assert Reduce.of(str(each)) == each


@pytest.mark.parametrize(
    ("triple", "cpu"),
    [
        ("x86_64-unknown-linux-gnu", "skylake-avx512"),
        ("x86_64-unknown-linux-gnu", "znver3"),
        ("aarch64-unknown-linux-gnu", "neoverse-n1"),
    ],
)
def test_code_can_lie_anywhere(triple: str, cpu: str) -> None:
    """`machine_code` refuses what refers to something outside itself. What was made for arm64 was never run."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for kernel in (*Reduce("mean", "float32", 4, ()).siblings(), COPY, MIX, MIX_AND_LOOK, REPEAT):
        assert machine_code(str(kernel), target_machine(triple, cpu))


@pytest.mark.processes
def test_two_processes_compile_once_and_the_next_says_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, loader.CACHE_VARIABLE: str(tmp_path / "kept"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", USE]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    told = [process.communicate(timeout=60) for process in both]
    assert [out for out, _ in told] == ["True 3.0 False\n"] * 2
    compiling, waiting = sorted(err for _, err in told)
    assert compiling == "gradsync: compiling 4 loops for this processor, once\n"
    assert waiting in ("", "gradsync: waiting for the process that compiles loops\n")  # whether it came that early
    again = subprocess.run(command, **pipes, timeout=60, check=True)
    assert (again.stdout, again.stderr) == ("True 3.0 False\n", "")


def test_without_a_folder_of_ones_own_numpy_does_the_work(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    told = use({loader.CACHE_VARIABLE: str(tmp_path)})
    assert told.stdout == "False 3.0 False\n"
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loader.KERNELS_VARIABLE, "of")
    with pytest.raises(UsageError, match="unknown GRADSYNC_KERNELS 'of'; did you mean 'off'"):
        loader.why_not()


@pytest.mark.processes
def test_where_compiling_fails_it_is_said_why_and_numpy_does_the_work(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('broken')")
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    told = use({loader.CACHE_VARIABLE: str(tmp_path / "kept"), "PYTHONPATH": path})
    assert told.stdout == "False 3.0 False\n"
    assert told.stderr.splitlines() == [
        "gradsync: compiling 4 loops for this processor, once",
        "gradsync: NumPy does the sums, with the same bits: compiling loops failed: ImportError: broken",
    ]


def test_kernels_can_be_switched_off() -> None:
    assert use({loader.KERNELS_VARIABLE: "off"}).stdout == "False 3.0 False\n"


def use(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-c", USE], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
