"""A program as users have them, which calls what paddle.distributed has for three ranks and says what it got.

communication.py [objects]: with an object that is not of plain types, too.
"""

import hashlib
import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import ReduceOp, stream
from paddle.distributed.communication.all_reduce import all_reduce as imported_from_its_module
from paddle.distributed.communication.group import is_initialized

digest = hashlib.sha256()


def same(tensor, expected):
    np.testing.assert_array_equal(tensor.numpy(), expected)
    digest.update(tensor.numpy().tobytes())


def values(rank, size=5, dtype="float32"):
    return (np.random.default_rng(rank).standard_normal(size) * 10).astype(dtype)


def of_all_members(rank, n):
    everyone = [values(r) for r in range(n)]
    total = paddle.to_tensor(values(rank, 100_001))
    dist.all_reduce(total)
    np.testing.assert_allclose(
        total.numpy(), sum(values(r, 100_001, "float64") for r in range(n)), rtol=1e-3, atol=1e-4
    )
    digest.update(total.numpy().tobytes())  # whose bits do not depend on the scheme
    mean = paddle.to_tensor(values(rank))
    stream.all_reduce(mean, ReduceOp.AVG, sync_op=False).wait()
    digest.update(mean.numpy().tobytes())
    for op, by_hand in ((ReduceOp.MAX, np.maximum), (ReduceOp.MIN, np.minimum)):
        one = paddle.to_tensor(values(rank))
        imported_from_its_module(one, op)
        same(one, by_hand.reduce(everyone))
    flags = paddle.to_tensor([rank == 0, rank == 1])
    dist.all_reduce(flags, ReduceOp.MAX)
    same(flags, [True, True])
    product = paddle.to_tensor(rank + 2, dtype="int16")
    dist.reduce(product, 1, ReduceOp.PROD)
    same(product, 24 if rank == 1 else rank + 2)
    gathered, at_two = [], []
    dist.all_gather(gathered, paddle.to_tensor(values(rank), dtype="bfloat16"))
    assert [t.dtype for t in gathered] == [paddle.bfloat16] * n
    dist.gather(paddle.to_tensor(values(rank)), at_two if rank == 2 else None, dst=2)
    for tensor, right in zip(at_two, everyone, strict=False):
        same(tensor, right)
    part = paddle.zeros([5])
    dist.scatter(part, [paddle.to_tensor(x) for x in everyone] if rank == 1 else None, src=1)
    same(part, everyone[rank])
    dist.reduce_scatter(part, [paddle.to_tensor(values(rank) + i) for i in range(n)], ReduceOp.MAX)
    same(part, np.maximum.reduce([x + np.float32(rank) for x in everyone]))
    copy = paddle.to_tensor(values(rank, 40_000))
    dist.broadcast(copy, src=2)
    same(copy, values(2, 40_000))
    exchanged = []
    dist.alltoall(exchanged, [paddle.full([2], 10 * rank + i, "int64") for i in range(n)])
    same(paddle.stack(exchanged), [[10 * r + rank] * 2 for r in range(n)])
    out = paddle.zeros([3 * (rank + 1)], "int32")
    sent = [i + 1 for i in range(n)]
    dist.alltoall_single(out, paddle.full([sum(sent)], rank, "int32"), sent, [rank + 1] * n)
    same(out, np.repeat(np.arange(3), rank + 1))


def of_some(rank):
    some = dist.new_group([0, 2])
    assert (dist.get_rank(some), some.world_size) == {0: (0, 2), 1: (-1, -1), 2: (1, 2)}[rank]
    if rank != 1:
        total = paddle.to_tensor(values(rank))
        dist.all_reduce(total, group=some)
        same(total, values(2) + values(0))
        column = paddle.zeros([3, 2])
        dist.broadcast(column[:, 1] if rank == 0 else column[:, 1].fill_(7.0), src=2, group=some)
        same(column, [[0, 7]] * 3)
        dist.barrier(some)
    dist.destroy_process_group(some)


def of_two(rank, n):
    before, after = (rank - 1) % n, (rank + 1) % n
    got, again = paddle.zeros([5]), paddle.zeros([300_000])
    task = dist.irecv(got, before)
    dist.isend(paddle.to_tensor(values(rank)), after).wait()
    task.wait()
    same(got, values(before))
    large = paddle.to_tensor(values(rank, 300_000))
    for each in dist.batch_isend_irecv([dist.P2POp(dist.isend, large, after), dist.P2POp(dist.irecv, again, before)]):
        each.wait()
    same(again, values(before, 300_000))


class Mine:
    def __init__(self, rank):
        self.rank = rank


def of_objects(rank, n, other):
    everyone, given, mine = [], [None], []
    dist.all_gather_object(everyone, {"rank": rank, "seen": {rank}, "x": (1.5, b"y")})
    assert everyone == [{"rank": r, "seen": {r}, "x": (1.5, b"y")} for r in range(n)]
    if rank == 0:
        given = [paddle.to_tensor([3.0])]
    dist.broadcast_object_list(given, src=0)
    same(given[0], [3.0])
    dist.scatter_object_list(mine, [("to", r) for r in range(n)] if rank == 2 else None, src=2)
    assert mine == [("to", rank)]
    if other:
        everyone = []
        dist.all_gather_object(everyone, Mine(rank))
        assert [each.rank for each in everyone] == list(range(n))


if __name__ == "__main__":
    group = dist.init_parallel_env()
    rank, n = dist.get_rank(), dist.get_world_size()
    assert [is_initialized(), dist.is_available(), bool(dist.get_backend())] == [True] * 3
    of_all_members(rank, n)
    of_some(rank)
    of_two(rank, n)
    of_objects(rank, n, other="objects" in sys.argv)
    dist.barrier()
    print(f"RESULT {rank} {digest.hexdigest()}", flush=True)
