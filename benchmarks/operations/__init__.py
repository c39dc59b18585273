"""Collective operations and rounds that are measured."""

__all__: list[str] = []
