"""What a server keeps of its last two step boundaries, when, and how a server in its place goes on from there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.commit.kept_parts import KeptParts
from common.commit.parts import from_buffers
from common.commit.resuming import OPTIMIZER
from common.commit.slices import slices_in
from common.errors import RecoveryFailed
from common.system.process import JOINED_VARIABLE
from common.tensors.arena import FloatArray
from tests.support.kept_memory import Looking
from tests.support.trainer_messages import (
    LAYOUT,
    Setting,
    commit_message,
    configured,
    enter,
    expected_after,
    gradients_of,
    open_group,
    parameters_message,
    parameters_of,
    register_message,
    running,
    update,
)


def sums_in(memory: KeptParts, step: int) -> FloatArray:
    """The optimizer's state of that boundary."""
    (kept,) = slices_in(from_buffers(memory.read(step)).beginning(OPTIMIZER))
    assert (kept.start, kept.stop) == (0, LAYOUT.length)
    array: FloatArray = kept.arrays["sum_0"]
    return array


def sums_after(steps: int) -> FloatArray:
    """Those of two trainers."""
    sums = np.zeros(LAYOUT.length, np.float32)
    for step in range(steps):
        sums += (gradients_of(0, step) + gradients_of(1, step)) * np.float32(0.5)
    return sums


def going_on(memory: KeptParts, step: int, parameters: FloatArray) -> Setting:
    """A group that begins after that step."""
    setting = open_group(2, memory=memory)
    for rank in range(2):
        message = register_message(rank)
        message.register.first_step = step
        enter(setting.group, message, setting.inboxes[rank])
    setting.say(0, parameters_message(0, parameters))
    return setting


def test_the_last_two_boundaries_are_kept(memory: KeptParts) -> None:
    setting = running(2, memory=memory)
    assert memory.steps() == [0]
    for step in range(3):
        setting.step(0, step)
        setting.push_all(1, step)
        assert max(memory.steps()) == step  # the step has not ended
        setting.say(1, commit_message(step))
        assert memory.steps() == [step, step + 1]
    for step in memory.steps():
        np.testing.assert_array_equal(sums_in(memory, step), sums_after(step))


def test_a_boundary_is_kept_before_anybody_hears_that_the_step_has_ended(memory: KeptParts) -> None:
    setting = open_group(2, memory=memory)
    setting.inboxes[0] = inbox = Looking(memory)
    for rank in range(2):
        enter(setting.group, register_message(rank), setting.inboxes[rank])
    setting.say(0, parameters_message(0, parameters_of(0)))
    for step in range(3):
        setting.step(1, step)
        setting.step(0, step)
    assert inbox.seen[1:] == [1, 2, 3]


@pytest.mark.parametrize("step", [2, 3])
def test_a_server_goes_on_from_the_boundary_that_the_trainers_name(
    step: int, memory: KeptParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOINED_VARIABLE, str(tmp_path / "notes"))
    setting = running(2, memory=memory)
    for each in range(3):
        setting.step(0, each)
        setting.step(1, each)
    setting = going_on(memory, step, expected_after(step, 2))
    assert memory.steps() == [each for each in (2, 3) if each <= step]
    assert (tmp_path / "notes").read_text() == f"goes on 0 {step} {step}\n"
    setting.step(0, 0)
    setting.step(1, 0)
    assert max(memory.steps()) == step + 1
    np.testing.assert_array_equal(sums_in(memory, step + 1), sums_after(step) + sums_after(1))


def test_a_server_without_the_boundary_of_the_trainers_says_so(memory: KeptParts) -> None:
    setting = running(2, memory=memory)
    setting.step(0, 0)
    setting.step(1, 0)
    going_on(memory, 7, parameters_of(0)).failed(
        RecoveryFailed, r"^server 0 has not kept the boundary of step 7, to which all go back$"
    )


@pytest.mark.parametrize("mode", ["ssp:2", "async", "by the trainers' program"])
def test_nothing_is_kept_where_the_update_is_not_of_the_step(mode: str, memory: KeptParts) -> None:
    if mode.startswith("by"):
        update(configured(2, memory=memory), 0)
    else:
        running(2, mode=mode, memory=memory).step(0, 0)
    assert memory.steps() == []
