"""What goes wrong on purpose: cases with real processes, and simulations of servers and of a ring."""

__all__: list[str] = []
