"""How the ranks carry out a collective operation together."""

__all__: list[str] = []
