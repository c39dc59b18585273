"""What parsers are given: arbitrary bytes, mutated valid messages, and messages whose fields have extreme values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

__all__ = ["Maker", "drawn", "filled", "inputs"]

Maker = Callable[[Random], bytes]
WAYS = ["write", "insert", "remove", "cut", "repeat"]

POINTED = [
    *(b"\xff" * n for n in (1, 2, 4, 8)),
    *(n.to_bytes(4, "little") for n in (0, 1, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)),
    *(n.to_bytes(8, "little") for n in (1 << 40, (1 << 63) - 1, 1 << 63)),
    b"\xff" * 9 + b"\x01",  # the largest varint
    *(b"[" * n for n in (1, 150, 3000)),
    *(b'["l",' * n for n in (1, 150)),
    *(b"{}", b"[]", b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"1" * 25, b"9" * 5000),
    *(b'"', b"\\ud800", b"\\u0000", b"\x1f\x8b", b"U0", b"S0", b"<f8", b"x:2"),
]
NUMBERS = [0, 1, 2, 3, 5, 16, 48, 64, 80, 255, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
LARGE = [1 << 32, 1 << 40, (1 << 62) + 1, (1 << 63) - 1, (1 << 64) - 1]
EDITS = st.tuples(
    st.sampled_from(WAYS),
    st.integers(0, 1 << 12),
    st.one_of(st.sampled_from(POINTED), st.binary(min_size=1, max_size=8)),
)


def inputs(seeds: Sequence[bytes], more: Maker | None) -> st.SearchStrategy[bytes]:
    """
    Args:
        seeds: valid messages.
        more: makes further ones, which may be mutated, too.
    """
    mutated = st.builds(edited, st.sampled_from(seeds), st.lists(EDITS, max_size=5))
    return st.one_of(
        mutated, st.binary(max_size=120), st.integers(0, 1 << 62).map(lambda n: drawn(Random(n), seeds, more))
    )


def drawn(random: Random, seeds: Sequence[bytes], more: Maker | None) -> bytes:
    """One input, made in some microseconds, where Hypothesis takes milliseconds."""
    which = random.random()
    if which < 0.1:
        return random.randbytes(random.randrange(120))
    if more and which < 0.6:
        data = more(random)
        if which < 0.5:
            return data
    else:
        data = random.choice(seeds)
    edits = []
    for _ in range(random.randrange(1, 6)):
        piece = random.choice(POINTED) if random.random() < 0.6 else random.randbytes(random.randrange(1, 9))
        edits.append((random.choice(WAYS), random.randrange(1 << 12), piece))
    return edited(data, edits)


def edited(data: bytes, edits: Sequence[tuple[str, int, bytes]]) -> bytes:
    for what, where, piece in edits:
        at = where % (len(data) + 1)
        if what == "write":
            data = data[:at] + piece + data[at + len(piece) :]
        elif what == "insert":
            data = data[:at] + piece + data[at:]
        elif what == "remove":
            data = data[:at] + data[at + len(piece) :]
        elif what == "cut":
            data = data[:at]
        elif len(data) < 1 << 16:
            data += data[at:]
    return data


def filled(kind: Any, texts: Sequence[str]) -> Maker:
    """Makes messages of a protobuf kind with any of its fields, whose values are often those that others have."""

    def make(random: Random) -> bytes:
        message = kind()
        fields = list(kind.DESCRIPTOR.fields)
        for field in random.sample(fields, min(len(fields), random.randrange(1, 9))):
            put(message, field, random.getrandbits(30), texts)
        data: bytes = message.SerializeToString()
        return data

    return make


def put(message: Any, field: FieldDescriptor, number: int, texts: Sequence[str], depth: int = 0) -> None:
    """Give a field a value, or some, that follow from the number."""
    if field.message_type and field.message_type.GetOptions().map_entry:
        message.settings[texts[number % len(texts)]] = float(NUMBERS[number % len(NUMBERS)])
        return
    count = number % 4 if field.is_repeated else 1
    for index in range(count):
        seed = number // 7 + index * 101
        if field.message_type:
            target = getattr(message, field.name)
            inner = target.add() if field.is_repeated else target
            if not field.is_repeated:
                inner.SetInParent()
            if depth < 3:
                fill(inner, field.message_type, seed, texts, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).append(value_of(field, seed, texts))
        else:
            setattr(message, field.name, value_of(field, seed, texts))


def fill(message: Any, descriptor: Descriptor, seed: int, texts: Sequence[str], depth: int) -> None:
    for index, field in enumerate(descriptor.fields):
        seed = (seed * 1103515245 + 12345 + index) % (1 << 31)
        if seed >> 8 & 3:  # most of them
            put(message, field, seed >> 10, texts, depth)


def value_of(field: FieldDescriptor, number: int, texts: Sequence[str]) -> Any:
    kinds = FieldDescriptor
    if field.cpp_type == kinds.CPPTYPE_STRING:
        if field.type == kinds.TYPE_BYTES:
            return bytes(number % 256 for _ in range(NUMBERS[number % 11]))
        return texts[number % len(texts)]
    if field.cpp_type == kinds.CPPTYPE_BOOL:
        return bool(number % 2)
    if field.cpp_type in (kinds.CPPTYPE_DOUBLE, kinds.CPPTYPE_FLOAT):
        return [0.0, 0.25, 1.0, -1.0, float("inf"), float("nan"), 1e300][number % 7]
    if field.cpp_type == kinds.CPPTYPE_UINT64:
        return (NUMBERS + NUMBERS + LARGE)[number % (2 * len(NUMBERS) + len(LARGE))]
    return NUMBERS[number % len(NUMBERS)]
