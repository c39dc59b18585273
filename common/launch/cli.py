"""Command lines: flags made from a dataclass by tyro, and errors as one line and an exit code."""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from common import __version__
from common.credentials.credentials import CredentialFlags, find, using
from common.errors import GradSyncError, UsageError, did_you_mean
from common.system.atomic_file import why_not_writable
from common.system.process import Terminated, last_words

__all__ = ["VERSION", "check_is_there", "check_writable", "run_command", "split_script", "to_reader"]

T = TypeVar("T")
VERSION = f"gradsync {__version__}"
NO_ROOM = re.compile("failed to map|cannot allocate memory", re.IGNORECASE)  # of the dynamic linker
FULL = (errno.ENOSPC, errno.EDQUOT)
KINDS: dict[type, tuple[str, str]] = {  # of flags: the placeholder in --help, and what an error says was expected
    int: ("INT", "a whole number"),
    float: ("FLOAT", "a number"),
    str: ("STR", "a text"),
    Path: ("PATH", "a path"),
}


def run_command(
    config: type[T], main: Callable[[T], int | None], *, prog: str, args: Sequence[str] | None = None
) -> int:
    """Parse the command line into `config`, call `main` with it, and return the exit code.

    An error of ours is one line on stderr, without a traceback, as is a full disk; anything else is a bug and keeps it.
    """
    return to_reader(lambda: in_words(config, main, prog, args))


def to_reader(command: Callable[[], int]) -> int:
    """The exit code of what `command` does and writes. Where nobody reads stdout any more (`| head`), it ends quietly;
    with 1, as rich's tables do."""
    code = 0
    try:
        try:
            code = command()
        finally:
            flush()
        return code
    except BrokenPipeError:
        if not is_unread():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return code or 1


def flush() -> None:
    try:
        print(end="", flush=True)
    except OSError as exc:
        if isinstance(exc, BrokenPipeError):
            raise  # of anything else Python complains at its end


def is_unread() -> bool:
    """Stdout is a pipe whose reader has left."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def in_words(config: type[T], main: Callable[[T], int | None], prog: str, args: Sequence[str] | None) -> int:
    """The exit code; what ended it otherwise is said on stderr."""
    try:
        parsed = parse(config, prog, args)
        flags = credential_flags(parsed)
        with using(find(flags)) if flags else nullcontext():
            return main(parsed) or 0
    except GradSyncError as exc:
        with last_words():
            print(getattr(exc, "words", "") or f"{prog}: {type(exc).__name__}: {exc}", file=sys.stderr)
        return exc.exit_code
    except OSError as exc:
        if exc.errno not in FULL:
            raise
        with last_words():
            print(f"{prog}: no space is left where it writes: free some, or write elsewhere", file=sys.stderr)
        return 1
    except (ImportError, MemoryError, RuntimeError) as exc:  # the last one is Paddle's, of many lines
        why = next((line.strip() for line in str(exc).splitlines() if NO_ROOM.search(line)), "")
        if (limit := limit_of_memory()) is None or not (isinstance(exc, MemoryError) or why):
            raise
        with last_words():
            print(f"{prog}: not enough memory: {why or exc} (it may have {limit:,} bytes, ulimit -v)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except Terminated as exc:
        print(f"{prog}: terminated (SIGTERM)", file=sys.stderr)
        return exc.EXIT_CODE


def credential_flags(config: Any) -> CredentialFlags | None:
    """Those of a command; None: it has none."""
    flags = getattr(config, "hosts", config)
    return flags if isinstance(flags, CredentialFlags) else None


def limit_of_memory() -> int | None:
    """What this process may map, in bytes; None: as much as it likes."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def parse(config: type[T], prog: str, args: Sequence[str] | None) -> T:
    """The command line as a `config`.

    Raises:
        UsageError: in one line, for what tyro would draw a box.
        SystemExit: with code 0, after --help or --version.
    """
    words = [
        re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), word)
        for word in (sys.argv[1:] if args is None else args)
    ]
    if "--version" in words:
        print(VERSION)
        raise SystemExit(0)
    for names in names_of_flags(config):
        check_one_value(names, words)
    import tyro

    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            return tyro.cli(config, prog=prog, args=words, registry=registry())
    except SystemExit as exc:
        if not exc.code:
            raise
    raise UsageError(in_one_line(complaint.getvalue()))


def names_of_flags(config: Any) -> Iterator[list[str]]:
    """Of every flag that has several names, all of them."""
    for name, hint in get_type_hints(config, include_extras=True).items():
        kind, *notes = get_args(hint) or (hint,)
        if is_dataclass(kind):
            yield from names_of_flags(kind)
        elif aliases := [alias for note in notes for alias in getattr(note, "aliases", None) or ()]:
            yield ["--" + name.replace("_", "-"), *aliases]


def check_one_value(names: Sequence[str], words: Sequence[str]) -> None:
    """Raise UsageError where two names of one flag are given different values, of which the last would be taken."""
    given: dict[str, str] = {}
    for number, word in enumerate(words, 1):
        name, equals, value = word.partition("=")
        if name in names:
            given[name] = value if equals else "".join(words[number : number + 1])
    if len(set(given.values())) > 1:
        both = " and ".join(f"{name} {value}" for name, value in given.items())
        raise UsageError(f"{both} contradict each other: these are names of one flag; give one of them")


