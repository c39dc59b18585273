"""From a kernel's name to machine code: `python -m common.kernels.compiler FOLDER NAME...` writes FOLDER/NAME.code.

Only this process needs Numba and LLVM, which would cost every rank 0.5 s and 115 MB. The code is what Numba makes of a
plain loop, vectorised for this processor, without fast-math and without contraction: each addition and each
multiplication rounds by itself, as NumPy's do. It refers to nothing outside itself, and calls only C functions whose
addresses it is given, so that it can lie anywhere; `machine_code` refuses any that does not.

Kernels of a table have the convention int f(int64 table), REPEAT that of METH_FASTCALL, PyObject *f(PyObject *self,
PyObject *const *arguments, Py_ssize_t count), and the others Numba's own, int f(void *unused, void *unused,
arguments...). An int is always 0.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from numba import njit, types

from common.kernels import meeting, whole_calls
from common.kernels.copy_lines import copy_lines
from common.kernels.mix_rows import mix_and_look, mix_rows
from common.kernels.names import COPY, MEETING, MIX, MIX_AND_LOOK, REPEAT, WAYS, Reduce, Whole
from common.kernels.reduce_loop import reduce_loop
from common.kernels.repeat import repeat

__all__ = ["machine_code", "main", "target_machine"]

OPTIONS = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


NO_PAUSE = re.compile(r'call void asm sideeffect "", "[^"]*"\(\)(?: #\d+)?')  # what intrinsics.pause writes
PAUSES = {
    "x86_64": ("call void @llvm.x86.sse2.pause()", "\ndeclare void @llvm.x86.sse2.pause()\n"),
    "aarch64": ("call void @llvm.aarch64.hint(i32 1)", "\ndeclare void @llvm.aarch64.hint(i32)\n"),
}

OF_A_TABLE = (types.int64,)  # the arguments of such kernels
NUMBAS = re.compile(r"(?m)^define (.*i32 @\S+?)\((\S.*?) noalias .*%retptr, (\S.*?) noalias .*%excinfo, i64 ")
BY_TABLE = """
define i32 @by_table(i64 %table) {{
  %unused = alloca {pointees[0]}
  %other = alloca {pointees[1]}
  %status = call i32 @{name}({types[0]} %unused, {types[1]} %other, i64 %table)
  ret i32 %status
}}

"""
BY_PYTHON = """
define i64 @by_python(i64 %self, i64 %arguments, i64 %count) {{
  %place = alloca i64
  %unused = alloca {pointees[1]}
  %status = call i32 @{name}({types[0]} %place, {types[1]} %unused, i64 %self, i64 %arguments, i64 %count)
  %found = load i64, {types[0]} %place
  ret i64 %found
}}

"""


def kernel_of(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What is compiled, and the types of its arguments."""
    way = name.partition("-")[0]
    if name in MEETING:
        return getattr(meeting, name), OF_A_TABLE
    if name == REPEAT:
        return repeat, (types.int64, types.int64, types.int64)
    if name == COPY:
        return copy_lines, (types.int64, types.int64, types.int64)
    if name in (MIX, MIX_AND_LOOK):
        return mix_rows if name == MIX else mix_and_look, (types.int64, types.int64, types.int64, types.int64)
    if way in WAYS:
        return getattr(whole_calls, way)(Whole.of(name)), OF_A_TABLE
    return reduce_loop(Reduce.of(name))


def target_machine(triple: str = "", cpu: str = "", features: str = "") -> llvm.TargetMachine:
    """Of this machine, unless another is named."""
    target = llvm.Target.from_triple(triple) if triple else llvm.Target.from_default_triple()
    if not triple:
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small")


def for_machine(code: str, machine: llvm.TargetMachine) -> str:
    """LLVM's text for that kind of machine: with its instruction where a kernel waits for another processor, and with
    functions that the kernel calls as parts of it, which LLVM then moves into it."""
    code = re.sub(r"(?m)^target triple = .*$", f'target triple = "{machine.triple}"', code)
    code = re.sub(r"(?m)^target datalayout = .*$", f'target datalayout = "{machine.target_data}"', code)
    code = code.replace("define linkonce_odr", "define internal")
    call, declaration = PAUSES.get(machine.triple.partition("-")[0], ("", ""))
    return NO_PAUSE.sub(call, code) + declaration if call else code


def entered(code: str, convention: str) -> str:
    """LLVM's text of a kernel that is called in one of these ways: with a table alone, since ctypes takes 0.1 us for
    each argument; or by Python."""
    found = NUMBAS.search(code)
    assert found, "Numba's own function comes first"
    name, types = found[1].rpartition("@")[2], found.group(2, 3)
    pointees = [kind[:-1] if kind.endswith("*") else "i64" for kind in types]  # of an opaque pointer: anything
    entry = convention.format(name=name, types=types, pointees=pointees)  # first: code is called at its beginning
    return code.replace(f"define {found[1]}(", f"{entry}define internal {found[1]}(", 1)


def machine_code(name: str, machine: llvm.TargetMachine) -> bytes:
    """
    Raises:
        ValueError: the code refers to something outside itself.
    """
    loop, argument_types = kernel_of(name)
    compiled = njit(**OPTIONS)(loop)
    compiled.compile(argument_types)
    code = for_machine(compiled.inspect_llvm(argument_types), machine)
    if name == REPEAT or argument_types == OF_A_TABLE:
        code = entered(code, BY_PYTHON if name == REPEAT else BY_TABLE)
    module = llvm.parse_assembly(code)
    optimiser = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    optimiser.getModulePassManager().run(module, optimiser)
    sections = {
        section.name(): section.data()
        for section in llvm.ObjectFileRef.from_data(machine.emit_object(module)).sections()
    }
    outside = [str(key) for key in sections if key and (key.startswith((b".rel", b".rodata", b".data", b".bss")))]
    if outside:
        raise ValueError(f"the code of {name} is not by itself: it has {', '.join(outside)}")
    made: bytes = sections[b".text"]
    return made


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
