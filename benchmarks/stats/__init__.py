"""How sure a figure is."""

__all__: list[str] = []
