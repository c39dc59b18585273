"""A job: the parts of a whole comparison, as a TOML file lists them.

title = "..."                          what stands on the report
[[part]]
name = "mnist-cnn"                     its folder
title = "MNIST CNN"                    its chapter (default: the name)
verb = "compare"                       of python -m benchmarks
flags = { nranks = [1, 2], steps = 30 }       a list is joined by commas, true and false are --flag and --no-flag
matrix = { batch-size = [16, 64] }     one part for each combination of these flags
script = "train.py"                    of compare: a program, found from the TOML file's folder
arguments = ["--data-dir", "{mnist}"]  the program's; {mnist} and {fashion-mnist} are folders of these data sets
minutes = 3                            about how long it takes
limit = 60                             minutes after which it is ended
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UsageError, choose
from common.launch.cli import parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["JobFile", "Part", "config_of", "preset", "presets", "read_job"]

PRESETS = Path(__file__).parents[1] / "presets"
REAL_DATA = ("mnist", "fashion-mnist")  # data sets that are files; without them, synthetic data stand in
CONFIGS = {
    "compare": "benchmarks.flags.compare:CompareConfig",
    "compare script.py": "benchmarks.flags.script:CompareScriptConfig",
    "sweep": "benchmarks.flags.sweep:SweepConfig",
    "accuracy": "benchmarks.flags.accuracy:AccuracyConfig",
    "crossover": "benchmarks.flags.crossover:CrossoverConfig",
}
VERBS = ("compare", "sweep", "accuracy", "crossover")
KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {  # of a part's keys, and what an error says was expected
    "name": (str, "a text"),
    "title": (str, "a text"),
    "verb": (str, "a text"),
    "flags": (dict, "a table of flags"),
    "matrix": (dict, "a table of lists"),
    "script": (str, "a path"),
    "arguments": (list, "a list"),
    "minutes": ((int, float), "a number"),
    "limit": ((int, float), "a number"),
}


@dataclass(frozen=True)
class Part:
    """One command of a job.

    Args:
        words: after `python -m benchmarks`, without --out.
        script: the program, if it runs one; `words` ends where it begins.
        arguments: the program's.
        minutes: about how long it takes.
        limit: minutes after which it is ended.
    """

    name: str
    title: str
    words: tuple[str, ...]
    script: Path | None = None
    arguments: tuple[str, ...] = ()
    minutes: float = 1.0
    limit: float = 60.0

    def command(self, out: Path, *more: str) -> list[str]:
        """After `python -m benchmarks`, with more flags."""
        program = [str(self.script), *self.arguments] if self.script else []
        return [*self.words, "--out", str(out), *more, *program]


@dataclass(frozen=True)
class JobFile:
    title: str
    parts: list[Part]
    synthetic: bool  # synthetic data stand in for files that were not given


def presets() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset(name: str) -> Path:
    """The file of a preset.

    Raises:
        UsageError: there is none of that name.
    """
    return PRESETS / f"{choose('preset', name, presets())}.toml"


def read_job(path: Path, data_dir: Path | None, stand_in: Callable[[str], Path]) -> JobFile:
    """The parts in a file, every one's flags checked.

    Args:
        data_dir: the folder that holds a folder for each of REAL_DATA; None: synthetic data stand in.
        stand_in: makes the files of a data set out of synthetic data, for programs that read files.

    Raises:
        UsageError: what is wrong in the file, and where.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as exc:
        raise UsageError(f"cannot read the job {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path} is not TOML: {exc}") from exc
    for key in content:
        choose(f"key in {path.name}", key, ("title", "part"))
    tables = content.get("part")
    if not isinstance(tables, list) or not tables or not all(isinstance(each, dict) for each in tables):
        raise UsageError(f"{path.name} lists no [[part]]")
    reader = Reader(path, data_dir, stand_in)
    parts = [part for index, each in enumerate(tables) for part in reader.parts(each, index)]
    for part in parts:
        if [other.name for other in parts].count(part.name) > 1:
            raise UsageError(f"{path.name}: two parts are called {part.name}; give them different names")
    return JobFile(str(content.get("title", path.stem)), parts, reader.synthetic)


