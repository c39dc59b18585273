"""The flat buffers, how they are cut, summed and updated: pure functions, NumPy, and Paddle's own optimizers."""

__all__: list[str] = []
