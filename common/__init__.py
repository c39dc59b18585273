"""What both schemes share: errors, configuration, memory, plans, the training step and process control."""

__version__ = "0.1.0"
__all__ = ["__version__"]
