"""What a commit says of itself: its step and job, and the digest of every part. It is written last."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from common.tensors.arena import Layout, Slot

__all__ = ["VERSION", "Manifest", "PartEntry", "SlotEntry"]

VERSION = 2  # of the format


class SlotEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a parameter lies in the arena, see Slot.

    Args:
        paddle: Paddle's own name of it, with which the keys of its optimizer's state begin.
    """

    name: str
    shape: list[int]
    start: int
    dtype: str
    paddle: str


class PartEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part's file as it was written; `size` in bytes."""

    sha256: str
    size: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Args:
        version: of the format.
        scheme: by which it was trained, "ring", "ps" or "local".
        servers: how many parameter servers have parts.
        step: how many steps had been made.
        epoch: in which pass over the data the next one lies, counted from 0.
        ahead: of the built-in trainer, how many of the steps were not made by this number of ranks: the step's place in
            the data is that of step - ahead.
        layout: of the built-in trainer's arena, whose optimizer's state is kept in runs of its words; of a program of
            the user's it is empty.
        length: of that arena, in words.
        job: what must be the same where it goes on; of the built-in trainer its flags.
        parts: by their names.
        parameters_sha256: see `sha256_of_parameters`.
        sha256: of these bytes without it; filled in as they are written.
    """

    version: int = VERSION
    scheme: str
    nranks: int
    servers: int = 0
    step: int
    epoch: int
    ahead: int = 0
    layout: list[SlotEntry] = []
    length: int = 0
    job: dict[str, Any] = {}
    parts: dict[str, PartEntry]
    parameters_sha256: str
    sha256: str = ""

    def to_bytes(self) -> bytes:
        return written(msgspec.structs.replace(self, sha256=hashlib.sha256(written(self.unsigned())).hexdigest()))

    def unsigned(self) -> Manifest:
        return msgspec.structs.replace(self, sha256="")

    @staticmethod
    def from_bytes(content: bytes) -> Manifest:
        """
        Raises:
            ValueError: it is none, or of another version.
        """
        try:
            version = msgspec.json.decode(content, type=dict[str, Any]).get("version")
            if version != VERSION:
                raise ValueError(f"it has version {version}, this program reads version {VERSION}")
            found = msgspec.json.decode(content, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise ValueError(f"not a manifest ({exc})") from exc
        if found.to_bytes() != content:
            raise ValueError("its checksum is wrong: it is not what was written")
        return found.unsigned()

    def arena_layout(self) -> Layout:
        return Layout(tuple(Slot(s.name, tuple(s.shape), s.start, s.dtype) for s in self.layout), self.length)


def written(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
