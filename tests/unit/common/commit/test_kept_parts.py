"""What a rank keeps in memory that outlives it: two boundaries, of which a kill leaves one whole at any moment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from common.commit import kept_parts
from common.commit.kept_parts import KeptParts, has_kept, make_kept, path_of


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = make_kept()
    yield descriptor
    os.close(descriptor)


def test_the_last_two_are_there_for_another_process(memory: int) -> None:
    mine = KeptParts(path_of(memory))
    assert not has_kept(memory)
    assert mine.steps() == []
    for step, content in enumerate((b"a", b"bb" * 5000, b"c", b"")):
        mine.write(step, [content])
        assert mine.steps() == [step - 1, step][step == 0 :]
    mine.close()
    assert has_kept(memory)
    theirs = KeptParts(path_of(memory))
    assert theirs.steps() == [2, 3]
    assert (theirs.read(2), theirs.read(3)) == (b"c", b"")


def test_it_grows_with_what_is_kept_and_no_further(memory: int) -> None:
    kept = KeptParts(path_of(memory))
    for step in range(100):
        kept.write(step, [b"x" * 1000])
    assert os.fstat(memory).st_size <= 2 * 1000 + 4096


def test_what_is_newer_counts_no_longer(memory: int) -> None:
    kept = KeptParts(path_of(memory))
    for step in (4, 5):
        kept.write(step, [b"%d" % step])
    kept.forget_after(4)
    assert kept.steps() == [4]
    assert KeptParts(path_of(memory)).steps() == [4]
    kept.write(5, [b"ag", b"", b"ain"])
    assert (kept.read(4), kept.read(5)) == (b"4", b"again")


def test_nothing_is_kept_while_the_first_is_being_written(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all, seen = kept_parts.write_all, list[bool]()

    def write(*given: Any) -> None:
        write_all(*given)
        seen.append(has_kept(memory))

    monkeypatch.setattr(kept_parts, "write_all", write)
    KeptParts(path_of(memory)).write(0, [b"all"])
    assert seen == [False, False, True]


@pytest.mark.parametrize("last", range(4))
def test_a_kill_at_any_moment_of_a_write_leaves_the_newer_one_whole(
    last: int, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptParts(path_of(memory))
    for step in (1, 2):
        kept.write(step, [b"%d" % step * 10])
    write_all, made = kept_parts.write_all, list[int]()

    def killed(descriptor: int, content: list[bytes], where: int) -> None:
        made.append(where)
        if len(made) > last:
            if where >= kept_parts.TABLE_BYTES:
                write_all(descriptor, [content[0][: len(content[0]) // 2]], where)  # the half of it
            raise KeyboardInterrupt
        write_all(descriptor, content, where)

    monkeypatch.setattr(kept_parts, "write_all", killed)
    if last < 3:
        with pytest.raises(KeyboardInterrupt):
            kept.write(3, [b"3" * 10])
    else:
        kept.write(3, [b"3" * 10])
    after = KeptParts(path_of(memory))
    assert {step: after.read(step) for step in after.steps() if step > 1}.items() >= {2: b"2" * 10}.items()
    for step in after.steps():
        assert after.read(step) == b"%d" % step * 10


def test_it_is_opened_by_its_launchers_path_only(memory: int) -> None:
    assert path_of(memory) == f"/proc/{os.getpid()}/fd/{memory}"
    with pytest.raises(FileNotFoundError):
        KeptParts(f"/proc/{os.getpid()}/fd/987654")


def test_the_kernel_takes_as_many_bytes_at_a_time_as_it_will(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda to, content, at: pwritev(to, [b"".join(content)[:700]], at))
    kept = KeptParts(path_of(memory))
    content = [bytes([number % 256]) * (number % 5) for number in range(3000)]
    kept.write(1, content)
    assert kept.read(1) == b"".join(content)
