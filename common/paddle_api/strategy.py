"""Which settings of Paddle's `DistributedStrategy` are refused, because they ask for another training than this one.

Others are in vain, as they are under Paddle's own groups. What is neither changes nothing here: how gradients are
packed and sent is the scheme's business, and of `recompute` and of `amp` at level O1 Paddle's own `distributed_model`
makes nothing that a data-parallel program uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.errors import UsageError

__all__ = ["DEGREES", "IN_VAIN", "SWITCHES", "Switch", "check_strategy"]


@dataclass(frozen=True)
class Switch:
    """A field that had better stay off.

    Args:
        words: what to do.
        chinese: the same in Chinese.
    """

    words: str
    chinese: str


WHOLE_MODEL = Switch("each rank trains the whole model, so leave it off", "每个 rank 训练整个模型，请不要打开")
EVERY_STEP = Switch(
    "gradients are averaged whole in each step, so leave it off", "每一步都对完整的梯度求平均，请不要打开"
)
STATIC = Switch("it changes static programs only, so leave it off", "它只改变静态图程序，请不要打开")

SWITCHES = {
    **dict.fromkeys(("sharding", "pipeline", "tensor_parallel", "auto", "semi_auto", "auto_search"), WHOLE_MODEL),
    **dict.fromkeys(("localsgd", "adaptive_localsgd", "dgc", "fp16_allreduce"), EVERY_STEP),
    "a_sync": Switch(
        "a program of your own trains synchronously, so set it to False or leave it unset",
        "您自己的程序同步训练，请设为 False 或不设置",
    ),
    "gradient_merge": Switch(
        "call backward() several times before step(), all but the last in model.no_sync()",
        "请在 step() 之前多次 backward()，除最后一次外都放在 model.no_sync() 中",
    ),
    "lars": Switch(
        "give the program the optimizer itself, paddle.incubate.optimizer.LarsMomentumOptimizer",
        "请直接使用优化器 paddle.incubate.optimizer.LarsMomentumOptimizer",
    ),
    "lamb": Switch(
        "give the program the optimizer itself, paddle.optimizer.Lamb", "请直接使用优化器 paddle.optimizer.Lamb"
    ),
    "asp": Switch("prune with paddle.incubate.asp before training", "请在训练前用 paddle.incubate.asp 剪枝"),
    "qat": Switch(
        "quantise with paddle.quantization before DataParallel", "请在 DataParallel 之前用 paddle.quantization 量化"
    ),
    "elastic": Switch("a job keeps its number of ranks, so leave it off", "作业的 rank 数不变，请不要打开"),
    "heter_ccl_mode": Switch(
        "all ranks compute on the same kind of device, so leave it off", "所有 rank 使用同类设备，请不要打开"
    ),
    **dict.fromkeys(("is_fl_ps_mode", "is_with_coordinator", "adam_d2sum"), STATIC),
}
# In dynamic graph mode Paddle reads none of these: a program that sets one trains there as if it had not.
IN_VAIN = {"localsgd", "adaptive_localsgd", "dgc", "fp16_allreduce", "gradient_merge", "lars", "lamb", "asp", "qat"}
IN_VAIN |= {"elastic", "adam_d2sum", "is_with_coordinator"}
DEGREES = ("mp_degree", "pp_degree", "sharding_degree", "sep_degree", "cp_degree", "ep_degree", "moe_sharding_degree")


def check_strategy(strategy: Any, nranks: int, tell: Callable[[str], object]) -> None:
    """
    Args:
        tell: is given a line for each field that is in vain.

    Raises:
        UsageError: it asks for what this training does not do; the message names the field, and what to do.
    """
    if strategy is None:
        return
    for field, switch in SWITCHES.items():
        if is_on(strategy, field):
            if field not in IN_VAIN:
                raise refusal(f"{field} is not supported: {switch.words}")
            tell(f"gradsync: DistributedStrategy: {field} has no effect, as in Paddle's dynamic graph: {switch.words}")
    hybrid = getattr(strategy, "hybrid_configs", {})
    for field in DEGREES:
        if (degree := hybrid.get(field, 1)) > 1:
            raise refusal(
                f"hybrid_configs asks for {field} {degree}, but each rank trains the whole model: leave it at 1; all "
                f"{nranks} ranks are dp_degree"
            )
    if (degree := hybrid.get("dp_degree", -1)) > 0 and degree != nranks:
        raise refusal(f"hybrid_configs asks for dp_degree {degree}, but there are {nranks} ranks: leave it at -1")
    amp = getattr(strategy, "amp_configs", {}) if getattr(strategy, "amp", False) else {}
    for field in ("use_pure_fp16", "use_pure_bf16"):
        if amp.get(field):
            raise refusal(
                f"amp_configs asks for {field}, but parameters must stay float32 or float64: leave it off and compute "
                "in paddle.amp.auto_cast(level='O1')"
            )
    scale = getattr(strategy, "gradient_scale_configs", {}).get("scale_strategy", "avg")
    if scale != "avg":
        raise refusal(f"gradient_scale_configs asks for {scale!r}, but gradients are averaged: leave it at 'avg'")


def is_on(strategy: Any, field: str) -> bool:
    """Whether a program has switched it on; `a_sync` is so by default, which means nothing."""
    message = getattr(strategy, "strategy", None)
    if field == "a_sync" and message is not None and not message.HasField("a_sync"):
        return False
    return getattr(strategy, field, False) is True


def refusal(words: str) -> UsageError:
    return UsageError(f"DistributedStrategy: {words}")
