"""Groups of hundreds of NumPy ranks on this machine: how they come together, what each holds, how a death is named."""

__all__: list[str] = []
