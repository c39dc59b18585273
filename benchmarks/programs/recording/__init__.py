"""A folder for the front of PYTHONPATH: Python itself imports its `sitecustomize` before a program."""

__all__: list[str] = []
