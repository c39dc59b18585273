"""The names that `ps` and `collective` export for Paddle programs; known without importing Paddle."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from common.paddle_api.communication import COMMUNICATION

__all__ = ["PUBLIC", "SERVER_SIDE", "missing_name"]

PUBLIC = (
    *COMMUNICATION,
    "DataParallel",
    "DistributedStrategy",
    "ParallelEnv",
    "ReduceOp",
    "destroy_process_group",
    "distributed_model",
    "distributed_optimizer",
    "distributed_scaler",
    "get_rank",
    "get_world_size",
    "init",
    "init_parallel_env",
    "is_first_worker",
    "is_initialized",
    "spawn",
    "worker_index",
    "worker_num",
)

# Of Paddle's removed parameter server; `ps` only.
SERVER_SIDE = (
    "PaddleCloudRoleMaker",
    "UserDefinedRoleMaker",
    "init_server",
    "init_worker",
    "is_server",
    "is_worker",
    "run_server",
    "stop_worker",
)


def missing_name(module: str, name: str, known: Sequence[str]) -> AttributeError:
    """The error for a name that a module does not have. One that it has is named only where it may well be meant: to
    somebody who looks for `shard_optimizer`, `distributed_optimizer` would be no help."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    hint = f"the nearest it has is {near[0]!r}" if near else f"dir({module}) lists what it has"
    return AttributeError(f"module {module!r} has no attribute {name!r}; {hint}")
