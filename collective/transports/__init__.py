"""How bytes move between ranks, and who is alive."""

__all__: list[str] = []
