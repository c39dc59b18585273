"""Several models in one program, frozen and thawed, and sparse embeddings: the bits of Paddle's own groups."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("paddle")

from tests.support.groups import ROOT
from tests.support.unmodified import LAUNCHERS, run

PROGRAM = ROOT / "tests" / "programs" / "several_models.py"

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("kind", ["gan", "distillation", "sparse", "only_a_table"])
def test_the_parameters_are_those_of_paddles_own_groups(tmp_path: Path, kind: str) -> None:
    found = {scheme: run(scheme, tmp_path / scheme, PROGRAM, kind)[0] for scheme in LAUNCHERS}
    assert len(found["ps"]) == 2
    assert found["ps"] == found["collective"] == found["paddle"]


def test_what_is_thawed_after_wrapping_is_synchronised_too(tmp_path: Path) -> None:
    """Paddle would let such parameters drift apart, so there is nothing to compare with but the other scheme."""
    ps, collective = (run(scheme, tmp_path / scheme, PROGRAM, "thawed")[0] for scheme in ("ps", "collective"))
    digests = {line.split()[-1] for line in (*ps, *collective)}
    assert len(ps) == len(collective) == 2
    assert len(digests) == 1
