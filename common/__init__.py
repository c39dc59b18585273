"""What both schemes share: errors, configuration, memory, plans, the training step and process control."""

import os

__version__ = "0.1.0"
__all__ = ["__version__"]

# Both are read when gRPC is imported. Its errors reach the user as ours; and its own handlers for fork, with which a
# fork takes a second or hangs and some children die of SIGSEGV, stay off: hence common.network.rpc.let_go.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
