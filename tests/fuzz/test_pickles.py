"""A pickle on any wire and in any file that is read is never loaded: the file that it would make is not there."""

from __future__ import annotations

import ast
import json
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from common.errors import ProtocolError
from common.paddle_api.communication.objects import Codec
from tests.fuzz.target import Finding
from tests.fuzz.test_parsers import ALL
from tests.support.groups import ROOT

MAY = {
    "common/paddle_api/communication/objects.py",  # where the user asks for it by --allow-pickle
    "common/program/script.py",  # executes his program's file
}


class Canary:
    """Makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


def test_the_canary_sings_if_it_is_loaded(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Canary(tmp_path / "canary"))).close()
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ALL)
def test_no_parser_loads_one(name: str, tmp_path: Path) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        payload = pickle.dumps(Canary(tmp_path / "canary"), protocol)
        for data in (payload, b"\0" + payload, *(seed[: len(seed) // 2] + payload for seed in ALL[name].seeds[:9])):
            with suppress(Finding):
                ALL[name].check(data)
    assert not (tmp_path / "canary").exists()


def test_an_object_that_another_rank_has_pickled_is_refused(tmp_path: Path) -> None:
    payload = pickle.dumps(Canary(tmp_path / "canary"))
    text = json.dumps(["l", ["o", len(payload)]]).encode()
    with pytest.raises(ProtocolError, match="without --allow-pickle"):
        Codec().decode(struct.pack("<Q", len(text)) + text + payload)
    assert not (tmp_path / "canary").exists()


def test_arrays_of_objects_in_files_are_refused(tmp_path: Path) -> None:
    """As every reader of ours calls NumPy's, see below."""
    np.savez(tmp_path / "x.npz", x=np.array([Canary(tmp_path / "canary")], object))
    with np.load(tmp_path / "x.npz", allow_pickle=False) as arrays, pytest.raises(ValueError, match="allow_pickle"):
        arrays["x"]
    assert not (tmp_path / "canary").exists()


def test_nothing_else_knows_pickle() -> None:
    """Nor is NumPy asked for it anywhere."""
    found = set()
    for package in ("benchmarks", "collective", "common", "ps"):
        for path in (ROOT / package).rglob("*.py"):
            if any(unsafe(node) for node in ast.walk(ast.parse(path.read_text()))):
                found.add(str(path.relative_to(ROOT)))
    assert found == MAY


def unsafe(node: ast.AST) -> bool:
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    if isinstance(node, ast.Import):
        return bool(modules & {each.name for each in node.names})
    if isinstance(node, ast.ImportFrom):
        return node.module in modules
    if isinstance(node, ast.Call):
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        asked = any(
            k.arg == "allow_pickle" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
            for k in node.keywords
        )
        return called in ("eval", "exec") or asked
    return False
