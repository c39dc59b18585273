"""What every measurement has in common: rounds, turns within a job, Ctrl-C, writing; a verb fills in the rest."""

__all__: list[str] = []
