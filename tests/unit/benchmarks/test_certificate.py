"""The certificate: equal bits pass; a difference is found, placed and measured, and nothing else is let through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.contestants.table_of_trainings import Contestant
from benchmarks.flags.compare import CompareConfig
from benchmarks.records.compare import RankRecord
from benchmarks.records.result_files import plain
from benchmarks.training.certificate import WHOLE_BATCH_BOUND, certify, relative_difference, require_identical
from common.errors import CertificateFailed, UsageError
from common.launch.flags import TrainingConfig
from tests.support.typed_results import rank_record
from tests.unit.benchmarks.test_measure import measure

PS = Contestant("ps", "grpc", 2, 1)
RING = Contestant("ring", "shm", 2)
SHAPES = {"0.weight": (600, 700), "0.bias": (700,), "2.weight": (700, 10), "2.bias": (10,)}


class PoolDouble:
    """Trains nothing: every run ends in the same parameters, except where told otherwise."""

    def __init__(
        self, changes: dict[str, tuple[str, float]], lying_rank: int | None = None, *, first_too: bool = True
    ) -> None:
        self.changes, self.lying_rank, self.first_too = changes, lying_rank, first_too
        self.configs: list[TrainingConfig] = []

    def run(
        self, contestant: Contestant, config: TrainingConfig, *, keep: Path | None = None, **_: Any
    ) -> list[RankRecord]:
        self.configs.append(config)
        if config.steps == 1 and not self.first_too:
            contestant = RING  # and so as the others
        random = np.random.default_rng(7)
        arrays = {name: random.random((2, *shape), np.float32) for name, shape in SHAPES.items()}
        name, amount = self.changes.get(contestant.name, ("0.bias", 0.0))
        arrays[name][1].flat[3] += np.float32(amount)
        if keep:
            np.savez(keep, **arrays)
        digest = f"digest {name} {amount}" if amount else "digest"
        return [
            rank_record(parameters_sha256="another" if rank == self.lying_rank else digest, steps=config.steps)
            for rank in range(contestant.nranks)
        ]


def certificate(pool: PoolDouble, folder: Path) -> dict[str, Any]:
    config = TrainingConfig(steps=100, batch_size=8)
    return plain(certify(pool, [PS, RING], config, folder, on_run=lambda what: None))  # type: ignore[arg-type]


def test_equal_runs_pass(tmp_path: Path) -> None:
    pool = PoolDouble({})
    found = certificate(pool, tmp_path)
    assert found["identical"]
    assert found["passed"]
    assert found["schemes"] == {"ps/grpc N=2": "digest", "ring/shm N=2": "digest"}
    assert found["differences"] == []
    assert found["groups"][0]["whole_batch"] == {"difference": 0.0, "bound": WHOLE_BATCH_BOUND, "within": True}


def test_modes_in_another_order_are_listed_apart_and_their_ranks_must_agree(tmp_path: Path) -> None:
    free, bound = (Contestant("ps", "shm", 2, 1, mode) for mode in ("async", "ssp:0"))

    def certified(pool: PoolDouble, *contestants: Contestant) -> dict[str, Any]:
        config = TrainingConfig(steps=100, batch_size=8)
        return plain(certify(pool, contestants, config, tmp_path, on_run=lambda what: None))  # type: ignore[arg-type]

    changed = PoolDouble({free.name: ("0.bias", 0.25)})
    found = certified(changed, free, PS, RING, bound)
    assert found["passed"]
    assert found["other_order"] == ["ps/shm N=2 async"]
    assert found["groups"][0]["contestants"] == ["ps/grpc N=2", "ring/shm N=2", "ps/shm N=2 ssp:0"]
    assert found["schemes"]["ps/shm N=2 async"] == "digest 0.bias 0.25"
    assert not certified(PoolDouble({bound.name: ("0.bias", 0.25)}), PS, bound)["identical"]
    assert certified(PoolDouble({}), free)["groups"] == []
    (difference,) = certified(PoolDouble({}, lying_rank=1), free)["differences"]
    assert (difference["contestant"], difference["reference"]) == (free.name, "its own rank 0 (rank 1 differs)")


def test_it_takes_few_steps_and_the_whole_batch_for_one_process(tmp_path: Path) -> None:
    pool = PoolDouble({})
    certificate(pool, tmp_path)
    assert [c.steps for c in pool.configs] == [5, 5, 5]
    assert [c.batch_size for c in pool.configs] == [8, 8, 16]


def test_with_strong_scaling_ranks_share_the_batch(tmp_path: Path) -> None:
    pool = PoolDouble({})
    config = CompareConfig(batch_size=8, nranks="1,2", scaling="strong")
    one = Contestant("local", "none", 1)
    assert plain(certify(pool, [one, PS, RING], config, tmp_path, on_run=lambda what: None))["passed"]  # type: ignore[arg-type]
    assert [c.batch_size for c in pool.configs] == [8, 4, 4, 8]
    assert {c.steps for c in pool.configs} == {5}
    measure(pool, [one, PS], config, records={}, rounds=range(1), on_run=str)
    assert [c.batch_size for c in pool.configs[4:]] == [8, 4]
    with pytest.raises(
        UsageError, match=r"^--scaling strong shares --batch-size 8 equally, which 3 ranks cannot; give a "
    ):
        CompareConfig(batch_size=8, nranks="1,2,3", scaling="strong")
    with pytest.raises(UsageError, match="unknown scaling 'stron'; did you mean 'strong'"):
        CompareConfig(scaling="stron")


@pytest.mark.parametrize(("parameter", "bucket"), [("2.bias", 0), ("2.weight", 0), ("0.bias", 0), ("0.weight", 1)])
def test_one_changed_element_is_found_and_placed(tmp_path: Path, parameter: str, bucket: int) -> None:
    found = certificate(PoolDouble({RING.name: (parameter, 0.25)}), tmp_path)
    assert not found["identical"]
    assert not found["passed"]
    (difference,) = found["differences"]
    assert difference["contestant"] == "ring/shm N=2"
    assert difference["reference"] == "ps/grpc N=2"
    assert (difference["parameter"], difference["bucket"]) == (parameter, bucket)
    assert difference["max_abs"] == pytest.approx(0.25, abs=1e-6)


def test_a_rank_that_differs_from_rank_0_fails(tmp_path: Path) -> None:
    found = certificate(PoolDouble({}, lying_rank=1), tmp_path)
    assert not found["passed"]
    assert "rank 1 differs" in found["differences"][0]["reference"]


def test_whole_batch_outside_the_bound_fails(tmp_path: Path) -> None:
    found = certificate(PoolDouble({"local N=1": ("0.weight", 50.0)}), tmp_path)
    assert found["identical"]
    assert not found["passed"]
    assert found["groups"][0]["whole_batch"]["within"] is False
    found = certificate(PoolDouble({"local N=1": ("0.weight", 10.0)}), tmp_path)
    assert not found["passed"]
    assert found["groups"][0]["whole_batch"]["first_gradient"]["difference"] > 1e-5
    far = certificate(PoolDouble({"local N=1": ("0.weight", 50.0)}, first_too=False), tmp_path)
    assert not far["passed"]  # whatever the first gradients


@pytest.mark.parametrize("name", ["local N=1", "paddle N=2"])
def test_where_a_training_multiplies_rounding_its_first_gradients_decide(name: str, tmp_path: Path) -> None:
    pool = PoolDouble({name: ("0.weight", 10.0)}, first_too=False)
    contestants = [PS, RING, Contestant("paddle", "gloo", 2)]
    config = CompareConfig(steps=100, batch_size=8)
    found = plain(certify(pool, contestants, config, tmp_path, on_run=lambda what: None))  # type: ignore[arg-type]
    assert found["passed"]
    (one,) = [each for each in (found["groups"][0]["whole_batch"], *found["peers"]) if "first_gradient" in each]
    assert one["difference"] > WHOLE_BATCH_BOUND
    assert (one["within"], one["first_gradient"]) == (True, {"difference": 0.0, "bound": 1e-5})
    assert [(c.optimizer, c.lr) for c in pool.configs if c.steps == 1] == [("sgd", 1e6)] * 2
    assert {c.batch_size for c in pool.configs if c.steps == 1} == ({8, 16} if name.startswith("local") else {8})


def test_relative_difference_is_the_distance_by_the_way_moved() -> None:
    whole = {"w": np.array([[0, 0], [3, 4]], np.float32)}
    mine = {"w": np.array([[0, 0], [3, 4.5]], np.float32)}
    assert relative_difference(mine, whole) == pytest.approx(0.5 / 5)
    still = {"w": np.zeros((2, 2), np.float32)}
    assert relative_difference(still, still) == 0
    assert relative_difference(whole, still) > 0


def test_measured_runs_must_agree_in_every_repetition() -> None:
    good, bad = (rank_record(parameters_sha256=digest, steps=30) for digest in ("a", "b"))
    require_identical({PS: [good, good], RING: [good, good]})
    with pytest.raises(CertificateFailed, match=r"ring/shm N=2 has other parameters than ps/grpc N=2"):
        require_identical({PS: [good, good], RING: [good, bad]})
    require_identical({Contestant("ps", "shm", 2, 1, "geo:2"): [good, bad], RING: [good]})


@pytest.mark.parametrize("peer", ["paddle", "torch-ddp"])
@pytest.mark.parametrize(("change", "passed"), [(0.0, True), (1e-3, True), (50.0, False)])
def test_other_libraries_must_come_near_ours(tmp_path: Path, peer: str, change: float, passed: bool) -> None:
    library = Contestant(peer, "gloo", 2)
    pool = PoolDouble({library.name: ("0.weight", change)})
    config = TrainingConfig(steps=100, batch_size=8)
    found = plain(certify(pool, [PS, RING, library], config, tmp_path, on_run=lambda what: None))  # type: ignore[arg-type]
    (near,) = found["peers"]
    assert (near["contestant"], near["reference"], near["within"]) == (f"{peer} N=2", "ps/grpc N=2", passed)
    assert (near["difference"] > 0) == (change > 0)
    assert found["identical"]
    assert found["passed"] == passed
    assert found["groups"][0]["contestants"] == ["ps/grpc N=2", "ring/shm N=2"]
    require_identical({library: [rank_record(parameters_sha256=digest, steps=1) for digest in ("a", "b")]})
