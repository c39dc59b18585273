"""Commits: the state of a training in a folder, whole or not there at all, from which the same bits go on."""

__all__: list[str] = []
