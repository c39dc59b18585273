"""Proves that both schemes compute the same, then measures them side by side."""

__all__: list[str] = []
