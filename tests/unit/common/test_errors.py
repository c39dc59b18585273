"""The tree of errors: the drawing, the classes and the exit codes say the same."""

from __future__ import annotations

import re

import pytest

from common import errors
from common.errors import GradSyncError, UsageError, choose, error_from_name

TREE = {
    "GradSyncError": ("Exception", 1),
    "UsageError": ("GradSyncError", 2),
    "DataError": ("UsageError", 2),
    "PortInUse": ("UsageError", 2),
    "SharedMemoryTooSmall": ("UsageError", 2),
    "RendezvousError": ("UsageError", 2),
    "PeerUnreachable": ("UsageError", 2),
    "CredentialsRefused": ("UsageError", 2),
    "VersionMismatch": ("UsageError", 2),
    "LayoutMismatch": ("UsageError", 2),
    "CommitCorrupt": ("UsageError", 2),
    "CommitFailed": ("GradSyncError", 1),
    "FileNotWritten": ("GradSyncError", 1),
    "NonFiniteGradient": ("GradSyncError", 1),
    "NcclFailed": ("GradSyncError", 1),
    "CertificateFailed": ("GradSyncError", 3),
    "PeerError": ("GradSyncError", 4),
    "PeerLost": ("PeerError", 4),
    "PeerStalled": ("PeerError", 4),
    "ProtocolError": ("GradSyncError", 5),
    "ChunkCorrupt": ("ProtocolError", 5),
    "StaleEpoch": ("ProtocolError", 5),
    "RecoveryFailed": ("GradSyncError", 6),
}
DRAWN = re.compile(r"^([ │├└─]*)([A-Z]\w+)(?: {2,}(?:exit code )?(\d+)?)?", re.MULTILINE)


def error_classes() -> dict[str, type[GradSyncError]]:
    found = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    return {name: kind for name, kind in found.items() if issubclass(kind, GradSyncError)}


def drawn_tree() -> dict[str, tuple[str, int]]:
    """Name -> (the name it hangs under, its exit code), as the docstring draws it."""
    drawing = (errors.__doc__ or "").split("\n\n")[1]
    path: list[tuple[str, int]] = []
    tree = {}
    for indent, name, code in DRAWN.findall(drawing):
        depth = len(indent) // 4 - 1  # the drawing is indented by 4
        parent, inherited = path[depth - 1] if depth else ("Exception", 0)
        path[depth:] = [(name, int(code) if code else inherited)]
        tree[name] = (parent, path[depth][1])
    return tree


def test_classes_and_exit_codes() -> None:
    assert {name: (kind.__base__.__name__, kind.exit_code) for name, kind in error_classes().items()} == TREE


def test_the_docstring_draws_exactly_these_classes() -> None:
    assert drawn_tree() == TREE


def test_every_class_is_exported() -> None:
    assert set(error_classes()) < set(errors.__all__)
    assert all(hasattr(errors, name) for name in errors.__all__)


@pytest.mark.parametrize("name", TREE)
def test_an_error_comes_back_from_its_name(name: str) -> None:
    error = error_from_name(name, "rank 3 said: ü")
    assert type(error) is error_classes()[name]
    assert str(error) == "rank 3 said: ü"


@pytest.mark.parametrize(
    "name", ["", "NoSuchError", "ValueError", "Exception", "choose", "Iterable", "difflib", "__doc__"]
)
def test_an_unknown_name_becomes_the_base_and_keeps_its_text(name: str) -> None:
    error = error_from_name(name, "why")
    assert type(error) is GradSyncError
    assert str(error) == f"{name}: why"


def test_choose_returns_what_is_known() -> None:
    assert choose("fruit", "pear", ("apple", "pear")) == "pear"
    assert choose("fruit", "pear", iter(["apple", "pear"])) == "pear"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aple", "unknown fruit 'aple'; did you mean 'apple'? (known: apple, pear, quince)"),
        ("pears", "unknown fruit 'pears'; did you mean 'pear'? (known: apple, pear, quince)"),
        ("xyz", "unknown fruit 'xyz' (known: apple, pear, quince)"),
        ("", "unknown fruit '' (known: apple, pear, quince)"),
    ],
)
def test_choose_names_the_nearest(name: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose("fruit", name, ["apple", "pear", "quince"])
    assert str(caught.value) == message
