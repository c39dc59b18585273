"""The state of an optimizer on a server, told and loaded; parameters that are sent again."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import PeerLost, ProtocolError, StaleEpoch, UsageError
from common.network.gradsync_pb2 import Chunk, StatePiece, StateRequest, TrainerMessage
from ps.coordinator.liveness import ServerQueue
from ps.planes.protobuf_messages import data_of, state_of, state_pieces
from tests.support.trainer_messages import (
    LAYOUT,
    Inbox,
    Momenta,
    configured,
    drawn,
    loaded,
    parameters_message,
    parameters_of,
    registered,
    served,
    state_message,
    update,
    update_message,
)


def request_message(epoch: int = 0) -> TrainerMessage:
    return TrainerMessage(state_request=StateRequest(epoch=epoch))


def states(inbox: Inbox) -> list[dict[str, bytes]]:
    """The optimizer states that have arrived whole."""
    found, begun = [], []
    for message in inbox.of_kind("state"):
        begun.append(message.state)
        if message.state.last:
            found.append({each.key: each.values.tobytes() for each in state_of(begun)})
            begun = []
    assert not begun
    return found


# ---- its state --------------------------------------------------------------------------------------------------


def test_the_state_is_told_to_whoever_asks_whenever_it_asks() -> None:
    setting, expected = configured(2), Momenta()
    setting.say(1, request_message())  # there is none yet
    update(setting, 0)
    expected.update(0)
    first = expected.state()
    setting.say(1, request_message())
    setting.push_all(0, 1)
    setting.say(0, request_message())  # after its pushes
    setting.say(0, update_message(1))
    setting.say(1, request_message())  # while the other waits for it
    setting.push_all(1, 1)
    setting.say(1, request_message())
    setting.say(1, update_message(1))
    expected.update(1)
    setting.say(0, request_message())
    assert states(setting.inboxes[0]) == [first, expected.state()]
    assert states(setting.inboxes[1]) == [{}, first, first, first]


def test_a_state_told_is_that_of_its_moment_for_a_slow_reader() -> None:
    setting = configured(2, inboxes=[Inbox(), ServerQueue()])
    update(setting, 0)
    expected = Momenta()
    expected.update(0)
    setting.say(1, request_message())
    update(setting, 1)
    setting.group.fail(PeerLost("end of test"))
    pieces = [m.state for m in drawn(setting.inboxes[1]) if m.WhichOneof("kind") == "state"]
    assert {each.key: each.values.tobytes() for each in state_of(pieces)} == expected.state()


def test_a_state_asked_for_where_there_is_none_fails_all() -> None:
    setting = registered(2)
    setting.say(1, request_message())
    setting.failed(ProtocolError, "^rank 1 asked for optimizer state at step 0, but there is no optimizer$")


def test_a_state_asked_for_in_another_epoch_fails_all() -> None:
    setting = configured(2)
    setting.say(1, request_message(epoch=3))
    setting.failed(StaleEpoch, "^rank 1 sent a message of epoch 3, this is epoch 0$")


@pytest.mark.parametrize("limit", [4, 12, 400])
def test_a_state_of_many_pieces_is_loaded_when_the_last_has_come(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.planes.protobuf_messages.CHUNK_BYTES", limit)
    setting, expected = configured(2), Momenta()
    update(setting, 0)
    expected.update(0)
    before = expected.state()
    expected.velocity = np.arange(LAYOUT.length, dtype=np.float32)
    *pieces, last = state_pieces(loaded(expected.velocity), epoch=0)
    assert len(pieces) == {4: 54, 12: 18, 400: 2}[limit]
    for piece in pieces:
        setting.say(0, state_message(piece))
    setting.say(1, request_message())
    setting.say(0, state_message(last))
    setting.say(1, request_message())
    assert states(setting.inboxes[1]) == [before, expected.state()]
    update(setting, 1)
    expected.update(1)
    assert served(setting.inboxes[1], 2).tobytes() == expected.parameters.tobytes()


def test_a_state_can_be_loaded_before_the_first_update_and_twice() -> None:
    setting, expected = configured(2), Momenta()
    for factor in (3, 5):
        expected.velocity = factor * np.arange(LAYOUT.length, dtype=np.float32)
        for piece in state_pieces(loaded(expected.velocity), epoch=0):
            setting.say(0, state_message(piece))
    update(setting, 0)
    expected.update(0)
    assert served(setting.inboxes[0], 1).tobytes() == expected.parameters.tobytes()


def test_a_state_from_another_rank_than_0_fails_all() -> None:
    setting = configured(2)
    setting.say(1, state_message(StatePiece(last=True)))
    setting.failed(ProtocolError, "^rank 1 sent optimizer state at step 0, expected it from rank 0 only$")


def test_a_state_of_another_epoch_fails_all() -> None:
    setting = configured(2)
    setting.say(0, state_message(StatePiece(epoch=2, last=True)))
    setting.failed(StaleEpoch, "^rank 0 sent a message of epoch 2, this is epoch 0$")


def test_a_state_with_something_missing_is_a_usage_error_to_all() -> None:
    setting = configured(3)
    for piece in state_pieces(loaded(np.ones(LAYOUT.length, np.float32))[:1], epoch=0):
        setting.say(0, state_message(piece))
    setting.failed(UsageError, "^the optimizer state does not fit the optimizer: b not found$")


def test_a_state_of_an_unknown_dtype_fails_all() -> None:
    setting = configured(2)
    setting.say(0, state_message(StatePiece(key="w_v", dtype="object", size=45, data=b"abcd")))
    setting.say(0, state_message(StatePiece(last=True, number=1)))
    setting.failed(ProtocolError, "^optimizer state w_v is 'object', not one of float32, float64$")


# ---- parameters sent again --------------------------------------------------------------------------------------


def test_parameters_sent_again_are_those_that_the_update_begins_with() -> None:
    setting, expected = configured(2), Momenta()
    update(setting, 0)
    expected.update(0)
    new = parameters_of(9)
    for start in (0, 33):
        stop = 33 if start == 0 else LAYOUT.length
        setting.say(0, TrainerMessage(parameters=Chunk(step=1, start=start, data=new[start:stop].tobytes())))
    update(setting, 1, replaced=True)
    expected.parameters = new
    expected.update(1)
    for inbox in setting.inboxes:
        assert served(inbox, 2).tobytes() == expected.parameters.tobytes()


def test_parameters_sent_again_do_not_change_those_that_a_slow_trainer_still_reads() -> None:
    """Rank 0 goes on, replaces them and commits before rank 1 has drawn what was served."""
    setting = configured(2, inboxes=[Inbox(), ServerQueue()])
    update(setting, 0)
    expected = Momenta()
    expected.update(0)
    setting.say(0, TrainerMessage(parameters=Chunk(step=1, data=parameters_of(9).tobytes())))
    update(setting, 1, ranks=[0], replaced=True)
    setting.group.fail(PeerLost("end of test"))
    served = [m.parameters for m in drawn(setting.inboxes[1]) if m.WhichOneof("kind") == "parameters"]
    found = np.concatenate([data_of(chunk) for chunk in served if chunk.step == 1])
    assert found.tobytes() == expected.parameters.tobytes()


@pytest.mark.parametrize(("rank", "start"), [(1, 0), (0, 5)])
def test_parameters_sent_again_must_be_rank_0s_from_the_start(rank: int, start: int) -> None:
    setting = configured(2)
    setting.say(rank, parameters_message(start, np.ones(1, np.float32)))
    setting.failed(ProtocolError, f"^rank {rank} sent parameters from word {start}, expected 0 from rank 0$")


def test_replacing_without_sending_parameters_fails_all() -> None:
    setting = configured(2)
    setting.push_all(0, 0)
    setting.say(0, update_message(0, replaced=True))
    setting.failed(ProtocolError, "^rank 0 replaced 0 of 80 words at step 0$")
