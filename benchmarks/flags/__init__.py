"""The flags of each verb."""

__all__: list[str] = []
