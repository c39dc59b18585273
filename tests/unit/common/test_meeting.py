"""How compiled code meets (common/kernels/meeting.py): a model of it in every order that memory allows, and the
instructions made for arm64, which was never run on.

The model's memory keeps each rank's writes to itself for a while and lets them out in any order, but a release after
those before it, and all before a fence. Reads come in the program's order, as acquire loads do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import llvmlite.binding as llvm
import pytest
from numba import njit

from common.kernels import compiler
from common.kernels.compiler import for_machine, kernel_of, target_machine

RANKS, MEETINGS = (0, 1), 3
WITHOUT = {  # what goes wrong without it
    "": set(),
    "release": {"another meeting's note"},
    "fence of who comes": {"all sleep"},
    "fence of who sleeps": {"all sleep"},
    "second line": {"another meeting's note", "all sleep"},
}

Write = tuple[str, int, bool]  # place, value, whether it is a release


class State(NamedTuple):
    memory: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[Write, ...], ...]  # of each rank: what others do not see yet
    at: tuple[str, ...]  # what each rank does next
    meeting: tuple[int, ...]


def begun() -> State:
    places = [f"{kind}{rank}{turn}" for kind in ("note", "number") for rank in RANKS for turn in (0, 1)]
    places += [f"{kind}{rank}" for kind in ("sleeps", "posts") for rank in RANKS]
    count = len(RANKS)
    return State(tuple(sorted((place, 0) for place in places)), ((),) * count, ("note",) * count, (1,) * count)


class Model:
    """
    Args:
        without: what is left out, of WITHOUT.
    """

    def __init__(self, without: str) -> None:
        self._without = without

    def explore(self) -> set[str]:
        """What goes wrong in any order of events."""
        seen, todo, wrong = {begun()}, [begun()], set()
        while todo:
            state = todo.pop()
            following = list(self._following(state))
            if not following and any(at != "done" for at in state.at):
                wrong.add("all sleep")
            for each, fault in following:
                if fault:
                    wrong.add(fault)
                elif each not in seen:
                    seen.add(each)
                    todo.append(each)
        return wrong

    def _following(self, state: State) -> Iterator[tuple[State, str]]:
        for rank in RANKS:
            for i, (place, value, release) in enumerate(state.buffers[rank]):
                held = any(earlier == place for earlier, _, _ in state.buffers[rank][:i])
                if not held and not (release and i):
                    kept = state.buffers[rank][:i] + state.buffers[rank][i + 1 :]
                    yield set_memory(replaced(state, "buffers", rank, kept), place, value), ""
            yield from self._step(state, rank)

    def _step(self, state: State, rank: int) -> Iterator[tuple[State, str]]:
        """What a rank does next."""
        other, k = 1 - rank, state.meeting[rank]
        turn = 0 if self._without == "second line" else k & 1

        def go(to: str, *writes: Write, since: State = state) -> tuple[State, str]:
            buffer = since.buffers[rank] + writes
            return replaced(replaced(since, "buffers", rank, buffer), "at", rank, to), ""

        def fenced(name: str) -> bool:
            return not state.buffers[rank] or self._without == name

        at = state.at[rank]
        seen = dict(state.memory)
        come = seen[f"number{other}{turn}"] == k
        if at == "note":
            yield go("number", (f"note{rank}{turn}", k, False))
        elif at == "number":
            yield go("wake", (f"number{rank}{turn}", k, self._without != "release"))
        elif at == "wake" and fenced("fence of who comes"):
            posted = set_memory(state, f"posts{other}", 1)  # at most 1, to keep the model finite
            yield go("look", since=posted if seen[f"sleeps{other}"] else state)
        elif at == "look":
            yield go("compare") if come else go("sleep")
        elif at == "sleep":
            yield go("look again", (f"sleeps{rank}", 1, True))
        elif at == "look again" and fenced("fence of who sleeps"):
            yield go("awake") if come else go("asleep")
        elif at == "asleep" and seen[f"posts{rank}"]:
            yield go("look again", since=set_memory(state, f"posts{rank}", 0))
        elif at == "awake":
            yield go("compare", (f"sleeps{rank}", 0, True))
        elif at == "compare":
            if seen[f"note{other}{turn}"] != k:
                yield state, "another meeting's note"
            to = "note" if k < MEETINGS else "done"
            yield go(to, since=replaced(state, "meeting", rank, min(k + 1, MEETINGS)))


def replaced(state: State, field: str, rank: int, value: object) -> State:
    values = list(getattr(state, field))
    values[rank] = value
    return state._replace(**{field: tuple(values)})


def set_memory(state: State, place: str, value: int) -> State:
    return state._replace(memory=tuple(sorted({**dict(state.memory), place: value}.items())))


@pytest.mark.parametrize("without", WITHOUT, ids=lambda name: name or "nothing left out")
def test_in_every_order_all_meet_and_read_this_meetings_notes(without: str) -> None:
    """And each part of it is needed: the model finds what goes wrong without."""
    assert Model(without).explore() == WITHOUT[without]


def assembly(name: str) -> str:
    """Of a kernel, for arm64."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = target_machine("aarch64-unknown-linux-gnu", "neoverse-n1")
    function, types = kernel_of(name)
    compiled = njit(**compiler.OPTIONS)(function)
    compiled.compile(types)
    return str(machine.emit_assembly(llvm.parse_assembly(for_machine(compiled.inspect_llvm(types), machine))))


@pytest.mark.parametrize(
    "name", ["meet", "short-sum-float32-of-2", "staged-sum-float32-of-2", "paired-sum-float32-of-2"]
)
def test_on_arm64_numbers_are_released_and_acquired_with_a_fence_between(name: str) -> None:
    order = re.findall(r"\t(stlr|dmb\s+ish|lda(?:p)?r|yield)\b", assembly(name))
    words = ["load" if each.startswith("lda") else each.split()[0] for each in order]
    assert "stlr dmb load" in " ".join(words)  # the number; who sleeps
    assert "yield" in words
    assert words.count("load") >= 2  # and the others' numbers


def test_on_arm64_who_is_about_to_sleep_says_so_before_it_looks() -> None:
    assert re.findall(r"\t(stlr|dmb\s+ish)\b", assembly("asleep")) == ["stlr", "dmb\tish"]
