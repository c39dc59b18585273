"""Write docs/names.md and its Chinese version from the table of names: python -m docs.tools.names [--check]."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.paddle_api.names import groups_of
from common.paddle_api.names_table import DISTRIBUTED, FLEET, Group, Source, State
from common.paddle_api.strategy import DEGREES, IN_VAIN, SWITCHES

__all__ = ["main", "page"]

FOLDER = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Words:
    """What the page says beside the table."""

    file: str
    title: str
    begin: str
    ours: str
    paddles: str
    differs: tuple[str, str, str]
    refused: tuple[str, str, str]
    strategy: str
    fields: tuple[str, str, str]
    in_vain: str
    is_refused: str
    degrees: str
    amp: str
    scale: str
    comma: str


ENGLISH = Words(
    file="names.md",
    title="Names of Paddle",
    begin="What becomes of every public name of `paddle.distributed` and `paddle.distributed.fleet` of Paddle 3.3, "
    "under `collective` and `ps` alike. Under [the launchers](own-program.md) a call of what is not supported raises a "
    "`UsageError` with the words of this page; after a changed import the name itself raises them, as an "
    "`AttributeError`. Paddle's types stay what they are under the launchers, so that a library may ask `isinstance`.",
    ours="These go through the scheme:",
    paddles="These need no group and stay Paddle's own:",
    differs=("Works differently", "names", "how"),
    refused=("Not supported", "names", "why, and what instead"),
    strategy="It is Paddle's own type, with Paddle's defaults. `fleet.init` and `distributed_optimizer` refuse one that"
    " asks for another training than this. What Paddle itself does not read in dynamic graph mode is in vain here too, "
    "and a line says so. Everything else in it is accepted and changes nothing: how "
    "gradients travel is the scheme's business, and `recompute` and, without pure half precision, `amp` switch"
    " nothing on in Paddle's own `distributed_model` either. Call `paddle.distributed.fleet.utils.recompute` "
    "and `paddle.amp.auto_cast` in the program, as with Paddle.",
    fields=("field", "", "what to do"),
    in_vain="in vain",
    is_refused="refused",
    degrees="each rank trains the whole model: leave it at 1, and `dp_degree` at -1 or the number of ranks",
    amp="parameters stay float32 or float64: use `paddle.amp.auto_cast(level='O1')`",
    scale="gradients are averaged: leave it at `avg`",
    comma=", ",
)
CHINESE = Words(
    file="names.zh.md",
    title="飞桨的名称",
    begin="飞桨 3.3 的 `paddle.distributed` 和 `paddle.distributed.fleet` 的每个公开名称"
    "在 `collective` 和 `ps` 下会怎样，两者相同。在[启动器](own-program.md)之下，"
    "调用不支持的名称会抛出 `UsageError`，说的就是本页的话；"
    "改 import 之后，取这个名称时就会以 `AttributeError` 抛出。"
    "在启动器之下，飞桨的类型保持不变，库仍可使用 `isinstance`。",
    ours="以下各项经由方案：",
    paddles="以下各项不需要组，仍是飞桨自己的：",
    differs=("用法不同", "名称", "怎样不同"),
    refused=("不支持", "名称", "为什么，用什么代替"),
    strategy="它就是飞桨自己的类型，默认值也是飞桨的。如果它要求的是另一种训练，"
    "`fleet.init` 和 `distributed_optimizer` 会拒绝。飞桨自己在动态图下不读取的字段，在这里同样无效，会有一行提示。"
    "其余各项都接受，也不改变什么：梯度如何传送由方案决定；在飞桨自己的 `distributed_model` 中，"
    "`recompute` 和不用纯半精度的 `amp` 同样什么都不打开。请像使用飞桨时那样，在程序中调用 "
    "`paddle.distributed.fleet.utils.recompute` 和 `paddle.amp.auto_cast`。",
    fields=("字段", "", "怎么办"),
    in_vain="无效",
    is_refused="拒绝",
    degrees="每个 rank 训练整个模型：请保持为 1，`dp_degree` 保持为 -1 或 rank 数",
    amp="参数保持 float32 或 float64：请使用 `paddle.amp.auto_cast(level='O1')`",
    scale="梯度取平均：请保持为 `avg`",
    comma="、",
)


def page(words: Words) -> str:
    """The whole page in one language."""
    parts = [f"# {words.title}", "<!-- written by python -m docs.tools.names -->", words.begin]
    for module in (DISTRIBUTED, FLEET):
        parts += [f"## {module}", *module_parts(words, groups_of(module))]
    parts += ["## DistributedStrategy", words.strategy, table(words.fields, strategy_rows(words))]
    return "\n\n".join(parts) + "\n"


def module_parts(words: Words, groups: Sequence[Group]) -> list[str]:
    working = [group for group in groups if group.state is State.WORKS]
    ours = [name for group in working if group.source is Source.OURS for name in group.names]
    own = [name for group in working if group.source is Source.PADDLE for name in group.names]
    parts = [words.ours, quoted(ours, words.comma), words.paddles, quoted(own, words.comma)]
    for state, (title, *head) in ((State.DIFFERS, words.differs), (State.REFUSED, words.refused)):
        rows = [
            (quoted(group.names, words.comma), group.words if words is ENGLISH else group.chinese)
            for group in groups
            if group.state is state
        ]
        parts += [f"### {title}", table(head, rows)]
    return parts


def strategy_rows(words: Words) -> list[tuple[str, ...]]:
    by_advice: dict[tuple[bool, str], list[str]] = {}
    for field, switch in SWITCHES.items():
        advice = switch.words if words is ENGLISH else switch.chinese
        by_advice.setdefault((field in IN_VAIN, advice), []).append(field)
    rows = [
        (quoted(fields, words.comma), words.in_vain if vain else words.is_refused, advice)
        for (vain, advice), fields in by_advice.items()
    ]
    refused = [
        (f"`hybrid_configs`: {quoted(DEGREES, words.comma)}", words.degrees),
        (f"`amp_configs`: {quoted(('use_pure_fp16', 'use_pure_bf16'), words.comma)}", words.amp),
        ("`gradient_scale_configs`: `scale_strategy`", words.scale),
    ]
    return [*rows, *((fields, words.is_refused, advice) for fields, advice in refused)]


def quoted(names: Sequence[str], comma: str) -> str:
    return comma.join(f"`{name}`" for name in names)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def main(arguments: list[str]) -> int:
    wrong = 0
    for words in (ENGLISH, CHINESE):
        file = FOLDER / words.file
        if arguments != ["--check"]:
            file.write_text(page(words), "utf-8")
        elif not file.exists() or file.read_text("utf-8") != page(words):
            print(f"docs/{words.file} is not what the table of names makes; run 'python -m docs.tools.names'")
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
