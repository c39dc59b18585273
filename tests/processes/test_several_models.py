"""Several models in one program, frozen and thawed, and sparse embeddings: the bits of Paddle's own groups."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("paddle")

from tests.support.groups import ROOT
from tests.support.thorough import examples
from tests.support.unmodified import LAUNCHERS, run

PROGRAM = ROOT / "tests" / "programs" / "several_models.py"

SOME_RANKS = ROOT / "tests" / "programs" / "some_ranks.py"
ANY_ORDER = ROOT / "tests" / "programs" / "any_order.py"

pytestmark = pytest.mark.processes


def test_the_parameters_are_those_of_paddles_own_groups(tmp_path: Path) -> None:
    kinds = ["gan", "distillation", "stages", "sparse"]
    found = {scheme: run(scheme, tmp_path / scheme, PROGRAM, *kinds)[0] for scheme in LAUNCHERS}
    assert len(found["ps"]) == 2 * len(kinds)
    assert found["ps"] == found["collective"] == found["paddle"]


@pytest.mark.long
def test_some_of_the_ranks_average_a_model_among_themselves(tmp_path: Path) -> None:
    number = {scheme: ["--nproc_per_node" if scheme == "paddle" else "--nranks", 4] for scheme in LAUNCHERS}
    found = {scheme: run(scheme, tmp_path / scheme, *number[scheme], SOME_RANKS)[0] for scheme in LAUNCHERS}
    words = [line.split() for line in found["ps"]]
    assert len({begun for _, _, begun, _ in words}) == 1
    ended = [end for *_, end in words]
    assert (ended[0], ended[2]) == (ended[1], ended[3])
    assert ended[0] != ended[2]
    assert found["ps"] == found["collective"] == found["paddle"]


@pytest.mark.long
def test_what_paddle_cannot_average_has_the_same_bits_under_both_schemes(tmp_path: Path) -> None:
    """A parameter that is thawed after wrapping, and a model that is nothing but a sparse table."""
    kinds = ["thawed", "only_a_table"]
    ps, collective = (run(scheme, tmp_path / scheme, PROGRAM, *kinds)[0] for scheme in ("ps", "collective"))
    digests = {tuple(line.split()[2:]) for line in (*ps, *collective)}
    assert len(ps) == len(collective) == 2 * len(kinds)
    assert len(digests) == len(kinds)


@pytest.mark.long
def test_whatever_a_program_does_between_two_batches_the_bits_are_paddles(tmp_path: Path) -> None:
    """Accumulating, skipping, clearing in four ways, no_sync, freezing, clipping, branches, AMP, two optimizers."""
    seeds = (0, examples(10, 120))
    found = {scheme: run(scheme, tmp_path / scheme, ANY_ORDER, *seeds)[0] for scheme in LAUNCHERS}
    assert len(found["ps"]) == 2 * seeds[1]
    assert found["ps"] == found["collective"] == found["paddle"]
