"""The loops of reductions: N inputs are read once each, every output is written once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from common.kernels.names import NEW, Reduce

__all__ = ["addresses_of", "reduce_loop", "reduction_of", "terms_of", "value_at", "write_to"]


def combined(builder: Any, kernel: Reduce, a: Any, b: Any) -> Any:
    """Of a partial result and the next input's value, in this order; of two equal values max takes the second, and a
    NaN where there is one, as NumPy on x86-64."""
    is_float = kernel.dtype.startswith("float")
    if kernel.op != "max":
        return builder.fadd(a, b) if is_float else builder.add(a, b)
    if not is_float:
        return builder.select(builder.icmp_signed(">", a, b), a, b)
    first = builder.or_(builder.fcmp_ordered(">", a, b), builder.fcmp_unordered("uno", a, a))
    return builder.select(first, a, b)


def element(context: Any, builder: Any, address: Any, i: Any, dtype: Any) -> Any:
    """A pointer to element i of the array at that address."""
    return builder.gep(builder.inttoptr(address, context.get_data_type(dtype).as_pointer()), [i])


def value_at(dtype: str) -> Any:
    """An intrinsic: the value at an address."""
    value = getattr(types, dtype)

    @intrinsic  # type: ignore[untyped-decorator]
    def value_there(_: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
            return builder.load(element(context, builder, args[0], ir.IntType(64)(0), value))

        return value(address), build

    return value_there


def reduction_of(kernel: Reduce) -> Any:
    """An intrinsic: of element i of the inputs, whose addresses are the first in a tuple."""
    value = getattr(types, kernel.dtype)

    @intrinsic  # type: ignore[untyped-decorator]
    def reduction(_: Any, where: Any, i: Any) -> Any:
        def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
            pointers = cgutils.unpack_tuple(builder, args[0])[: kernel.inputs]
            found, *following = [builder.load(element(context, builder, p, args[1], value)) for p in pointers]
            for each in following:
                found = combined(builder, kernel, found, each)
            return found

        return value(where, i), build

    return reduction


def write_to(outputs: Sequence[int], dtype: str) -> Any:
    """An intrinsic: write a value to element i of the arrays of these numbers in a tuple of addresses."""
    value = getattr(types, dtype)

    @intrinsic  # type: ignore[untyped-decorator]
    def write(_: Any, where: Any, i: Any, result: Any) -> Any:
        def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
            pointers = cgutils.unpack_tuple(builder, args[0])
            for number in outputs:
                builder.store(args[2], element(context, builder, pointers[number], args[1], value))
            return context.get_dummy_value()

        return types.void(where, i, result), build

    return write


def watch_of(kernel: Reduce) -> Any:
    """An intrinsic: of what was seen so far of each input, and of its element i. A number minus itself is zero, all
    bits of it, unless it is not finite; then all bits of the exponent are set. (This needs no constants, which LLVM
    would keep apart from the code.)"""
    value = getattr(types, kernel.dtype)
    kind = seen_of(kernel)

    @intrinsic  # type: ignore[untyped-decorator]
    def watch(_: Any, seen: Any, where: Any, i: Any) -> Any:
        def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
            pointers = cgutils.unpack_tuple(builder, args[1])[: kernel.inputs]
            every = [builder.load(element(context, builder, pointer, args[2], value)) for pointer in pointers]
            rests = [builder.bitcast(builder.fsub(each, each), context.get_data_type(kind.dtype)) for each in every]
            found = map(builder.or_, cgutils.unpack_tuple(builder, args[0]), rests)
            return context.make_tuple(builder, kind, found)

        return kind(seen, where, i), build

    return watch


def seen_of(kernel: Reduce) -> Any:
    """The type of what is seen."""
    return types.UniTuple(types.int32 if kernel.dtype == "float32" else types.int64, kernel.inputs)


def nothing_of(kernel: Reduce) -> Any:
    """An intrinsic: nothing was seen so far."""
    kind = seen_of(kernel)

    @intrinsic  # type: ignore[untyped-decorator]
    def nothing(_: Any) -> Any:
        def build(context: Any, builder: Any, _: Any, __: Any) -> Any:
            return context.make_tuple(builder, kind, [context.get_data_type(kind.dtype)(0)] * kernel.inputs)

        return kind(), build

    return nothing


def note_in(kernel: Reduce) -> Any:
    """An intrinsic: the word after a table's addresses becomes what was seen, a bit for each input."""

    @intrinsic  # type: ignore[untyped-decorator]
    def note(_: Any, table: Any, seen: Any) -> Any:
        def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
            word = ir.IntType(64)
            told = word(0)
            for number, each in enumerate(cgutils.unpack_tuple(builder, args[1])):
                bit = builder.zext(builder.icmp_unsigned("!=", each, each.type(0)), word)
                told = builder.or_(told, builder.shl(bit, word(number)))
            last = builder.gep(builder.inttoptr(args[0], word.as_pointer()), [word(kernel.inputs)])
            builder.store(told, last)
            return context.get_dummy_value()

        return types.void(table, seen), build

    return note


def terms_of(nranks: int) -> Any:
    """An intrinsic: a tuple of so many addresses, from one on and as far apart as given, and of another one."""
    kind = types.UniTuple(types.int64, nranks + 1)

    @intrinsic  # type: ignore[untyped-decorator]
    def terms(_: Any, area: Any, apart: Any, output: Any) -> Any:
        def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
            places = [builder.add(args[0], builder.mul(args[1], ir.IntType(64)(k))) for k in range(nranks)]
            return context.make_tuple(builder, kind, [*places, args[2]])

        return kind(area, apart, output), build

    return terms


def addresses_of(arrays: int) -> Any:
    """An intrinsic: a table of so many addresses as a tuple, read before the loop: within it they might be changed by
    what it writes, for all that LLVM knows."""
    kind = types.UniTuple(types.int64, arrays)

    @intrinsic  # type: ignore[untyped-decorator]
    def addresses(_: Any, table: Any) -> Any:
        def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
            word = ir.IntType(64)
            first = builder.inttoptr(args[0], word.as_pointer())
            return context.make_tuple(
                builder, kind, [builder.load(builder.gep(first, [word(k)])) for k in range(arrays)]
            )

        return kind(table), build

    return addresses


def reduce_loop(kernel: Reduce) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """A loop and its argument types: (addresses of the inputs and new outputs, number of elements, factor). In the
    table of a watched one another word follows, for what it tells."""
    arrays = kernel.inputs + kernel.outputs.count(NEW)
    new = iter(range(kernel.inputs, arrays))
    outputs = [next(new) if number == NEW else number for number in kernel.outputs]
    reduction, write, addresses = reduction_of(kernel), write_to(outputs, kernel.dtype), addresses_of(arrays)

    def plain(table: Any, count: Any, _: Any) -> None:  # a kernel
        where = addresses(table)
        for i in range(count):
            write(where, i, reduction(where, i))

    def scaled(table: Any, count: Any, factor: Any) -> None:  # a kernel
        where = addresses(table)
        for i in range(count):
            write(where, i, reduction(where, i) * factor)

    nothing, watch, note = nothing_of(kernel), watch_of(kernel), note_in(kernel)

    def watched(table: Any, count: Any, factor: Any) -> None:  # a kernel
        where, seen = addresses(table), nothing()
        for i in range(count):
            seen = watch(seen, where, i)
            write(where, i, reduction(where, i) * factor)
        note(table, seen)

    loop = watched if kernel.watched else scaled if kernel.op == "mean" else plain
    return loop, (types.int64, types.int64, getattr(types, kernel.dtype))
