"""Hosts and links emulated on this machine."""

__all__: list[str] = []
