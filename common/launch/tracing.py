"""How the parts of a trace come together: through a launcher's folder, or over the connections of the training.

Each process records its part with common/sync/trace.py; trace_file.py merges and writes them. They lie apart because a
training that only records must not need what a launcher does.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from common.errors import ProtocolError, UsageError
from common.launch.cli import check_writable
from common.launch.hosts import Node
from common.launch.job import FOLDER
from common.launch.ranks import name_of
from common.launch.trace_file import save_trace
from common.sync.clocks import compare_clocks
from common.sync.synchronizer import Synchronizer
from common.sync.trace import MOST_EVENTS, Part, Recorder
from common.system.process import restarts

__all__ = ["check_one_host", "collecting", "parts_folder", "read_parts", "recorder_for", "tracing"]

MOST_BYTES = 1 << 28  # of a part, packed or not: MOST_EVENTS take some 10 MB
MOST_PROCESSES = 1 << 16
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Instant = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]  # ns


class PartOfTrace(Struct, frozen=True):
    """A Part as it is read."""

    kind: Literal["rank", "server"]
    index: Annotated[int, Meta(ge=0, lt=MOST_PROCESSES)]
    of: dict[str, str | int | float | None]
    host: str
    readings: list[tuple[Instant, Instant, Instant]]
    buckets: list[Count]
    first_step: Count
    events: Annotated[
        list[tuple[Instant, Instant, str, Count, Annotated[int, Meta(ge=-1)]]], Meta(max_length=MOST_EVENTS)
    ]


TRACE_VARIABLE = "GRADSYNC_TRACE"  # the folder in which a launcher of one host collects the parts


@contextmanager
def tracing(synchronizer: Synchronizer, file: Path | None, *, folder: Path | None = None) -> Iterator[None]:
    """Record what the synchronizer does within, if there is a `file`, which rank 0 writes at the end, of all ranks and
    servers; after an exception of itself alone.

    Args:
        folder: every rank leaves its part there instead, and no file is written.
    """
    if file is None:
        yield
        return
    recorder = recorder_for(synchronizer)
    synchronizer.trace = recorder
    try:
        yield
        parts = gather_parts(synchronizer, recorder) if folder is None else []
    except BaseException:
        parts = [recorder.part()]
        raise
    finally:
        recorder.leave(folder)
        if folder is None and synchronizer.rank == 0:
            save_trace(file, parts)


def recorder_for(synchronizer: Synchronizer) -> Recorder:
    """Of a rank."""
    return Recorder(
        "rank",
        synchronizer.rank,
        scheme=synchronizer.scheme,
        mode=synchronizer.mode,
        nranks=synchronizer.nranks,
        servers=synchronizer.servers,
        staleness=synchronizer.staleness,
        restarts=restarts(),
    )


def gather_parts(synchronizer: Synchronizer, recorder: Recorder) -> list[Part]:
    """Of all ranks and, on rank 0, of all servers; called by all ranks, not within a step."""
    compare_clocks(synchronizer)
    mine = np.frombuffer(recorder.packed(), np.uint8)
    sizes = synchronizer.all_gather(np.array([mine.size]))[:, 0]
    if not 0 <= sizes.min() <= sizes.max() <= MOST_BYTES:
        raise ProtocolError(f"a rank has a trace of {sizes.max():,} bytes, more than {MOST_BYTES:,}")
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: mine.size] = mine
    everyone = synchronizer.all_gather(padded)
    parts = unpack(row[:size].tobytes() for row, size in zip(everyone, sizes, strict=True))
    for rank, part in enumerate(parts):
        if (part["kind"], part["index"]) != ("rank", rank):
            raise ProtocolError(f"rank {rank} gave the trace of {part['kind']} {part['index']}")
    if synchronizer.rank == 0:
        servers = unpack(answer.packed for answer in synchronizer.traced_servers.ask_servers(events=True))
        for part, readings in zip(servers, recorder.of_servers, strict=True):
            part["readings"] = readings
        parts += servers
    return parts


def unpack(packed: Iterable[bytes]) -> list[Part]:
    """
    Raises:
        ProtocolError: one is no part of a trace.
    """
    return [unpacked(each) for each in packed]


def unpacked(packed: bytes) -> Part:
    try:
        opened = zlib.decompressobj()
        data = opened.decompress(packed, MOST_BYTES)
        if opened.unconsumed_tail or not opened.eof:
            raise ProtocolError(f"a part of a trace has more than {MOST_BYTES:,} bytes, or its end is missing")
        part = msgspec.json.decode(data, type=PartOfTrace)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"a part of a trace cannot be read: {exc}") from exc
    if any(isinstance(value, int) and abs(value) > MOST_PROCESSES for value in part.of.values()):
        raise ProtocolError("a part of a trace says that it is of more processes than there can be")
    return msgspec.structs.asdict(part)


# Under a launcher


def check_one_host(file: Path | None, script: Sequence[str], node: Node) -> None:
    """
    Raises:
        UsageError: a trace of a script is wanted from several hosts, between which scripts gather nothing.
    """
    if file is not None and script and node.nnodes > 1:
        raise UsageError(
            f"--trace of {name_of(script)} works on one host so far (got {node.nnodes}); leave --trace out"
        )


def parts_folder() -> Path | None:
    """Where the launcher of this process collects parts, if it does."""
    folder = os.environ.get(TRACE_VARIABLE)
    return Path(folder) if folder else None


def read_parts(folder: Path) -> list[Part]:
    """What processes have left there."""
    return unpack(path.read_bytes() for path in sorted(folder.glob("*.part")))


@contextmanager
def collecting(file: Path | None) -> Iterator[dict[str, str]]:
    """For a launcher of one host: gives what its processes' environment needs; at the end, however it comes, `file` is
    written of what they have left. They must have ended by then."""
    if file is None:
        yield {}
        return
    check_writable("trace", file)
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-") as folder:
        try:
            yield {TRACE_VARIABLE: folder}
        finally:
            save_trace(file, read_parts(Path(folder)))
