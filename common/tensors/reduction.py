"""Sums, means and maxima of all ranks' arrays, added in the order they are given: that of canonical_order.py."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from common.kernels.loader import Loop, reduce_kernel
from common.kernels.names import NEW, Reduce
from common.tensors.buckets import pieces_of
from common.tensors.canonical_order import runs_of_chunks

__all__ = [
    "DTYPES",
    "MOST_INPUTS",
    "OPS",
    "WORTH_PREPARING",
    "Reduction",
    "all_finite",
    "mean_scale",
    "piece_reducer",
    "reduce_bucket",
    "reduce_piece",
]

OPS = ("sum", "mean", "max")
DTYPES = ("float32", "float64", "float16", "int32", "int64")

BLOCK = 32_768  # elements NumPy sums at a time: 128 KiB of float32, so that the running sum stays in L2
WORTH_PREPARING = 1 << 16  # bytes of an input; finding a loop for shorter ones takes longer than NumPy (10 us)
MOST_INPUTS = 16  # of a compiled loop, which compares the places of all its arrays before it begins

Values = npt.NDArray[Any]
_loops: dict[Reduce, Loop | None] = {}  # None: it cannot be had
Blocks = list[tuple[list[Values], list[Values]]]  # inputs and outputs


def mean_scale(nranks: int, dtype: npt.DTypeLike) -> Any:
    """1/N rounded once to `dtype`; what a sum is multiplied by to become a mean."""
    scale: Any = np.asarray(1.0 / nranks).astype(dtype)[()]
    return scale


@dataclass(frozen=True, eq=False)
class Reduction:
    """What one op means for arrays of one dtype; made by `Reduction.of`, which returns the same object again.

    sum and mean: integers wrap, there is no mean of them. max: NaN if any rank's is. A NaN's sign and payload are not
    defined: the processor takes the first operand's, and compilers exchange operands.
    """

    number: int  # another one for every dtype and op: ranks that differ must not add up
    combine: np.ufunc  # of a partial result and the next rank's values, in this order
    partial: np.dtype[Any]  # of partial results
    widens: bool  # whether that is not the arrays' own dtype
    scale: npt.NDArray[Any] | None  # what the complete sum is multiplied by, 0-d: quicker than a NumPy scalar

    @staticmethod
    @cache
    def of(op: str, dtype: np.dtype[Any], nranks: int) -> Reduction:
        """
        Raises:
            ValueError, TypeError: the op or dtype is none of OPS and DTYPES, or it is a mean of integers.
        """
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)} (got {op!r})")
        if dtype.name not in DTYPES or not dtype.isnative:
            got = dtype.name if dtype.isnative else f"{dtype.str}, the other byte order"
            raise TypeError(f"dtype must be one of {', '.join(DTYPES)} (got {got})")
        if op == "mean" and dtype.kind == "i":
            raise ValueError(f"the mean of integers is not an integer (got {dtype.name}); use op='sum'")
        partial: np.dtype[Any] = np.dtype(np.float32) if dtype == np.float16 else dtype
        return Reduction(
            number=DTYPES.index(dtype.name) * len(OPS) + OPS.index(op),
            combine=np.maximum if op == "max" else np.add,
            partial=partial,
            widens=partial != dtype,
            scale=np.array(mean_scale(nranks, partial)) if op == "mean" else None,
        )

    def reduce(self, inputs: Sequence[Values], outputs: Sequence[Values]) -> None:
        """Write the complete result to every output; arguments as of `prepared`."""
        if inputs[0].nbytes < WORTH_PREPARING:
            self._with_numpy(inputs, outputs)()
        else:
            self.prepared(inputs, outputs)()

    def prepared(self, inputs: Sequence[Values], outputs: Sequence[Values]) -> Callable[[], object]:
        """What writes the complete result to every output, as often as it is called.

        Args:
            inputs: the values of two or more ranks, 1-D and of equal length, in canonical order.
            outputs: likewise 1-D. Each is one of the inputs itself, or overlaps none of them.
        """
        return self._compiled(inputs, outputs) or self._with_numpy(inputs, outputs)

    def watched(self, arrays: Sequence[Values]) -> Callable[[], Sequence[int]]:
        """As `prepared`, of a mean of floats, with the arrays for inputs and outputs: each time it also tells which of
        them (by their numbers here) had a value that is not finite."""
        plain = not self.widens and all(map(is_plain, arrays))
        loop = self._loop(len(arrays), tuple(range(len(arrays))), watched=True) if plain else None
        if loop:
            return Watched(loop, arrays, self._factor)
        write = self._with_numpy(arrays, arrays)

        def write_watched() -> Sequence[int]:
            found = [number for number, array in enumerate(arrays) if not all_finite(array)]
            write()
            return found

        return write_watched

    def _with_numpy(self, inputs: Sequence[Values], outputs: Sequence[Values]) -> Callable[[], object]:
        if self.widens or address_of(outputs[0]) in map(address_of, inputs[2:]):
            scratch = np.empty(min(BLOCK, inputs[0].size), self.partial)
            return partial(self._by_numpy, blocks_of(inputs, outputs, scratch))
        return partial(self._by_numpy, blocks_of(inputs, outputs))

    def into(self, inputs: Sequence[Values]) -> Callable[[Values], object]:
        """As `prepared`, of inputs that stay, for one output that is given each time and overlaps none of them."""
        loop = self._loop(len(inputs), (NEW,)) if not self.widens and all(map(is_plain, inputs)) else None
        if loop is None:
            return lambda out: self.reduce(inputs, (out,))
        count, factor = inputs[0].size, self._factor
        table = (ctypes.c_int64 * (len(inputs) + 1))(*map(address_of, inputs))

        def reduce(out: Values) -> None:
            if is_plain(out):
                table[len(inputs)] = address_of(out)
                loop(table, count, factor)
            else:
                self.reduce(inputs, (out,))

        return reduce

    @property
    def op(self) -> str:
        """Of OPS."""
        return OPS[self.number % len(OPS)]

    @property
    def _factor(self) -> float:
        return 1 if self.scale is None else self.scale.item()

    def _compiled(self, inputs: Sequence[Values], outputs: Sequence[Values]) -> Callable[[], object] | None:
        """A loop that reads every input once and writes every output once; None if there is none for them."""
        if self.widens or not all(map(is_plain, (*inputs, *outputs))):
            return None
        places = {address_of(array): number for number, array in enumerate(inputs)}
        written = [address_of(array) for array in outputs]
        loop = self._loop(len(inputs), tuple(places.get(each, NEW) for each in written))
        if loop is None:
            return None
        addresses = [*map(address_of, inputs), *(each for each in written if each not in places)]
        table = (ctypes.c_int64 * len(addresses))(*addresses)
        compiled = Compiled(loop, table, inputs[0].size, self._factor)
        compiled.arrays = inputs, outputs
        return compiled

    def _loop(self, inputs: int, outputs: tuple[int, ...], *, watched: bool = False) -> Loop | None:
        kernel = Reduce(self.op, self.partial.name, inputs, outputs, watched)
        if kernel not in _loops:
            _loops[kernel] = reduce_kernel(kernel) if inputs <= MOST_INPUTS else None
        return _loops[kernel]

    def _by_numpy(self, blocks: Blocks) -> None:
        """Sums are made in the first output, which is none but perhaps the first or second input."""
        for (first, *following), (total, *others) in blocks:
            if self.widens:
                total[...] = first
                first = total
            for array in following:
                self.combine(first, array, out=total)
                first = total
            if self.scale is not None:
                np.multiply(total, self.scale, out=total)
            for out in others:
                out[...] = total


class Compiled(partial[object]):
    """A compiled loop over certain arrays, which it keeps alive."""

    arrays: object


class Watched:
    """A compiled loop over certain arrays, that tells which of them had a value that is not finite."""

    def __init__(self, loop: Loop, arrays: Sequence[Values], factor: float) -> None:
        self._arrays, self._loop, self._count, self._factor = arrays, loop, arrays[0].size, factor
        self._table = (ctypes.c_int64 * (len(arrays) + 1))(*map(address_of, arrays))

    def __call__(self) -> Sequence[int]:
        self._loop(self._table, self._count, self._factor)
        told = self._table[-1]
        return [number for number in range(len(self._arrays)) if told >> number & 1] if told else ()


def all_finite(values: Values) -> bool:
    """Whether there is neither NaN nor infinity in a 1-D array."""
    with np.errstate(all="ignore"):  # one pass at the memory's speed; squares cannot cancel out
        squares = np.dot(values, values)
    return math.isfinite(squares) or bool(np.isfinite(values).all())  # they may overflow


def is_plain(array: Values) -> bool:
    return array.flags.c_contiguous and array.flags.aligned


def address_of(array: Values) -> int:
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # a quarter of the time of the other way
    except (TypeError, ValueError):  # read-only, or empty
        where: int = array.__array_interface__["data"][0]
        return where


def blocks_of(inputs: Sequence[Values], outputs: Sequence[Values], scratch: Values | None = None) -> Blocks:
    """The same arrays, block by block, so that what was just summed is still in the cache; the scratch array as the
    first output, if given, is used by all blocks."""
    found = []
    for a, b in pieces_of(0, inputs[0].size, BLOCK):
        first = [] if scratch is None else [scratch[: b - a]]
        found.append(([x[a:b] for x in inputs], first + [x[a:b] for x in outputs]))
    return found


def reduce_bucket(
    sources: Sequence[npt.NDArray[Any]],
    out: npt.NDArray[Any],
    *,
    bucket_start: int,
    bucket_length: int,
    start: int,
    stop: int,
) -> None:
    """Write the mean over ranks of elements start..stop of a bucket into the same elements of `out`.

    Args:
        sources: one 1-D array a rank, indexed like the arena.
        out: 1-D, indexed like the arena; may be one of the sources.
        bucket_start, bucket_length: the whole bucket, which fixes the chunks, also where only a part of it
            (one server's slice) is reduced.
    """
    nranks = len(sources)
    if nranks == 1:
        out[start:stop] = sources[0][start:stop]
        return
    mean = Reduction.of("mean", out.dtype, nranks)
    for order, i, j in runs_of_chunks(bucket_start, bucket_length, nranks, start, stop):
        mean.reduce([sources[rank][i:j] for rank in order], [out[i:j]])


def reduce_piece(
    sources: Sequence[npt.NDArray[Any]],
    out: npt.NDArray[Any],
    *,
    bucket_start: int,
    bucket_length: int,
    start: int,
    stop: int,
) -> None:
    """As `reduce_bucket`, but `out` (float32 or float64) has stop - start elements and is none of the sources: sums are
    made there, all at once. Two threads that do this would wait for each other's GIL more often with smaller blocks."""
    nranks = len(sources)
    if nranks == 1:
        out[...] = sources[0][start:stop]
        return
    mean = Reduction.of("mean", out.dtype, nranks)
    for order, i, j in runs_of_chunks(bucket_start, bucket_length, nranks, start, stop):
        mean.reduce([sources[rank][i:j] for rank in order], [out[i - start : j - start]])


def piece_reducer(
    sources: Sequence[npt.NDArray[Any]], *, bucket_start: int, bucket_length: int, start: int, stop: int
) -> Callable[[Values], object]:
    """What does as `reduce_piece` each time that it is given an `out`, of sources that stay. Not thread-safe."""
    nranks = len(sources)
    if nranks == 1:
        return lambda out: np.copyto(out, sources[0][start:stop])
    mean = Reduction.of("mean", sources[0].dtype, nranks)
    runs = [
        (slice(i - start, j - start), mean.into([sources[rank][i:j] for rank in order]))
        for order, i, j in runs_of_chunks(bucket_start, bucket_length, nranks, start, stop)
    ]

    def reduce(out: Values) -> None:
        for run, into in runs:
            into(out[run])

    return reduce
