"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from common.errors import UsageError

__all__ = ["size_in_bytes", "size_in_words"]

UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def size_in_bytes(text: str) -> int:
    """
    >>> size_in_bytes("4KiB"), size_in_bytes("100MB")
    (4096, 100000000)
    """
    found = re.fullmatch(r"(\d+)\s*([KMG]?i?B?)", text.strip(), re.IGNORECASE)
    unit = found[2].upper() if found else ""
    unit = unit + "B" if unit and not unit.endswith("B") else unit or "B"
    if not found or unit not in UNITS or (size := int(found[1]) * UNITS[unit]) % 4 or not size:
        raise UsageError(f"--sizes: {text!r} is not a size such as 4KiB or 100MB, in whole float32s")
    return size


def size_in_words(size: int) -> str:
    """
    >>> size_in_words(4096), size_in_words(100_000_000), size_in_words(1000)
    ('4 KiB', '100 MB', '1 KB')
    """
    for unit in ("GIB", "GB", "MIB", "MB", "KIB", "KB"):
        if size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]} {unit.replace('IB', 'iB')}"
    return f"{size} B"