def in_one_line(box: str) -> str:
    """What a box of tyro's says first, in our words.

    A box is a title, what is wrong, and then, after a rule, help that may mention similar flags:

        ╭─ Unrecognized options ───╮
        │ Unrecognized options: -x │
        │ ──────────────────────── │
    """
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", row).strip("│ ") for row in box.splitlines()[1:]]
    rule = next((i for i, row in enumerate(rows) if row.startswith("──")), len(rows))
    wrong, rest = " ".join(rows[:rule]), " ".join(rows[rule:])
    if unknown := re.match(r"Unrecognized options: (\S+?)(,|$)", wrong):
        word = unknown[1]
        if not word.startswith("-") and Path(word).is_dir():
            return f"{word} is a folder; name a program, as {Path(word) / 'train.py'}, or see --help"
        if not word.startswith("-") and Path(word).is_file():
            return f"{word} is no program: its name must end in .py; or see --help"
        if not word.startswith("-"):
            return f"unexpected argument {word!r}; see --help"
        similar = {*re.findall(r"--[a-z][a-z-]*", rest)} - {word, "--help"}
        return f"unknown flag {word}{did_you_mean(word, sorted(similar)) or '; see --help'}"
    if bad := re.match(r"Error parsing (\S+): (.*)", wrong):
        return f"{bad[1]} must be {bad[2]}"
    if missing := re.match(r"Missing value for argument [('\"]*(-[-\w/]+)", wrong):
        return f"{missing[1]} needs a value"
    return wrong or "the command line cannot be understood; see --help"


def registry() -> Any:
    """How tyro reads and describes our flags: a flag that may be unset shows neither a type nor a default of None."""
    from tyro import constructors

    rules = constructors.ConstructorRegistry()

    @rules.primitive_rule
    def one_value(info: constructors.PrimitiveTypeInfo) -> constructors.PrimitiveConstructorSpec[Any] | None:
        kind, *others = {*(get_args(info.type) or (info.type,))} - {NoneType} or {NoneType}
        if others or kind not in KINDS:
            return None
        metavar, expected = KINDS[kind]

        def read(words: list[str]) -> Any:
            try:
                return kind(words[0])
            except ValueError as exc:
                raise ValueError(f"{expected} (got {words[0]!r})") from exc

        return constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=read,
            is_instance=lambda value: value is None or isinstance(value, kind),
            str_from_instance=lambda value: [str(value)],
        )

    described: list[Any] = []  # dataclasses whose rule is under way: there tyro's own applies

    @rules.struct_rule
    def without_none(info: constructors.StructTypeInfo) -> constructors.StructConstructorSpec | None:
        if info.type in described:
            return None
        described.append(info.type)
        spec = constructors.ConstructorRegistry.get_struct_spec(info)
        described.remove(info.type)
        if not isinstance(spec, constructors.StructConstructorSpec):
            return None
        return replace(spec, fields=tuple(described_by_its_words(f) if f.default is None else f for f in spec.fields))

    return rules


def described_by_its_words(field: Any) -> Any:
    """A flag that may be unset: what that means stands in its help text, as in "(default: from --epochs)"."""
    from tyro import conf

    text = (field.helptext() if callable(field.helptext) else field.helptext) or ""
    words, default = re.fullmatch(r"(.*?)\s*(\(default: [^()]*\))?", text, re.DOTALL).groups()  # type: ignore[union-attr]
    hint = conf.arg(help_behavior_hint=default or "(optional)")
    return replace(field, type=Annotated[field.type, hint], helptext=words)


def check_writable(flag: str, path: Path | None, *, make_folder: bool = False) -> None:
    """Find out before training whether its result can be written after it.

    Args:
        make_folder: the flag names the folder, which is made where there is none; else it names the file, and a folder
            that is not there is a slip of the pen.

    Raises:
        UsageError: it cannot.
    """
    if path is None:
        return
    if not make_folder and not path.parent.exists():
        raise UsageError(f"cannot write to --{flag} {path}: there is no folder {path.parent}; make it, or name another")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists() or path.is_symlink()
        path.open("ab").close()
        if not there:
            path.unlink(missing_ok=True)  # what fails later leaves no empty file
    except OSError as exc:
        raise UsageError(f"cannot write to --{flag} {path}: {exc.strerror}") from exc
    regular = not path.exists() or path.is_file()
    if regular and (why := why_not_writable(path.resolve().parent)):
        raise UsageError(f"cannot write to --{flag} {path}: {why}")


def split_script(args: Sequence[str], *, modules: bool = False) -> tuple[list[str], list[str]]:
    """(our flags, the user's program and its arguments): it begins at the first argument that ends in .py.

    Args:
        modules: or at `-m`, before the name of a module.
    """
    for index, arg in enumerate(args):
        if (arg.endswith(".py") and not arg.startswith("-")) or (modules and arg == "-m"):
            return list(args[:index]), list(args[index:])
    return list(args), []


def check_is_there(script: Sequence[str]) -> None:
    """Raise UsageError if the user's program, if there is one, is a script that is not there."""
    if script and script[0] != "-m" and not Path(script[0]).is_file():
        raise UsageError(f"no such script: {script[0]} (in {Path.cwd()})")
