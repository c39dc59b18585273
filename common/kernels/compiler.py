"""From a kernel's name to machine code: `python -m common.kernels.compiler FOLDER NAME...` writes FOLDER/NAME.code.

Only this process needs Numba and LLVM, which would cost every rank 0.5 s and 115 MB. The code is what Numba makes of a
plain loop, vectorised for this processor, without fast-math and without contraction: each addition and each
multiplication rounds by itself, as NumPy's do. It calls nothing and refers to nothing outside itself, so that it can
lie anywhere; `machine_code` refuses any that does not.

Every kernel has Numba's own calling convention, int f(void *unused, void *unused, arguments...), and returns 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from common.kernels.names import NEW, Reduce

__all__ = ["machine_code", "main", "target_machine"]

OPTIONS = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


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


def reduce_loop(kernel: Reduce) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """A loop and its argument types: (addresses of the inputs and new outputs, number of elements, factor)."""
    arrays = kernel.inputs + kernel.outputs.count(NEW)
    new = iter(range(kernel.inputs, arrays))
    outputs = [next(new) if number == NEW else number for number in kernel.outputs]
    value = getattr(types, kernel.dtype)

    @intrinsic  # type: ignore[untyped-decorator]
    def addresses(_: Any, table: Any) -> Any:
        """Read before the loop: within it they might be changed by what it writes, for all that LLVM knows."""
        kind = types.UniTuple(types.int64, arrays)

        def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
            word = ir.IntType(64)
            first = builder.inttoptr(args[0], word.as_pointer())
            return context.make_tuple(
                builder, kind, [builder.load(builder.gep(first, [word(k)])) for k in range(arrays)]
            )

        return kind(table), build

    @intrinsic  # type: ignore[untyped-decorator]
    def reduction(_: Any, where: Any, i: Any) -> Any:
        def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
            pointers = cgutils.unpack_tuple(builder, args[0])[: kernel.inputs]
            found, *following = [builder.load(element(context, builder, p, args[1], value)) for p in pointers]
            for each in following:
                found = combined(builder, kernel, found, each)
            return found

        return value(where, i), build

    @intrinsic  # type: ignore[untyped-decorator]
    def write(_: Any, where: Any, i: Any, result: Any) -> Any:
        def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
            pointers = cgutils.unpack_tuple(builder, args[0])
            for number in outputs:
                builder.store(args[2], element(context, builder, pointers[number], args[1], value))
            return context.get_dummy_value()

        return types.void(where, i, result), build

    def plain(table: Any, count: Any, _: Any) -> None:
        where = addresses(table)
        for i in range(count):
            write(where, i, reduction(where, i))

    def scaled(table: Any, count: Any, factor: Any) -> None:
        where = addresses(table)
        for i in range(count):
            write(where, i, reduction(where, i) * factor)

    return scaled if kernel.op == "mean" else plain, (types.int64, types.int64, value)


def target_machine(triple: str = "", cpu: str = "", features: str = "") -> llvm.TargetMachine:
    """Of this machine, unless another is named."""
    target = llvm.Target.from_triple(triple) if triple else llvm.Target.from_default_triple()
    if not triple:
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small")


def machine_code(name: str, machine: llvm.TargetMachine) -> bytes:
    """
    Raises:
        ValueError: the code refers to something outside itself.
    """
    loop, argument_types = reduce_loop(Reduce.of(name))
    compiled = njit(**OPTIONS)(loop)
    compiled.compile(argument_types)
    module = llvm.parse_assembly(compiled.inspect_llvm(argument_types))
    sections = {
        section.name(): section.data()
        for section in llvm.ObjectFileRef.from_data(machine.emit_object(module)).sections()
    }
    outside = [str(key) for key in sections if key and (key.startswith((b".rel", b".rodata", b".data", b".bss")))]
    if outside:
        raise ValueError(f"the code of {name} is not by itself: it has {', '.join(outside)}")
    code: bytes = sections[b".text"]
    return code


def main(arguments: Sequence[str]) -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    folder, machine = Path(arguments[0]), target_machine()
    for path in map(folder.joinpath, arguments[1:]):
        part = path.with_suffix(f".{os.getpid()}")  # seen by nobody before it is whole
        part.write_bytes(machine_code(path.name.partition(".")[0], machine))
        part.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
