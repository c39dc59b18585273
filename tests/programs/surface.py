"""A Fleet program as users have them, that asks for places, sums figures and reads settings; it knows nothing of us.

surface.py KIND: "train", or "asks", which joins no group.
"""

import hashlib
import json
import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import ParallelEnv, fleet
from paddle.distributed.fleet import metrics
from paddle.distributed.fleet.utils import recompute


def settings():
    strategy = fleet.DistributedStrategy()
    hybrid = dict(strategy.hybrid_configs)
    assert (hybrid["mp_degree"], strategy.amp, strategy.nccl_comm_num) == (1, False, 1)
    strategy.hybrid_configs = {"dp_degree": dist.get_world_size(), "mp_degree": 1, "pp_degree": 1}
    strategy.fuse_all_reduce_ops = False
    return strategy


def places():
    env = ParallelEnv()
    assert isinstance(env, dist.ParallelEnv)
    assert isinstance(fleet.fleet, fleet.Fleet)
    assert (env.rank, env.nranks, env.nrings) == (dist.get_rank(), dist.get_world_size(), 1)
    assert fleet.worker_endpoints() == env.trainer_endpoints
    assert fleet.worker_endpoints(to_string=True).split(",")[env.rank] == env.current_endpoint
    groups = fleet.get_hybrid_communicate_group()
    assert isinstance(groups, fleet.HybridCommunicateGroup)
    return {
        "rank": [fleet.worker_index(), fleet.rank(), groups.get_data_parallel_rank(), int(fleet.local_rank())],
        "ranks": [fleet.worker_num(), fleet.nranks(), groups.get_data_parallel_world_size(), fleet.node_num()],
        "first": [fleet.is_first_worker(), fleet.is_worker(), fleet.is_server(), fleet.is_coordinator()],
        "model": groups.get_model_parallel_world_size(),
    }


def figures():
    mine = np.array([1.0 + fleet.worker_index(), 10.0])
    fleet.util.barrier()
    fleet.barrier_worker()
    fleet.util.print_on_rank("ONCE", 1)
    return {
        "util": [fleet.util.all_reduce(mine, mode).tolist() for mode in ("sum", "max", "min")],
        "gathered": fleet.util.all_gather(fleet.worker_index()),
        "files": fleet.util.get_file_shard(["a", "b", "c"]),
        "fleet": fleet.all_reduce(3 + fleet.worker_index()).tolist(),
        "acc": [metrics.acc(mine[:1], mine[1:]), fleet.metrics.acc(mine[:1], mine[1:])],
        "sum": metrics.sum(mine).tolist(),
    }


def train():
    fleet.init(is_collective=True, strategy=settings(), log_level="WARNING")
    told = {**places(), **figures()}
    paddle.seed(fleet.worker_index())
    net = paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 1))
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(0.1, parameters=model.parameters()), settings())
    random = np.random.default_rng(dist.get_rank())
    for _ in range(3):
        x = paddle.to_tensor(random.random((4, 3), np.float32), stop_gradient=False)
        loss = model(x).square().mean()
        loss.backward()
        fleet.minimize(loss)
        optimizer.clear_grad()
    recomputed = recompute(net, x)
    assert np.array_equal(recomputed.numpy(), net(x).numpy())
    told["parameters"] = hashlib.sha256(b"".join(p.numpy().tobytes() for p in net.parameters())).hexdigest()
    return told


def asks():
    assert dist.ParallelEnv().rank == dist.get_rank()
    return {"rank": dist.get_rank(), "ranks": dist.get_world_size(), "files": fleet.worker_num()}


if __name__ == "__main__":
    print(f"RESULT {json.dumps({'train': train, 'asks': asks}[sys.argv[1]]())}", flush=True)
