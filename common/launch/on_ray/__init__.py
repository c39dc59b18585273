"""A job whose processes run on the nodes of a cluster of Ray's: `--engine ray`."""

__all__: list[str] = []
