"""What GradSync asks of the machine: memory, processes, addresses."""

__all__: list[str] = []
