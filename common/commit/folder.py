"""The folder of a training's commits, named by their steps.

    DIR/step-00000200/rank-0.safetensors         a participant's part
    DIR/step-00000200/rank-0.safetensors.sha256  its digest, as sha256sum writes it: the part is there
    DIR/step-00000200/manifest.json              written last, when all parts are there
    DIR/.writer                                  locked by rank 0 of the job that writes here

Every file is there whole or not at all (common/system/atomic_file.py). A commit is whole when its manifest is there and
every part has the digest that it names. What was torn later, by whatever, is found by that and never loaded.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from common.commit.manifest import Manifest, PartEntry
from common.commit.parts import Part, from_bytes, to_bytes
from common.errors import CommitCorrupt, CommitFailed, FileNotWritten, UsageError
from common.system.atomic_file import UNFINISHED, sync_folder, why_not_writable, write_file
from common.system.fault_points import reach_stage

__all__ = ["MANIFEST", "CommitFolder", "say"]

MANIFEST = "manifest.json"
SUFFIX, NOTE = ".safetensors", ".sha256"
PREFIX = "step-"
CHUNK = 1 << 22  # bytes that are hashed at a time
WRITER = ".writer"
ENDING_S, POLL_S = 5.0, 0.05  # a job that was just killed may take so long to end


def say(line: str) -> None:
    """On stderr."""
    print(f"gradsync: {line}", file=sys.stderr, flush=True)


class CommitFolder:
    """
    Args:
        path: of the folder; all participants' is the same, on several hosts a shared one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: int | None = None  # descriptor of the locked file

    def __str__(self) -> str:
        return str(self.path)

    def of_step(self, step: int) -> Path:
        return self.path / f"{PREFIX}{step:08}"

    def part_file(self, step: int, name: str) -> Path:
        return self.of_step(step) / f"{name}{SUFFIX}"

    def make(self) -> None:
        """
        Raises:
            UsageError: it cannot be made or written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            why = why_not_writable(self.path)
        except OSError as exc:
            why = reason(exc)
            if self.path.exists() and not self.path.is_dir():
                why = "it is a file, and a folder is needed; name another one, which is made if it is not there"
        if why:
            raise UsageError(f"cannot write to --checkpoint-dir {self.path}: {why}")

    def hold(self, seconds: float = ENDING_S) -> None:
        """Keep the jobs of others out until `release`, or the end of this process; forked children have no part in it.

        Args:
            seconds: to wait for another job to end.

        Raises:
            UsageError: another job writes here.
        """
        descriptor = os.open(self.path / WRITER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + seconds
        while (error := locked(descriptor)) in (errno.EACCES, errno.EAGAIN):
            if time.monotonic() > deadline:
                who = os.pread(descriptor, 999, 0).decode(errors="replace") or "another process"
                os.close(descriptor)
                raise UsageError(
                    f"another job writes its commits to --checkpoint-dir {self.path}: {who}; wait for its end, or name "
                    "another folder"
                )
            time.sleep(POLL_S)
        if error:  # a file system without locks
            os.close(descriptor)
            return
        self.release()
        self._held = descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def release(self) -> None:
        """Idempotent."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def begun(self) -> list[int]:
        """Steps of which there is something, ascending."""
        names = [entry.name for entry in self.path.glob(f"{PREFIX}*")]
        return sorted(int(name.removeprefix(PREFIX)) for name in names if name.removeprefix(PREFIX).isdecimal())

    def steps(self) -> list[int]:
        """Steps whose commits have a manifest, ascending."""
        return [step for step in self.begun() if (self.of_step(step) / MANIFEST).exists()]

    def write_part(self, step: int, name: str, part: Part) -> None:
        """
        Raises:
            CommitFailed: it is not there.
        """
        content = to_bytes(part)
        file = self.part_file(step, name)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, content, reached=partial(reach_stage, "part", step))
            write_file(note_of(file), f"{hashlib.sha256(content).hexdigest()}  {file.name}\n")
        except (OSError, FileNotWritten) as exc:
            raise CommitFailed(f"{name} cannot write its part of the commit of step {step:,}: {exc}") from exc

    def entry(self, step: int, name: str) -> PartEntry | None:
        """Of a part, as its writer noted it; None as long as the part is not there."""
        file = self.part_file(step, name)
        try:
            return PartEntry(note_of(file).read_text().partition(" ")[0], file.stat().st_size)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write_manifest(self, manifest: Manifest) -> None:
        """The commit is whole from now on.

        Raises:
            CommitFailed: it is not.
        """
        try:
            reached = partial(reach_stage, "manifest", manifest.step)
            write_file(self.of_step(manifest.step) / MANIFEST, manifest.to_bytes(), reached=reached)
            sync_folder(self.path)
        except (OSError, FileNotWritten) as exc:
            raise CommitFailed(f"rank 0 cannot end the commit of step {manifest.step:,}: {exc}") from exc

    def manifest(self, step: int) -> Manifest:
        """
        Raises:
            CommitCorrupt: it cannot be read.
        """
        file = self.of_step(step) / MANIFEST
        try:
            found = Manifest.from_bytes(file.read_bytes())
        except (OSError, ValueError) as exc:
            raise CommitCorrupt(f"{file}: {reason(exc)}") from exc
        if found.step != step:
            raise CommitCorrupt(f"{file}: it is of step {found.step:,}")
        return found

    def part(self, manifest: Manifest, name: str) -> Part:
        """
        Raises:
            CommitCorrupt: it is not what was written.
        """
        file = self.part_file(manifest.step, name)
        try:
            content = file.read_bytes()
            check(manifest.parts[name], len(content), lambda: hashlib.sha256(content).hexdigest())
            return from_bytes(content)
        except KeyError as exc:
            raise CommitCorrupt(f"{file}: the manifest does not name it") from exc
        except (OSError, ValueError) as exc:
            raise CommitCorrupt(f"{file}: {reason(exc)}") from exc

    def verify(self, step: int) -> Manifest:
        """The manifest of a whole commit.

        Raises:
            CommitCorrupt: it is not whole; the message names the first file that is not what was written.
        """
        manifest = self.manifest(step)
        for name, entry in manifest.parts.items():
            file = self.part_file(step, name)
            try:
                check(entry, file.stat().st_size, partial(sha256_of, file))
            except (OSError, ValueError) as exc:
                raise CommitCorrupt(f"{file}: {reason(exc)}") from exc
        return manifest

    def newest(self, tell: Callable[[str], None] = say) -> Manifest | None:
        """Of the newest whole commit; None: there is no commit at all.

        Args:
            tell: is told of newer ones that are not whole.

        Raises:
            CommitCorrupt: there are commits, and none is whole.
        """
        broken: list[str] = []
        for step in reversed(self.steps()):
            try:
                manifest = self.verify(step)
            except CommitCorrupt as exc:
                broken.append(f"the commit of step {step:,} is not whole: {exc}")
                continue
            for line in broken:
                tell(f"{line}; going back to that of step {step:,}")
            return manifest
        if broken:
            raise CommitCorrupt(
                f"none of the {len(broken)} commit(s) in {self.path} is whole; {broken[0]}; get its files back from a "
                "copy, or begin anew in another --checkpoint-dir"
            )
        return None

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` commits, and what was begun before them and never ended."""
        kept = self.steps()[-keep:]
        for step in self.begun():
            if kept and step < kept[0]:
                self._remove(step)

    def remove_after(self, step: int) -> None:
        """Remove what there is of later steps, which are made again."""
        for later in self.begun():
            if later > step:
                self._remove(later)

    def remove_unfinished(self) -> None:
        """Remove what there is of commits that nobody ends any more, and of files of whole ones that were being written
        once more."""
        for step in set(self.begun()) - set(self.steps()):
            self._remove(step)
        for file in self.path.glob(f"{PREFIX}*/*{UNFINISHED}"):
            file.unlink(missing_ok=True)

    def _remove(self, step: int) -> None:
        folder = self.of_step(step)
        with suppress(OSError):
            (folder / MANIFEST).unlink()  # first: what is half removed is no commit
            sync_folder(folder)
        shutil.rmtree(folder, ignore_errors=True)


def locked(descriptor: int) -> int:
    """0 once this process has locked the file, else why not: a code of errno."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        return exc.errno or errno.ENOLCK
    return 0


def note_of(file: Path) -> Path:
    return file.with_name(file.name + NOTE)


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def check(entry: PartEntry, size: int, digest: Callable[[], str]) -> None:
    """
    Raises:
        ValueError: a part has not the size or the digest with which it was written.
    """
    if size < entry.size:
        raise ValueError(f"truncated at {size:,} of {entry.size:,} bytes")
    if size > entry.size:
        raise ValueError(f"{size:,} bytes, {entry.size:,} were written")
    if (found := digest()) != entry.sha256:
        raise ValueError(f"its checksum is wrong: SHA-256 {found[:12]}..., {entry.sha256[:12]}... was written")


def reason(exc: Exception) -> str:
    return exc.strerror or str(exc) if isinstance(exc, OSError) else str(exc)
