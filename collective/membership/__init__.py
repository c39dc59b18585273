"""How the ranks of a group meet, who is alive, why a rank left, and who is stuck."""

__all__: list[str] = []
