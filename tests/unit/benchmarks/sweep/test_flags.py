"""`python -m benchmarks sweep`: sizes, flags that cannot be, libraries that are not there."""

from __future__ import annotations

import pytest

from benchmarks.contestants.table_of_sweeps import BACKENDS, load_backend
from benchmarks.flags.sweep import SweepConfig
from benchmarks.stats.units import size_in_bytes, size_in_words
from common.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [("4KiB", 4096), ("1MiB", 1 << 20), ("100MB", 10**8), ("4096", 4096), ("2 gib", 2 << 30), ("1K", 1000), ("8B", 8)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "KiB", "4 apples", "-4KiB", "0", "1.5MB", "6"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size such as 4KiB or 100MB, in whole float32s"):
        SweepConfig(sizes=f"4KiB,{text}")


@pytest.mark.parametrize(
    ("size", "words"), [(4096, "4 KiB"), (10**8, "100 MB"), (3 << 20, "3 MiB"), (12, "12 B"), (10**9, "1 GB")]
)
def test_sizes_in_words(size: int, words: str) -> None:
    assert size_in_words(size) == words


def test_flags_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"unknown backend 'glo'; did you mean 'gloo'"):
        SweepConfig(backends="shm,glo")
    with pytest.raises(UsageError, match=r"unknown op 'all_gather'"):
        SweepConfig(op="all_gather")
    with pytest.raises(UsageError, match=r"--repetitions and --servers must be at least 1"):
        SweepConfig(repetitions=0)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_says_whether_it_can_run(name: str) -> None:
    reason = load_backend(name).why_absent(name)
    assert reason == "" or "install" in reason


def test_backends_of_another_operation_are_refused() -> None:
    with pytest.raises(UsageError, match=r"backend ps-shm cannot be measured for all_reduce on one host; there"):
        SweepConfig(backends="ps-shm")
    with pytest.raises(UsageError, match=r"backend nccl cannot be measured for broadcast on one host; there are shm"):
        SweepConfig(op="broadcast", backends="nccl")
    with pytest.raises(UsageError, match=r"backend gloo cannot be measured for push_pull on one host; there"):
        SweepConfig(op="push_pull", backends="gloo")


@pytest.mark.parametrize(
    ("flags", "encrypted"),
    [
        ({"op": "all_reduce"}, ["tcp-tls"]),
        ({"op": "broadcast", "backends": "shm,tcp"}, ["tcp-tls"]),
        ({"op": "push_pull"}, ["ps-tcp-tls", "ps-grpc-tls"]),
        ({"op": "push_pull", "backends": "ps-grpc,ps-grpc-tls"}, ["ps-grpc-tls"]),
    ],
)
def test_tls_is_measured_right_beside_plain_text_where_it_is_asked_for(
    flags: dict[str, str], encrypted: list[str]
) -> None:
    plain, both = SweepConfig(**flags).names(), SweepConfig(**flags, tls=True).names()
    assert [name for name in both if name.endswith("-tls")] == encrypted
    assert [both[both.index(name) - 1] for name in encrypted] == [name.removesuffix("-tls") for name in encrypted]
    assert flags.get("backends", "").count("-tls") == sum(name.endswith("-tls") for name in plain)


def test_tls_of_what_uses_no_network_is_refused() -> None:
    with pytest.raises(UsageError, match="--tls: none of shm, gloo is measured over TLS; tcp, ps-tcp and ps-grpc are"):
        SweepConfig(backends="shm,gloo", tls=True)
