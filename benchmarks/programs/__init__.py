"""Public programs of others, run under Paddle's own groups and under both schemes."""

__all__: list[str] = []
