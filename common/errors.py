"""The errors that GradSync raises at run time, as one tree.

    GradSyncError                    exit code 1
    ├── UsageError                   2   what was asked for cannot work; the message says what would
    │   ├── DataError                    a data file is missing or corrupt
    │   ├── CommitCorrupt                no commit of the training is whole
    │   ├── PortInUse                    another process listens there
    │   ├── SharedMemoryTooSmall         not enough memory for a shared segment
    │   ├── RendezvousError              the group never came together: wrong, duplicate or missing rank
    │   ├── PeerUnreachable              nobody answered at that address
    │   ├── CredentialsRefused           who answered there does not belong to this job, or says that we don't
    │   ├── VersionMismatch              two versions of GradSync in one group
    │   └── LayoutMismatch               ranks disagree about parameters, optimizer or learning rate
    ├── CommitFailed                     a commit of the training could not be written
    ├── FileNotWritten                   a result could not be written; the file holds what it held before
    ├── NonFiniteGradient                a rank's gradient is NaN or infinite; no parameter was changed
    ├── NcclFailed                       NCCL or CUDA reported an error that no other process explains
    ├── CertificateFailed            3   schemes that must compute the same bits did not
    ├── PeerError                    4   another process failed; the one it names is where to look
    │   ├── PeerLost                     it died, or left with an error
    │   └── PeerStalled                  it is there but did not take part within the limit
    ├── ProtocolError                5   a message that cannot be right (wrong step, bucket, size): a bug
    │   ├── ChunkCorrupt                 data were damaged on their way
    │   └── StaleEpoch                   a message of an earlier incarnation of the group
    └── RecoveryFailed               6   restarts were asked for, and did not help

Two more hold what another process left behind: ProcessFailed (common/launch/child.py), with that process's exit code,
and ProgramFailed (benchmarks/training/program.py), with 1.

Bad arguments of a Python call raise ValueError or TypeError instead, as Python's own functions do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CertificateFailed",
    "ChunkCorrupt",
    "CommitCorrupt",
    "CommitFailed",
    "CredentialsRefused",
    "DataError",
    "FileNotWritten",
    "GradSyncError",
    "LayoutMismatch",
    "NcclFailed",
    "NonFiniteGradient",
    "PeerError",
    "PeerLost",
    "PeerStalled",
    "PeerUnreachable",
    "PortInUse",
    "ProtocolError",
    "RecoveryFailed",
    "RendezvousError",
    "SharedMemoryTooSmall",
    "StaleEpoch",
    "UsageError",
    "VersionMismatch",
    "choose",
    "did_you_mean",
    "error_from_name",
]


class GradSyncError(Exception):
    """Base of all; `exit_code` is what a command line ends with."""

    exit_code = 1


class UsageError(GradSyncError):
    exit_code = 2


class DataError(UsageError):
    pass


class CommitCorrupt(UsageError):
    pass


class PortInUse(UsageError):
    pass


class SharedMemoryTooSmall(UsageError):
    pass


class RendezvousError(UsageError):
    pass


class PeerUnreachable(UsageError):
    pass


class CredentialsRefused(UsageError):
    pass


class VersionMismatch(UsageError):
    pass


class LayoutMismatch(UsageError):
    pass


class CommitFailed(GradSyncError):
    pass


class FileNotWritten(GradSyncError):
    pass


class NonFiniteGradient(GradSyncError):
    pass


class NcclFailed(GradSyncError):
    pass


class CertificateFailed(GradSyncError):
    exit_code = 3


class PeerError(GradSyncError):
    exit_code = 4


class PeerLost(PeerError):
    pass


class PeerStalled(PeerError):
    pass


class ProtocolError(GradSyncError):
    exit_code = 5


class ChunkCorrupt(ProtocolError):
    pass


class StaleEpoch(ProtocolError):
    pass


class RecoveryFailed(GradSyncError):
    exit_code = 6


def error_from_name(name: str, message: str) -> GradSyncError:
    """The error that another process named; an unknown name becomes a plain GradSyncError."""
    candidate = globals().get(name)
    if isinstance(candidate, type) and issubclass(candidate, GradSyncError):
        return candidate(message)
    return GradSyncError(f"{name}: {message}")


def choose(what: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is known; else raise UsageError naming the nearest known one."""
    options = list(known)
    if name in options:
        return name
    raise UsageError(f"unknown {what} {name!r}{did_you_mean(name, options, quote=True)} (known: {', '.join(options)})")


def did_you_mean(name: str, options: Iterable[str], *, quote: bool = False) -> str:
    """The end of a message that names the nearest option, "; did you mean x?"; "" if none is near."""
    near = difflib.get_close_matches(name, list(options), n=1, cutoff=0.5)
    return f"; did you mean {repr(near[0]) if quote else near[0]}?" if near else ""
