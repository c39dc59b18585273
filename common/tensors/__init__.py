"""The flat buffers, how they are cut, summed and updated: pure functions, NumPy, and Paddle's own optimizers.

The canonical order of summation is in canonical_order.py.
"""

__all__: list[str] = []