class Reader:
    """Makes parts of a file's tables."""

    def __init__(self, path: Path, data_dir: Path | None, stand_in: Callable[[str], Path]) -> None:
        self._path, self._data_dir, self._stand_in = path, data_dir, stand_in
        # A preset's programs are those of the checkout that holds this package.
        self._folder = PRESETS.parents[1] if path.parent == PRESETS else path.resolve().parent
        self.synthetic = False

    def parts(self, table: dict[str, Any], index: int) -> Iterator[Part]:
        where = f"{self._path.name}, part {table.get('name', index + 1)}"
        for key, value in table.items():
            kind, expected = KINDS[choose(f"key in {where}", key, KINDS)]
            if not isinstance(value, kind) or isinstance(value, bool):
                raise UsageError(f"{where}: {key} must be {expected} (got {value!r})")
        for key in ("name", "verb"):
            if key not in table:
                raise UsageError(f"{where} has no {key}")
        if not re.fullmatch(r"[\w.-]+", table["name"]):
            raise UsageError(f"{where}: a name is made of letters, digits, '-', '_' and '.' (got {table['name']!r})")
        choose(f"verb in {where}", table["verb"], VERBS)
        for key in ("script", "arguments"):
            if key in table and (table["verb"] != "compare" or "script" not in table):
                raise UsageError(f'{where}: {key} is for verb = "compare" with a script')
        for chosen in combinations(table.get("matrix", {}), where):
            yield self._part(table, chosen, where)

    def _part(self, table: dict[str, Any], chosen: dict[str, Any], where: str) -> Part:
        suffix = [re.sub(r"[^\w.]+", "-", str(value)) for value in chosen.values()]
        script = from_here(self._folder / table["script"]) if "script" in table else None
        if script and not script.is_file() and self._path.parent != PRESETS:  # examples are not installed
            raise UsageError(f"{where}: no such script: {script}")
        flags = {key.replace("_", "-"): value for key, value in {**table.get("flags", {}), **chosen}.items()}
        part = Part(
            name="-".join([table["name"], *suffix]),
            title=" ".join([table.get("title", table["name"]), *(f"{k} {v}" for k, v in chosen.items())]),
            words=(table["verb"], *words_of(self._with_data(flags, where), where)),
            script=script,
            arguments=tuple(self._placed(str(word), where) for word in table.get("arguments", ())),
            minutes=float(table.get("minutes", Part.minutes)),
            limit=float(table.get("limit", Part.limit)),
        )
        check_flags(part, where)
        return part

    def _with_data(self, flags: dict[str, Any], where: str) -> dict[str, Any]:
        """Where the files of the data set are, or other data."""
        name = flags.get("dataset")
        if name not in REAL_DATA or "data-dir" in flags:
            return flags
        if self._data_dir is None:
            self.synthetic = True
            return {**flags, "dataset": "synthetic"}
        return {**flags, "data-dir": str(self._folder_of(name, where))}

    def _placed(self, word: str, where: str) -> str:
        for name in REAL_DATA:
            if (mark := f"{{{name}}}") in word:
                word = word.replace(mark, str(self._folder_of(name, where)))
        return word

    def _folder_of(self, name: str, where: str) -> Path:
        if self._data_dir is None:
            self.synthetic = True
            return self._stand_in(name)
        folder = self._data_dir / name
        if not folder.is_dir():
            raise UsageError(f"{where} needs the folder {folder}; --data-dir names the one that holds it")
        return folder


def from_here(path: Path) -> Path:
    """As seen from the working folder, if it lies below: results that hold the command then name no place of their
    machine."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def combinations(matrix: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """
    >>> [*combinations({"model": ["a", "b"], "seed": [1]}, "")]
    [{'model': 'a', 'seed': 1}, {'model': 'b', 'seed': 1}]
    """
    for flag, values in matrix.items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"{where}: matrix.{flag} must be a list of values (got {values!r})")
    for values in itertools.product(*matrix.values()):
        yield dict(zip(matrix, values, strict=True))


def words_of(flags: Mapping[str, Any], where: str) -> Iterator[str]:
    """
    >>> [*words_of({"nranks": [1, 2], "overlap": False, "lr": 0.1}, "")]
    ['--nranks', '1,2', '--no-overlap', '--lr', '0.1']
    """
    for flag, value in flags.items():
        if flag in ("out", "lang", "help"):
            raise UsageError(f"{where}: the flag {flag} is not a part's to give")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, (str, int, float)):
            yield from (f"--{flag}", str(value))
        elif isinstance(value, list) and value and all(isinstance(each, (str, int, float)) for each in value):
            yield from (f"--{flag}", ",".join(map(str, value)))
        else:
            raise UsageError(f"{where}: the flag {flag} must be a text, a number, a list of them, or true or false")


def config_of(part: Part) -> Any:
    """The class of its verb's flags; None if this version has no such verb."""
    module, _, name = CONFIGS["compare script.py" if part.script else part.words[0]].partition(":")
    return getattr(importlib.import_module(module), name) if importlib.util.find_spec(module) else None


def check_flags(part: Part, where: str) -> None:
    """As the verb itself will, before hours have gone by.

    Raises:
        UsageError: in the verb's words.
    """
    try:
        if config := config_of(part):
            parse(config, where, part.words[1:])
    except UsageError as exc:
        raise UsageError(f"{where}: {exc}") from exc
