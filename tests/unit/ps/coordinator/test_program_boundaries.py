"""What a server keeps of a program's optimizer after its last two updates, when, and how a group goes on from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.commit.kept_parts import KeptParts
from common.commit.parts import from_buffers
from common.errors import ProtocolError, RecoveryFailed, StaleEpoch
from common.system.process import JOINED_VARIABLE
from ps.coordinator.program_boundaries import accumulators_in
from ps.planes.protobuf_messages import state_pieces
from tests.support.kept_memory import Looking
from tests.support.trainer_messages import (
    Inbox,
    Momenta,
    Setting,
    configure_message,
    keep_message,
    loaded,
    parameters_message,
    registered,
    served,
    state_message,
    update,
)


def kept(memory: KeptParts, updates: int) -> dict[str, bytes]:
    """The optimizer's state after so many."""
    return {each.key: each.values.tobytes() for each in accumulators_in(from_buffers(memory.read(updates)))}


def momenta_after(updates: int) -> Momenta:
    found = Momenta()
    for each in range(updates):
        found.update(each)
    return found


def keeping(memory: KeptParts, updates: int = 0, step: int = 0, **options: object) -> Setting:
    """A group whose trainers want copies, and have named their optimizer."""
    setting = registered(2, memory=memory, **options)
    for rank in (1, 0):
        setting.say(rank, keep_message(updates, step))
        setting.say(rank, configure_message(rank))
    return setting


def going_on(memory: KeptParts, updates: int, step: int) -> Setting:
    """One that comes after another one."""
    setting = keeping(memory, updates, step)
    setting.say(0, parameters_message(0, momenta_after(updates).parameters))
    return setting


def test_the_state_after_each_of_the_last_two_updates_is_kept(memory: KeptParts) -> None:
    setting = keeping(memory)
    assert (memory.steps(), kept(memory, 0)) == ([0], {})
    for step in range(3):
        update(setting, step)
        assert memory.steps() == [step, step + 1]
        assert kept(memory, step + 1) == momenta_after(step + 1).state()


def test_a_step_that_ends_with_the_average_is_no_update(memory: KeptParts) -> None:
    setting = keeping(memory)
    update(setting, 0)
    before = kept(memory, 1)
    for step in (1, 2):
        for rank in (0, 1):
            setting.step(rank, step, update=False)
    assert (memory.steps(), kept(memory, 1)) == ([0, 1], before)
    update(setting, 3)
    assert memory.steps() == [1, 2]


def test_a_copy_is_kept_before_anybody_hears_of_the_update(memory: KeptParts) -> None:
    inbox = Looking(memory)
    setting = keeping(memory, inboxes=[inbox, Inbox()])
    for step in range(3):
        update(setting, step)
    assert inbox.seen == [-1, 1, 2, 3]


@pytest.mark.parametrize("updates", [2, 3])
def test_a_server_goes_on_from_the_update_that_the_trainers_name(
    updates: int, memory: KeptParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOINED_VARIABLE, str(tmp_path / "notes"))
    setting = keeping(memory)
    for step in range(3):
        update(setting, step)
    assert not (tmp_path / "notes").exists()
    setting = going_on(memory, updates, 7)
    assert memory.steps() == [each for each in (2, 3) if each <= updates]
    assert (tmp_path / "notes").read_text() == "goes on 0 7 7\n"
    update(setting, 0, replaced=True)
    expected = momenta_after(updates)
    expected.update(0)
    assert served(setting.inboxes[1], 1).tobytes() == expected.parameters.tobytes()
    assert max(memory.steps()) == updates + 1
    assert kept(memory, updates + 1) == expected.state()


def test_a_state_that_the_program_loads_counts_from_the_next_update_on(memory: KeptParts) -> None:
    setting, expected = keeping(memory), Momenta()
    update(setting, 0)
    expected.update(0)
    before = expected.state()
    expected.velocity = np.arange(expected.velocity.size, dtype=np.float32)
    for piece in state_pieces(loaded(expected.velocity), epoch=0):
        setting.say(0, state_message(piece))
    assert kept(memory, 1) == before, "the step that loads it is made again from here, and loads it again"
    update(setting, 1)
    expected.update(1)
    assert kept(memory, 2) == expected.state()


def test_nothing_is_kept_unless_trainers_ask_for_it(memory: KeptParts) -> None:
    setting = registered(2, memory=memory)
    for rank in (0, 1):
        setting.say(rank, configure_message(rank))
    update(setting, 0)
    assert memory.steps() == []


def test_a_server_without_that_update_says_so(memory: KeptParts) -> None:
    setting = keeping(memory)
    for step in range(3):
        update(setting, step)
    going_on(memory, 1, 1).failed(
        RecoveryFailed,
        "^server 0 has not kept what there was after update 1, to which all go back, but after 2 and 3$",
    )


def test_a_server_that_has_kept_nothing_says_so(memory: KeptParts) -> None:
    keeping(memory, 2, 2).failed(
        RecoveryFailed, "^server 0 has not kept what there was after update 2, to which all go back, but after none$"
    )


def test_trainers_that_go_on_from_different_steps_are_told(memory: KeptParts) -> None:
    setting = registered(2, memory=memory)
    setting.say(0, keep_message(0, 3))
    setting.say(1, keep_message(0, 4))
    setting.failed(
        ProtocolError, "^rank 1 goes on after 0 updates, at step 4, another trainer after 0, at step 3; give all"
    )


def test_who_asks_for_it_after_the_optimizer_was_named_is_told(memory: KeptParts) -> None:
    setting = registered(2, memory=memory)
    setting.say(1, configure_message(1))
    setting.say(1, keep_message())
    setting.failed(ProtocolError, "^rank 1 sent an unexpected keep message at step 0$")


def test_one_of_another_epoch_is_refused(memory: KeptParts) -> None:
    setting = registered(2, memory=memory)
    setting.say(1, keep_message(epoch=3))
    setting.failed(StaleEpoch, "^rank 1 sent a message of epoch 3, this is epoch 0$")
