"""What a reduction computes, by Paddle's numbers."""

from __future__ import annotations

from common.tensors.reduction_of_any import MORE_OPS

__all__ = ["ReduceOp", "name_of_op"]


class ReduceOp:
    """What `all_reduce` computes."""

    SUM, MAX, MIN, PROD, AVG = range(5)


NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
    ReduceOp.PROD: "prod",
    ReduceOp.AVG: "mean",
}
assert {*NAMES.values()} == {*MORE_OPS}


def name_of_op(op: int) -> str:
    """
    Raises:
        ValueError: it is none.
    """
    if not isinstance(op, int) or op not in NAMES:
        raise ValueError(f"op must be one of ReduceOp's (got {op!r}, expected SUM, MAX, MIN, PROD or AVG)")
    return NAMES[op]
