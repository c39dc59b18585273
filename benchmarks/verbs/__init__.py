"""One module for each verb of `python -m benchmarks`."""

__all__: list[str] = []
