"""Who takes part in a comparison."""

from __future__ import annotations

import pytest

from benchmarks.contestants.table_of_trainings import Contestant, line_up
from common.errors import UsageError


def names(*args: object) -> list[str]:
    return [c.name for c in line_up(*args)]  # type: ignore[arg-type]


def test_everyone_at_one_two_and_four_ranks() -> None:
    assert names(["local", "ps", "ring"], [1, 2, 4], ["shm", "tcp"], [1, 2], ["shm", "grpc"]) == [
        *("local N=1", "ps/shm N=1", "ring/shm N=1"),
        *("ps/shm N=2", "ps/shm N=2 S=2", "ps/grpc N=2", "ring/shm N=2", "ring/tcp N=2"),
        *("ps/shm N=4", "ps/shm N=4 S=2", "ps/grpc N=4", "ring/shm N=4", "ring/tcp N=4"),
    ]


def test_names_are_unique_and_sorted_by_ranks() -> None:
    found = line_up(["ring", "ps"], [4, 2, 2], ["tcp"], [3], ["grpc"])
    assert [c.nranks for c in found] == [2, 2, 4, 4]
    assert len({c.name for c in found}) == 4


def test_other_modes_take_part_with_several_ranks_and_the_first_of_servers_and_planes() -> None:
    found = line_up(["ps"], [1, 4], ["shm"], [1, 2], ["shm", "grpc"], ["sync", "ssp:0", "ssp", "async", "geo:3"])
    assert [c.name for c in found] == [
        *("ps/shm N=1", "ps/shm N=4", "ps/shm N=4 S=2", "ps/grpc N=4"),
        *("ps/shm N=4 ssp:0", "ps/shm N=4 ssp:2", "ps/shm N=4 async", "ps/shm N=4 geo:3"),
    ]
    assert [c.name for c in found if not c.in_step] == ["ps/shm N=4 ssp:2", "ps/shm N=4 async", "ps/shm N=4 geo:3"]
    assert [c.name for c in line_up(["ps"], [1, 2], ["shm"], [1], ["shm"], ["async"])] == ["ps/shm N=2 async"]
    with pytest.raises(UsageError, match="unknown mode 'asinc'; did you mean 'async'"):
        line_up(["ps"], [2], ["shm"], [1], ["shm"], ["asinc"])


def test_paddle_takes_part_once_but_need_not_have_the_same_bits() -> None:
    found = line_up(["ps", "paddle"], [1, 2], ["shm", "tcp"], [1, 2], ["shm"])
    assert [c.name for c in found] == ["ps/shm N=1", "paddle N=1", "ps/shm N=2", "ps/shm N=2 S=2", "paddle N=2"]
    assert [c.name for c in found if c.in_step and not c.exact] == ["paddle N=1", "paddle N=2"]


def test_pytorch_takes_part_as_paddle_does() -> None:
    found = line_up(["ring", "torch-ddp"], [2, 1], ["shm", "tcp"], [1], ["shm"])
    assert [c.name for c in found] == ["ring/shm N=1", "torch-ddp N=1", "ring/shm N=2", "ring/tcp N=2", "torch-ddp N=2"]
    assert [(c.name, c.backend) for c in found if not c.exact] == [("torch-ddp N=1", "gloo"), ("torch-ddp N=2", "gloo")]
    with pytest.raises(UsageError, match="unknown scheme 'torch-dpp'; did you mean 'torch-ddp'"):
        line_up(["torch-dpp"], [1], ["shm"], [1], ["shm"])


def test_a_sharded_optimizer_takes_part_with_the_first_back_end_and_several_ranks() -> None:
    found = line_up(["ps", "ring"], [1, 2], ["shm", "tcp"], [1], ["shm"], shard_optimizer=True)
    names_of_rings = [c.name for c in found if c.scheme == "ring"]
    assert names_of_rings == ["ring/shm N=1", "ring/shm N=2", "ring/tcp N=2", "ring/shm N=2 sharded"]
    assert all(c.exact for c in found)


def test_local_has_one_rank_only() -> None:
    assert names(["local"], [2, 4], ["shm"], [1], ["shm"]) == []


def test_unknown_scheme_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown scheme 'rign'; did you mean 'ring'"):
        line_up(["rign"], [1], ["shm"], [1], ["shm"])


def test_contestants_are_dictionary_keys() -> None:
    assert {Contestant("ps", "grpc", 2, 1): 1}[Contestant("ps", "grpc", 2, 1)] == 1
