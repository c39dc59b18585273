"""A server's state as a state machine, and which slice it owns."""

__all__: list[str] = []
