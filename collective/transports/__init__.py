"""How arrays move between ranks: over TCP, or between threads."""

__all__: list[str] = []
