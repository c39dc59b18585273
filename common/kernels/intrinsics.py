"""What kernels do that Numba's Python cannot say: memory by address, memory order, pauses, calls of C functions.

Addresses are int64. Numba makes machine code of these where a kernel calls them; Python cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

__all__ = [
    "call",
    "call_1",
    "call_3",
    "fence",
    "load",
    "load_acquire",
    "load_int",
    "one_by_one",
    "part",
    "pause",
    "store",
    "store_release",
    "stream",
]

WORD = ir.IntType(64)
F = TypeVar("F", bound=Callable[..., Any])
part: Callable[[F], F] = register_jitable  # of a kernel: a function that it calls, which LLVM moves into it


def pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, WORD.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def load(_: Any, address: Any) -> Any:
    """The word there."""

    def build(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.load(pointer(builder, args[0]))

    return types.int64(address), build


@intrinsic  # type: ignore[untyped-decorator]
def load_int(_: Any, address: Any) -> Any:
    """The 32 bits there, as a word."""

    def build(_: Any, builder: Any, __: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        return builder.sext(builder.load(place), WORD)

    return types.int64(address), build


@intrinsic  # type: ignore[untyped-decorator]
def store(_: Any, address: Any, value: Any) -> Any:
    """Write a word there."""

    def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0]))
        return context.get_dummy_value()

    return types.void(address, value), build


@intrinsic  # type: ignore[untyped-decorator]
def stream(_: Any, address: Any, source: Any) -> Any:
    """Copy the 32 bytes at `source` to an address that is a multiple of 32, past the cache: lines that are written
    whole are not read before. Ordered by `fence` only."""

    def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(64), 4).as_pointer()
        values = builder.load(builder.inttoptr(args[1], vector), align=1)
        written = builder.store(values, builder.inttoptr(args[0], vector), align=32)
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(address, source), build


@intrinsic  # type: ignore[untyped-decorator]
def load_acquire(_: Any, address: Any) -> Any:
    """The word there; what its writer wrote before it with `store_release` is seen from now on."""

    def build(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.load_atomic(pointer(builder, args[0]), "acquire", 8)

    return types.int64(address), build


@intrinsic  # type: ignore[untyped-decorator]
def store_release(_: Any, address: Any, value: Any) -> Any:
    """Write a word there, after all that was written before."""

    def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
        builder.store_atomic(args[1], pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(address, value), build


@intrinsic  # type: ignore[untyped-decorator]
def fence(_: Any) -> Any:
    """Nothing that is read after it is read before what was written before it is seen."""

    def build(context: Any, builder: Any, _: Any, __: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), build


@intrinsic  # type: ignore[untyped-decorator]
def one_by_one(_: Any) -> Any:
    """In a loop: keeps LLVM from doing several rounds at once, for which it would need tables outside the code."""

    def build(context: Any, builder: Any, _: Any, __: Any) -> Any:
        builder.fence("seq_cst", targetscope="singlethread")  # no instruction
        return context.get_dummy_value()

    return types.void(), build


@intrinsic  # type: ignore[untyped-decorator]
def pause(_: Any) -> Any:
    """Tell the processor that it waits for another one. Here it is code that does nothing, in which compiler.py writes
    the instruction of the processor that it compiles for."""

    def build(context: Any, builder: Any, _: Any, __: Any) -> Any:
        builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)
        return context.get_dummy_value()

    return types.void(), build


def called(builder: Any, function: Any, arguments: Any) -> Any:
    kind = ir.FunctionType(WORD, [WORD] * len(arguments))
    return builder.call(builder.inttoptr(function, kind.as_pointer()), arguments, attrs=["nounwind"])


@intrinsic  # type: ignore[untyped-decorator]
def call(_: Any, function: Any) -> Any:
    """Call the C function at that address."""
    return types.int64(function), lambda _, builder, __, args: called(builder, args[0], [])


@intrinsic  # type: ignore[untyped-decorator]
def call_1(_: Any, function: Any, a: Any) -> Any:
    return types.int64(function, a), lambda _, builder, __, args: called(builder, args[0], args[1:])


@intrinsic  # type: ignore[untyped-decorator]
def call_3(_: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    return types.int64(function, a, b, c), lambda _, builder, __, args: called(builder, args[0], args[1:])
