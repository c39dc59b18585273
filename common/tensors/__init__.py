"""The flat buffers, how they are cut, summed and updated: pure functions, NumPy, and Paddle's own optimizers.

The canonical order of summation is in reduction.py.
"""

__all__: list[str] = []
