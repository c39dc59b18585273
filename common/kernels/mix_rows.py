"""A digest of an array, by which a change of it shows, as one call of machine code.

The array is looked at as rows of ROW_BYTES. Each column of words has a state, which every row changes:

    state = (state rotated left by TURN ^ word) * factor, mod 2**64

with an odd factor, so that one changed word always shows. Unlike a sum it also shows values that change places, and
signs that change in pairs. The step is that of the hash which Firefox and rustc use (FxHash).

Where the array is looked at too, SEEN_BYTES follow the states, of which some become other than zero if a float32 of it
is not finite.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from common.kernels.layout import ROW_BYTES

__all__ = ["mix_and_look", "mix_rows"]

LANES, BYTES, TURN = 4, 32, 5
VECTOR = ir.VectorType(ir.IntType(64), LANES)
FLOATS = ir.VectorType(ir.FloatType(), 2 * LANES)


@intrinsic  # type: ignore[untyped-decorator]
def mix(_: Any, state: Any, source: Any, factor: Any) -> Any:
    """One step of the 32 bytes of states at an address that is a multiple of 32, by those at `source`."""

    def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
        place, words = (builder.inttoptr(each, VECTOR.as_pointer()) for each in args[:2])
        before, found = builder.load(place, align=BYTES), builder.load(words, align=8)
        left, right = (ir.Constant(VECTOR, [by] * LANES) for by in (TURN, 64 - TURN))
        turned = builder.or_(builder.shl(before, left), builder.lshr(before, right))
        one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), args[2], ir.IntType(32)(0))
        every = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        factors = builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), every)
        builder.store(builder.mul(builder.xor(turned, found), factors), place, align=BYTES)
        return context.get_dummy_value()

    return types.void(state, source, factor), build


@intrinsic  # type: ignore[untyped-decorator]
def look(_: Any, seen: Any, row: Any) -> Any:
    """Set bits at an address that is a multiple of 32, if a row has a number that is not finite: only such a one, minus
    itself, is not zero. One or for each row, as each must wait for the one before."""

    def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
        place, found = builder.inttoptr(args[0], VECTOR.as_pointer()), ir.Constant(VECTOR, [0] * LANES)
        for at in range(0, ROW_BYTES, BYTES):
            there = builder.inttoptr(builder.add(args[1], args[1].type(at)), FLOATS.as_pointer())
            values = builder.load(there, align=8)
            found = builder.or_(found, builder.bitcast(builder.fsub(values, values), VECTOR))
        builder.store(builder.or_(builder.load(place, align=BYTES), found), place, align=BYTES)
        return context.get_dummy_value()

    return types.void(seen, row), build


def mix_and_look(states: Any, source: Any, count: Any, factor: Any) -> None:  # a kernel
    """As mix_rows; a sixth slower."""
    for row in range(count):
        look(states + ROW_BYTES, source + row * ROW_BYTES)
        for at in range(0, ROW_BYTES, BYTES):
            mix(states + at, source + row * ROW_BYTES + at, factor)


def mix_rows(states: Any, source: Any, count: Any, factor: Any) -> None:  # a kernel
    """So many rows, from an address that is a multiple of 8, into the states of a row."""
    for row in range(count):
        for at in range(0, ROW_BYTES, BYTES):
            mix(states + at, source + row * ROW_BYTES + at, factor)
