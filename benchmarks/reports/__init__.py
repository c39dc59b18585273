"""The report of each kind of results."""

__all__: list[str] = []
