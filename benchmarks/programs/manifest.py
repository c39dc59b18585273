"""The manifest of others' programs: where each is from, what it needs, and what is set from outside."""

from __future__ import annotations

import hashlib
import shutil
import sys
import textwrap
from pathlib import Path

import msgspec
from msgspec import Struct

from common.errors import DataError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["DATA", "MANIFEST", "Program", "digest_of", "lay_out", "missing", "read_manifest", "with_data"]

MANIFEST = Path(__file__).with_name("manifest.toml")
DATA = "data"  # beside the repositories: what a program reads, where it says {data}
PROGRAM = "program.py"  # what the blocks of a page become


class Program(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One program of the manifest.

    Args:
        path: of its script, or of a page that shows it, in the repository.
        blocks: which of the page's blocks of code make the program, counted from 0.
        files: other files and folders that it needs, in the repository.
        sha256: of the script and then all files, one after the other.
        folder: that it is started in, in the repository; "" for the script's own.
        write: small files of ours that are laid beside it, by path: configurations, a test harness's stand-in. What
            it reads is {data} there, as in `arguments` and `replace`.
        replace: what is changed in the script's text, for device and length: pairs of old and new.
        batches: after how many every epoch ends; 0: as long as it is.
        spawns: it starts its ranks itself, and is not started by Paddle's launcher.
        settings: what is changed for data, device and length, in words.
        waived: why its output, or the bits of its parameters, need not be Paddle's; "" if they must.
    """

    name: str
    repository: str
    commit: str
    path: str
    sha256: str
    blocks: list[int] = []
    files: list[str] = []
    folder: str = ""
    arguments: list[str] = []
    write: dict[str, str] = {}
    replace: list[tuple[str, str]] = []
    batches: int = 0
    spawns: bool = False
    settings: str = ""
    waived: str = ""
    seconds: float = 90.0

    @property
    def home(self) -> str:
        """The folder of its repository within that of all programs."""
        return self.repository.replace("/", "+")


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The file: commits by repository, what programs of one repository share, and the programs."""

    commits: dict[str, str]
    programs: list[dict[str, object]]
    shared: dict[str, dict[str, object]] = {}


def read_manifest(path: Path = MANIFEST) -> list[Program]:
    """
    Raises:
        DataError: it cannot be read, or a program lacks something.
    """
    try:
        manifest = msgspec.convert(tomllib.loads(path.read_text("utf-8")), Manifest)
        found = []
        for given in manifest.programs:
            shared = manifest.shared.get(str(given.get("shared", "")), {})
            whole = {**shared, **{key: value for key, value in given.items() if key != "shared"}}
            whole.setdefault("commit", manifest.commits[str(whole["repository"])])
            found.append(msgspec.convert(whole, Program))
    except OSError as exc:
        raise DataError(f"cannot read {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, KeyError) as exc:
        raise DataError(f"{path} is no manifest of programs: {exc}") from exc
    return found


def missing(program: Program, folder: Path) -> str:
    """Why it cannot be run; "" if it can."""
    root = folder / program.home
    for name in (program.path, *program.files):
        if not (root / name).exists():
            return f"no {program.home}/{name}"
    found = digest_of(program, folder)
    return (
        "" if found == program.sha256 else f"another version lies there: sha256 {found[:12]}, not {program.sha256[:12]}"
    )


def digest_of(program: Program, folder: Path) -> str:
    digest = hashlib.sha256()
    for name in (program.path, *program.files):
        for path in files_in(folder / program.home / name):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def files_in(path: Path) -> list[Path]:
    """All below it in the order of their names; itself, if it is a file."""
    if path.is_file():
        return [path]
    return sorted(each for each in path.rglob("*") if each.is_file() and "__pycache__" not in each.parts)


def lay_out(program: Program, folder: Path, into: Path) -> tuple[Path, Path]:
    """Copy the program to a folder of its own, with its changes; returns where to start it, and its script.

    Raises:
        DataError: what is to be replaced is not in it.
    """
    root = folder / program.home
    for name in (program.path, *program.files):
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (root / name).is_dir():
            shutil.copytree(root / name, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(root / name, target)
    for name, content in program.write.items():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        (into / name).write_text(with_data(content, folder), "utf-8")
    script = into / program.path
    text = script.read_text("utf-8")
    if program.blocks:
        found = blocks_of(text)
        text = "\n\n".join(found[number] for number in program.blocks)
        script = script.with_name(PROGRAM)
    for old, new in program.replace:
        if old not in text:
            raise DataError(f"{program.name}: no {old!r} in {program.path}")
        text = text.replace(old, with_data(new, folder))
    script.write_text(text, "utf-8")
    return into / program.folder if program.folder else script.parent, script


def with_data(text: str, folder: Path) -> str:
    return text.replace("{data}", str(folder.resolve() / DATA))


def blocks_of(page: str) -> list[str]:
    """The blocks of code of a page, or of a module's docstrings, without prompts and indentation."""
    lines = page.expandtabs(4).splitlines()
    found = []
    for number, line in enumerate(lines):
        if not line.strip().startswith((".. code-block:: py", ".. code:: py")):
            continue
        indent, block = len(line) - len(line.lstrip()), []
        for inside in lines[number + 1 :]:
            if inside.strip() and len(inside) - len(inside.lstrip()) <= indent:
                break
            block.append(inside)
        found.append(without_prompts(textwrap.dedent("\n".join(block))))
    return found


def without_prompts(block: str) -> str:
    lines = block.strip("\n").splitlines()
    while lines and lines[0].strip().startswith(":"):  # an option of the block
        del lines[0]
    lines = textwrap.dedent("\n".join(lines).strip("\n")).splitlines()
    if not any(line.startswith(">>>") for line in lines):
        return "\n".join(lines) + "\n"
    return "\n".join(line[4:] for line in lines if line.startswith((">>>", "..."))) + "\n"
