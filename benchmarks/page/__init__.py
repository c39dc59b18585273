"""The pieces that every report is made of."""

__all__: list[str] = []
