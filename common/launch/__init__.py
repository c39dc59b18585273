"""Command lines, settings and the processes of a job."""

__all__: list[str] = []
