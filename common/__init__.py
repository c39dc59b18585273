"""What both schemes share: errors, configuration, memory, plans, the training step and process control."""

import os

__version__ = "0.1.0"
__all__ = ["__version__"]

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when gRPC is imported: its errors reach the user as ours
