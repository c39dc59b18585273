"""Who belongs to a job, and how its processes prove it to each other: one description for every connection."""

__all__: list[str] = []
