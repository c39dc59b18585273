"""Hot loops as machine code. Numba compiles them, once, in a process of its own; all others map a few hundred bytes.

    names.py      what a kernel is called, and so what it does
    compiler.py   Numba: from a name to machine code
    loader.py     where the code is kept, who compiles, and how it is called

NumPy's way stays beside every kernel and gives the same bits. docs/kernels.md says how to write one.
"""

__all__: list[str] = []
