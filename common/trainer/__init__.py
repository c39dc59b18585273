"""The built-in training: data, models, steps and the record of a run."""

__all__: list[str] = []
