"""The optimizer of a user's program on a server: named by all alike, applied to what is used."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import LayoutMismatch, ProtocolError, StaleEpoch, UsageError
from common.network.gradsync_pb2 import Configure, StatePiece, TrainerMessage
from common.tensors.optimizers import Adam, Momentum
from tests.support.trainer_messages import (
    NAMES,
    Momenta,
    configure_message,
    configured,
    gradients_of,
    open_group,
    registered,
    running,
    served,
    state_message,
    update,
    update_message,
)


def test_a_named_optimizer_updates_what_is_used() -> None:
    setting, expected = configured(2), Momenta()
    update(setting, 0)
    expected.update(0)
    update(setting, 1, used=b"\0\1\1")
    expected.update(1, b"\0\1\0")
    setting.push_all(0, 2)
    setting.say(0, update_message(2, used=b"\1\0\0"))
    setting.push_all(1, 2)
    setting.say(1, update_message(2, used=b"\0\1\0"))
    expected.update(2)
    for inbox in setting.inboxes:
        assert served(inbox, 3).tobytes() == expected.parameters.tobytes()


def test_averages_and_updates_follow_each_other() -> None:
    setting, expected = registered(2), Momenta()
    for rank in (0, 1):
        setting.step(rank, 0, update=False)
    for rank in (0, 1):  # as a program's first optimizer.step() does
        setting.say(rank, configure_message(rank))
        setting.say(rank, update_message(1, again=True))
    expected.update(0)
    update(setting, 2)
    expected.update(2)
    mean = (gradients_of(0, 0) + gradients_of(1, 0)) * np.float32(0.5)
    for inbox in setting.inboxes:
        assert served(inbox, 1).tobytes() == mean.tobytes()
        assert served(inbox, 3).tobytes() == expected.parameters.tobytes()


def test_an_average_and_the_update_by_it_are_one_step_of_the_program() -> None:
    setting = registered(2)
    for rank in (0, 1):
        setting.step(rank, 0, update=False)
    for rank in (0, 1):
        setting.say(rank, configure_message(rank))
        setting.say(rank, update_message(1, again=True))
    told = setting.group.status()
    assert (setting.group.steps, told.steps, [trainer.steps for trainer in told.trainers]) == (1, 1, [1, 1])
    update(setting, 2)
    assert (setting.group.steps, [trainer.steps for trainer in setting.group.status().trainers]) == (2, [2, 2])


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (configure_message(1, Adam()), r"Momentum\(.*\) against Adam\(.*\); make the same optimizer on all ranks$"),
        (configure_message(1, Momentum(momentum=0.5)), r".*momentum=0\.9.* against Momentum\(.*momentum=0\.5"),
        (configure_message(1, None, ["w", "c", ""]), r"other parameter names against Momentum\("),
    ],
    ids=["optimizer", "setting", "names"],
)
def test_trainers_that_name_different_optimizers_are_told(second: TrainerMessage, text: str) -> None:
    setting = registered(2)
    setting.say(0, configure_message(0))
    setting.say(1, second)
    setting.failed(LayoutMismatch, f"^rank 0 and rank 1 disagree on the optimizer: {text}")


def without_optimizer() -> TrainerMessage:
    return TrainerMessage(configure=Configure(rank=1, names=NAMES))


@pytest.mark.parametrize(
    "message",
    [configure_message(1, None, NAMES[:2]), configure_message(1, None, [*NAMES, "x"]), without_optimizer()],
    ids=["a name too few", "a name too many", "no optimizer"],
)
def test_a_wrong_configuration_fails_all(message: TrainerMessage) -> None:
    setting = registered(2)
    setting.say(1, message)
    setting.failed(ProtocolError, "^rank 1 sent a wrong configuration at step 0$")


def test_a_configuration_beside_a_registered_optimizer_fails_all() -> None:
    setting = running(2)
    setting.say(1, configure_message(1))
    setting.failed(ProtocolError, "^rank 1 sent a wrong configuration at step 0$")


def test_a_configuration_of_another_epoch_fails_all() -> None:
    setting = registered(2)
    setting.say(1, TrainerMessage(configure=Configure(epoch=4, rank=1, names=NAMES)))
    setting.failed(StaleEpoch, "^rank 1 sent a message of epoch 4, this is epoch 0$")


@pytest.mark.parametrize("message", [configure_message(1), state_message(StatePiece(last=True))])
def test_an_optimizer_before_anyone_registered_is_refused(message: TrainerMessage) -> None:
    setting = open_group(2)
    with pytest.raises(ProtocolError, match=r"^rank 1 sent (data before registering|optimizer state at step 0)"):
        setting.group.handle(1, message)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_without_naming_an_optimizer_fails_all(rank: int) -> None:
    setting = registered(2)
    setting.say(1 - rank, configure_message(1 - rank))
    setting.push_all(rank, 0)
    setting.say(rank, update_message(0))
    setting.failed(ProtocolError, f"^rank {rank} asked for an update at step 0 without naming an optimizer$")


def test_an_unknown_optimizer_fails_all() -> None:
    setting, message = registered(2), configure_message(0)
    message.configure.optimizer.name = "adamm"
    setting.say(0, message)
    setting.failed(UsageError, "unknown optimizer 'adamm'; did you mean 'adam'")
