"""A trainer's side of the parameter server."""

__all__: list[str] = []
