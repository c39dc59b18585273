"""What goes wrong on purpose: cases with real processes, and a simulated network around the servers' state."""

__all__: list[str] = []
