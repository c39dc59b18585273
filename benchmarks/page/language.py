"""The language of a report: sentences stand where they are used, in English; languages/NAME.toml has them in another.

A sentence with figures is one template, so that a translation may put them in its own order:

    say("N={nranks}: {name} is the fastest.", nranks=2, name="ring/shm")
    MARKS = {True: mark("✓ same bits")}    and where it is shown    known(MARKS[same])
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from common.errors import choose

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["LANGUAGES", "catalogue", "known", "language_tag", "listed", "mark", "say", "speaking"]

LANGUAGES = ("en", "zh")
TAGS = {"en": "en", "zh": "zh-CN"}  # of BCP 47
_chosen: ContextVar[str] = ContextVar("language", default="en")


@contextmanager
def speaking(language: str) -> Iterator[None]:
    """Within, everything is said in this language: one of LANGUAGES.

    Raises:
        UsageError: it is none of them.
    """
    token = _chosen.set(choose("language", language, LANGUAGES))
    try:
        yield
    finally:
        _chosen.reset(token)


def say(sentence: str, /, **values: object) -> str:
    """A sentence in the report's language, with its {placeholders} filled in as `str.format` does."""
    return known(sentence).format(**values)


def known(text: str) -> str:
    """A text in the report's language if it is one of ours, such as a preset's title; a user's stays as it is."""
    return catalogue(_chosen.get()).get(text, text)


def mark(sentence: str) -> str:
    """The sentence itself: a constant that `known` looks up where it is shown."""
    return sentence


def listed(items: Sequence[str]) -> str:
    """
    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    *most, last = items
    return say("{most} and {last}", most=say(", ").join(most), last=last) if most else last


def language_tag() -> str:
    """Of the report's language, for HTML."""
    return TAGS[_chosen.get()]


@cache
def catalogue(language: str) -> dict[str, str]:
    """Its sentences by the English ones; those of English are themselves, so there are none."""
    if language == "en":
        return {}
    file = Path(__file__).parents[1] / "languages" / f"{language}.toml"
    sentences: dict[str, str] = tomllib.loads(file.read_text("utf-8"))
    return sentences
