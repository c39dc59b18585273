"""Why something is absent, missing or failed: results hold it in English, a report tells it in its own language."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from string import Formatter

from benchmarks.page.language import known, mark

__all__ = ["in_words", "reason"]

REASONS = (  # an earlier one comes before a later one that fits as well
    mark("not run"),
    mark("interrupted"),
    mark("interrupted after {made} of {count} rounds"),
    mark("it took longer than {minutes} minutes (limit)"),
    mark("it took longer than {minutes} minutes (limit) after {made} of {count} rounds"),
    mark("it ended well but left no results"),
    mark("{program} is not installed; use a checkout of GradSync"),
    mark("NCCL through {binding} needs {package}, which is not installed; {command}"),
    mark("{package} is not installed ({command})"),
    mark("there is no {program} ({command})"),
    mark("PyTorch has no optimizer that computes what Paddle's {optimizer} does"),
    mark("the model {model} has not been rebuilt in PyTorch"),
    mark("PyTorch sees no GPU (install one built for CUDA)"),
    mark("one GPU, which NCCL {version} lets no ranks share (install NCCL >= {least})"),
    mark("emulated hosts need root, for network namespaces: run as root (sudo)"),
    mark("emulated hosts need ip and tc ({command})"),
    mark("emulated hosts need {tool} ({command})"),
    mark("the program ran longer than {seconds} s (--run-timeout)"),
    mark("the program ended early on rank {ranks}, without an error"),
    mark("ranks ended with different parameters"),
    mark(
        "the program ended well, but gave no model to paddle.DataParallel or fleet.distributed_model, so there is "
        "nothing to compare; wrap the model that it trains in one of them"
    ),
    mark("{made} backwards leave no step to time after --warmup-steps {warmup}"),
    mark("exit code {code}: {words}"),
    mark("exit code {code}, without naming an error; its last lines are in {file}"),
    mark("exit code {code}, without a word"),
)


def reason(text: str) -> str:
    """A reason as results hold it, without a full stop; what is none of ours, such as an error, stays in its words."""
    return in_words(text.rstrip("."), REASONS)


def in_words(text: str, sentences: Sequence[str]) -> str:
    """A text as results hold it in the report's language, if it is one of these sentences, filled in."""
    for sentence in sentences:
        if found := _pattern(sentence).fullmatch(text):
            return known(sentence).format(**found.groupdict())
    return text


@cache
def _pattern(sentence: str) -> re.Pattern[str]:
    parts = Formatter().parse(sentence)
    return re.compile("".join(re.escape(words) + (f"(?P<{name}>.+)" if name else "") for words, name, _, _ in parts))
