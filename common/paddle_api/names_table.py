"""The table of names: whether a public name of `paddle.distributed` and `paddle.distributed.fleet` of Paddle 3 works,
works differently, or is not supported, in English and Chinese. Errors, `install` and docs/names.md come from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["DISTRIBUTED", "FLEET", "TABLE", "Group", "Source", "State"]

DISTRIBUTED = "paddle.distributed"
FLEET = "paddle.distributed.fleet"


class State(Enum):
    """What a program that uses a name can expect."""

    WORKS = "works"
    DIFFERS = "works differently"
    REFUSED = "not supported"


class Source(Enum):
    """Who has what stands behind a name."""

    OURS = "both schemes have their own"
    SERVERS = "only ps has its own"
    PADDLE = "Paddle's own, which needs no group"
    NOBODY = "calling it raises an error"


@dataclass(frozen=True)
class Group:
    """Names of one module of which the same is to be said.

    Args:
        words: how they differ, or why they are not supported and what to do; "" of what works.
        chinese: the same words in Chinese.
    """

    module: str
    state: State
    source: Source
    names: tuple[str, ...]
    words: str = ""
    chinese: str = ""


def works(module: str, names: str, source: Source = Source.OURS) -> Group:
    return Group(module, State.WORKS, source, tuple(names.split()))


def differs(module: str, names: str, source: Source, words: str, chinese: str) -> Group:
    return Group(module, State.DIFFERS, source, tuple(names.split()), words, chinese)


def refused(module: str, names: str, words: str, chinese: str) -> Group:
    return Group(module, State.REFUSED, Source.NOBODY, tuple(names.split()), words, chinese)


OURS, SERVERS, PADDLE = Source.OURS, Source.SERVERS, Source.PADDLE

TABLE = (
    # ---- paddle.distributed: what works -------------------------------------------------------------------------
    works(DISTRIBUTED, "DataParallel ParallelEnv destroy_process_group get_rank get_world_size init_parallel_env"),
    works(DISTRIBUTED, "is_initialized is_available new_group get_group wait barrier spawn"),
    works(DISTRIBUTED, "ReduceOp all_reduce reduce broadcast all_gather gather scatter reduce_scatter"),
    works(DISTRIBUTED, "alltoall all_to_all alltoall_single send recv isend irecv P2POp batch_isend_irecv stream"),
    works(DISTRIBUTED, "broadcast_object_list scatter_object_list all_gather_object send_object_list recv_object_list"),
    works(DISTRIBUTED, "ParallelMode ReduceType Placement Shard Replicate Partial ProcessMesh DistAttr", PADDLE),
    works(DISTRIBUTED, "create_nccl_config get_mesh in_auto_parallel_align_mode", PADDLE),
    # ---- paddle.distributed: what works differently -------------------------------------------------------------
    differs(
        DISTRIBUTED,
        "get_backend",
        Source.OURS,
        'It gives "GLOO" for tensors of the host and "NCCL" for those of GPUs, whatever carries them.',
        '主机上的张量返回 "GLOO"，GPU 上的返回 "NCCL"，与实际用什么传送无关。',
    ),
    differs(
        DISTRIBUTED,
        "launch",
        PADDLE,
        "It is Paddle's launcher, which starts Paddle's groups; ours are `python -m collective.run` and "
        "`python -m ps.run`.",
        "这是飞桨的启动器，启动的是飞桨自己的通信组；我们的是 `python -m collective.run` 和 `python -m ps.run`。",
    ),
    differs(
        DISTRIBUTED,
        "io rpc cloud_utils",
        PADDLE,
        "These modules stay Paddle's own: for static programs, remote calls and Paddle's cloud. They know "
        "nothing of the scheme.",
        "这些模块仍是飞桨自己的：用于静态图程序、远程调用和飞桨云，与方案无关。",
    ),
    differs(
        DISTRIBUTED,
        "InMemoryDataset QueueDataset BoxPSDataset CountFilterEntry ProbabilityEntry ShowClickEntry",
        PADDLE,
        "They stay Paddle's own and feed static programs, which no scheme synchronises; `paddle.io.DataLoader` "
        "feeds yours.",
        "它们仍是飞桨自己的，只为静态图程序供数，而方案不同步静态图程序；您的程序请用 `paddle.io.DataLoader`。",
    ),
    # ---- paddle.distributed: what is not supported --------------------------------------------------------------
    refused(
        DISTRIBUTED,
        "shard_tensor dtensor_from_fn reshard unshard_dtensor shard_layer shard_op local_map LocalLayer set_mesh",
        "It spreads a tensor over ranks; under data parallelism each has all of it: leave it out and use plain "
        "tensors.",
        "它把一个张量分布到多个 rank；数据并行时每个 rank 都有整个张量：请去掉，使用普通张量。",
    ),
    refused(
        DISTRIBUTED,
        "shard_optimizer ShardingStage1 ShardingStage2 ShardingStage3 group_sharded_parallel save_group_sharded_model",
        "Ranks would keep parts of the optimizer's state; here they keep all of it: take the plain optimizer, "
        "or run it with ps, where servers keep the state in parts.",
        "它让各 rank 只保存优化器状态的一部分，而这里保存全部：请直接用普通优化器；或用 ps 运行，"
        "由服务器分片保存状态。",
    ),
    refused(
        DISTRIBUTED,
        "shard_scaler",
        "It is for sharded optimizers: use `paddle.amp.GradScaler` as it is.",
        "它用于分片的优化器：请直接使用 `paddle.amp.GradScaler`。",
    ),
    refused(
        DISTRIBUTED,
        "shard_dataloader",
        "It splits batches for tensors that are spread over ranks: use `paddle.io.DistributedBatchSampler`.",
        "它为分布式张量切分 batch：请使用 `paddle.io.DistributedBatchSampler`。",
    ),
    refused(
        DISTRIBUTED,
        "to_static DistModel Strategy to_distributed parallelize enable_auto_dp",
        "It chooses how to divide a model over ranks; here each trains the whole model: wrap it in DataParallel.",
        "它自动决定如何把模型分到各 rank；这里每个 rank 训练整个模型：请用 DataParallel 包装。",
    ),
    refused(
        DISTRIBUTED,
        "split ColWiseParallel RowWiseParallel ConvParallel PrepareLayerInput PrepareLayerOutput SplitPoint "
        "SequenceParallelBegin SequenceParallelEnd SequenceParallelEnable SequenceParallelDisable ContextParallel "
        "PrepareContextParallel",
        "It divides a layer, a sequence or a model over ranks; here each has the whole model: leave it out.",
        "它把一层、一个序列或整个模型分到多个 rank；这里每个 rank 都有整个模型：请去掉。",
    ),
    refused(
        DISTRIBUTED,
        "save_state_dict load_state_dict load_merged_state_dict ShardedStateDict ShardedWeight shard_weight "
        "build_sharded_state_dict",
        "It stores the parts that ranks hold; here each holds everything: `paddle.save(model.state_dict(), path)` on "
        "rank 0, `paddle.load` on all.",
        "它保存各 rank 的分片；这里每个 rank 都有全部：在 rank 0 上 `paddle.save(model.state_dict(), path)`，"
        "各 rank `paddle.load`。",
    ),
    refused(
        DISTRIBUTED,
        "gloo_init_parallel_env gloo_barrier gloo_release",
        "It makes a second group beside the scheme's: use `init_parallel_env`, `barrier` and `destroy_process_group`.",
        "它在方案之外另建一个组：请使用 `init_parallel_env`、`barrier` 和 `destroy_process_group`。",
    ),
    refused(
        DISTRIBUTED,
        "shutdown_process_group restart_process_group",
        "It frees NCCL's memory between two phases, and a scheme's groups stay as they are: leave it out.",
        "它在两个阶段之间释放 NCCL 的显存，而方案的组保持不变：请去掉。",
    ),
    # ---- fleet: what works --------------------------------------------------------------------------------------
    works(FLEET, "init fleet Fleet distributed_model distributed_optimizer distributed_scaler minimize"),
    works(FLEET, "DistributedStrategy worker_index worker_num is_first_worker rank nranks world_size node_num"),
    works(FLEET, "local_rank rank_in_node local_device_ids world_device_ids worker_endpoints server_num server_index"),
    works(FLEET, "server_endpoints is_server is_worker is_coordinator"),
    works(FLEET, "get_hybrid_communicate_group"),
    works(FLEET, "UtilBase Role CommunicateTopology HybridCommunicateGroup utils auto log_util set_log_level", PADDLE),
    works(FLEET, "PaddleCloudRoleMaker UserDefinedRoleMaker get_log_level_code get_log_level_name", PADDLE),
    works(FLEET, "check_memory_usage", PADDLE),
    # ---- fleet: what works differently --------------------------------------------------------------------------
    differs(
        FLEET,
        "all_reduce barrier_worker metrics util",
        OURS,
        "They reach all ranks, also where Paddle's, without its `init_gloo`, keep to one. After a changed import "
        "`all_reduce` is that of `paddle.distributed`: take `fleet.util.all_reduce`.",
        "它们总是涉及所有 rank；飞桨的未加 `init_gloo` 时只涉及本 rank。改 import 之后，`all_reduce` 是 "
        "`paddle.distributed` 的那个：请用 `fleet.util.all_reduce`。",
    ),
    differs(
        FLEET,
        "collective_perf",
        OURS,
        "It measures nothing, as in Paddle 3; `python -m benchmarks sweep` measures.",
        "与飞桨 3 一样，它什么都不测；测量请用 `python -m benchmarks sweep`。",
    ),
    differs(
        FLEET,
        "init_server run_server init_worker stop_worker",
        SERVERS,
        "It is for programs with parameter servers, which cannot run as a ring: run the program with ps.",
        "它用于参数服务器程序，不能以环的方式运行：请用 ps 运行。",
    ),
    differs(
        FLEET,
        "InMemoryDataset QueueDataset BoxPSDataset DatasetBase FileInstantDataset MultiSlotDataGenerator "
        "MultiSlotStringDataGenerator",
        PADDLE,
        "They stay Paddle's own and feed static programs, which no scheme synchronises; `paddle.io.DataLoader` "
        "feeds yours.",
        "它们仍是飞桨自己的，只为静态图程序供数，而方案不同步静态图程序；您的程序请用 `paddle.io.DataLoader`。",
    ),
    # ---- fleet: what is not supported ---------------------------------------------------------------------------
    refused(
        FLEET,
        "save_inference_model save_persistables load_inference_model load_model",
        "It stores static programs, which no scheme synchronises: use `paddle.save(model.state_dict(), path)`, or "
        "`paddle.jit.save` for inference.",
        "它保存静态图程序，而方案不同步静态图程序：请使用 `paddle.save(model.state_dict(), path)`，"
        "推理模型用 `paddle.jit.save`。",
    ),
    refused(
        FLEET,
        "save_cache_model save_cache_table check_save_pre_patch_done save_one_table save_dense_params load_one_table "
        "set_date print_table_stat shrink",
        "It is about tables on Paddle's servers, which Paddle 3 no longer has: keep the embedding in the model, and "
        "use `paddle.save` and `paddle.load`.",
        "它操作飞桨服务器上的表，而飞桨 3 已没有这种服务器：请把 embedding 留在模型里，使用 `paddle.save` 和 "
        "`paddle.load`。",
    ),
    refused(
        FLEET,
        "init_coordinator make_fl_strategy get_fl_client",
        "It is for federated learning, where a coordinator picks clients; here all ranks train in each step: "
        "leave it out.",
        "它用于联邦学习，由协调者挑选客户端；这里所有 rank 每一步都训练：请去掉。",
    ),
)
