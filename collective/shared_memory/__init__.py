"""Ranks of one host: what they share, where they meet, and how they reduce straight out of each other's memory."""

__all__: list[str] = []
