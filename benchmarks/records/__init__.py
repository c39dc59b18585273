"""Result files, the machine they are of, and progress."""

__all__: list[str] = []
