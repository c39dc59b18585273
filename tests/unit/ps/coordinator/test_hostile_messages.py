"""Counts and sizes of a trainer that cannot be, refused by name before memory is made for them."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import ProtocolError, SharedMemoryTooSmall, UsageError
from common.network.gradsync_pb2 import Gather, Hello, StatePiece, TrainerMessage
from common.tensors.buckets import Bucket
from ps.coordinator import checks
from ps.planes.protobuf_messages import MOST_SLOTS
from tests.support.trainer_messages import (
    LAYOUT,
    Setting,
    configured,
    enter,
    open_group,
    register_message,
    running,
    update_message,
)


def refused(change: object, *, mode: str = "") -> None:
    message = register_message(0)
    message.register.mode = mode
    change(message.register)  # type: ignore[operator]
    setting = open_group(1)
    enter(setting.group, message, setting.inboxes[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda r: r.slots[0].shape.extend([1] * 40), "parameter of 42 dimensions"),
        (lambda r: setattr(r.slots[0], "start", 1 << 40), "where it cannot lie"),
        (lambda r: setattr(r.slots[1], "start", 16), "where it cannot lie"),
        (lambda r: setattr(r.buckets[0], "stop", 1 << 60), "registered buckets of"),
        (lambda r: setattr(r.buckets[1], "stop", 32), "after word 32"),
        (lambda r: r.buckets.add(start=80, stop=80, dtype="float32"), "a bucket of words 80..80"),
        (lambda r: [r.buckets.add(start=0, stop=64, dtype="float32") for _ in range(9)], "11 buckets of 3 parameters"),
    ],
)
def test_an_arena_that_cannot_be_is_refused(change: object, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        refused(change)


def test_who_registers_as_another_rank_is_refused() -> None:
    setting = open_group(2)
    enter(setting.group, register_message(0), setting.inboxes[0])
    setting.group.enter(TrainerMessage(hello=Hello(rank=1)), setting.inboxes[1])
    setting.say(1, register_message(0))
    setting.failed(ProtocolError, "rank 1 registered as rank 0")


def test_a_million_tensors_are_refused_before_anything_is_made_of_them() -> None:
    message = register_message(0)
    message.register.slots.extend([message.register.slots[2]] * (1_000_000 - 3))
    setting = open_group(1)
    with pytest.raises(ProtocolError, match=f"rank 0 registered 1,000,000 parameters; at most {MOST_SLOTS:,} can be"):
        enter(setting.group, message, setting.inboxes[0])


def larger(register: object) -> None:
    register.slots[2].shape[0] = 1 << 50  # type: ignore[attr-defined]
    register.length = register.buckets[0].stop = 64 + (1 << 50)  # type: ignore[attr-defined]
    register.buckets[0].start = 64  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["", "async"])
def test_parameters_for_which_there_is_no_memory_are_refused(mode: str) -> None:
    with pytest.raises(SharedMemoryTooSmall, match="rank 0 registered parameters of which this server keeps 9,0"):
        refused(larger, mode=mode)


def test_more_counts_than_a_server_keeps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MOST_COUNTS", 10)
    refused(lambda r: None, mode="ssp:4")
    with pytest.raises(UsageError, match="2 buckets for --mode ssp:5, too many for 1 ranks"):
        refused(lambda r: None, mode="ssp:5")


def test_a_gather_for_which_there_is_no_memory_is_refused() -> None:
    setting = running(2)
    setting.say(1, TrainerMessage(gather=Gather(size=1 << 60, data=b"abc")))
    setting.failed(ProtocolError, "rank 1 began a gather of 1,152,921,504,606,846,976 bytes")


def test_a_gather_of_more_than_was_said_is_refused() -> None:
    setting = running(2)
    setting.say(1, TrainerMessage(gather=Gather(size=2, data=b"abc")))
    setting.failed(ProtocolError, "rank 1 sent 3 bytes of a gather of 2")


def test_marks_of_fewer_parameters_than_there_are_are_refused() -> None:
    setting = configured(2)
    setting.push_all(1, 0)
    setting.say(1, update_message(0, used=b"\1"))
    setting.failed(ProtocolError, "rank 1 told of 1 parameters, registered were 3")


@pytest.mark.parametrize(
    "piece",
    [
        StatePiece(key="w_v", slot=0, size=45, dtype="float32", data=bytes(4)),
        StatePiece(key="w_v", slot=0, size=1 << 40, dtype="float32", data=bytes(4)),
        StatePiece(key="w_v", slot=0, size=45, first=1, dtype="float32", data=bytes(4 * 45)),
        StatePiece(key="x_v", slot=7, size=1, dtype="float32", data=bytes(4)),
    ],
)
def test_optimizer_state_that_fits_no_parameter_is_refused(piece: StatePiece) -> None:
    setting = configured(2)
    setting.say(0, TrainerMessage(state=piece))
    setting.say(0, TrainerMessage(state=StatePiece(last=True, number=1)))
    setting.failed(ProtocolError, "does not fit")


def test_endless_optimizer_state_is_refused() -> None:
    setting = configured(2)
    say_until_over(setting, TrainerMessage(state=StatePiece(key="w_v", data=bytes(1 << 16))))
    setting.failed(ProtocolError, "bytes of optimizer state for 80 words")


def say_until_over(setting: Setting, message: TrainerMessage) -> None:
    for _ in range(100):
        setting.say(0, message)


def test_the_layout_of_these_tests_passes() -> None:
    register = register_message(0, buckets=(Bucket(0, LAYOUT.length),)).register
    checks.check_sizes(register, 0)
    checks.check_layout(register, 0)
    assert np.prod([*register.slots[0].shape]) == 45
