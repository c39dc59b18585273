"""NCCL on GPUs, through CuPy or pynccl."""

__all__: list[str] = []
