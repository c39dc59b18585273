"""How ranks of one host meet: each posts a note, and goes on when all have come. In one of two ways, the same for all:

compiled.py     one call of machine code, which looks for the others before it sleeps
semaphores.py   semaphores of the C library: where a rank cannot have compiled code
"""

__all__: list[str] = []
