"""How a step ends: by an update, an average, the same average again, replaced parameters."""

from __future__ import annotations

import re

import pytest

from common.errors import GradSyncError, LayoutMismatch, ProtocolError, StaleEpoch
from common.tensors.arena import FloatArray
from ps.store.ending import Ending
from ps.store.shards import Shard
from ps.store.step_state import StepState
from tests.support.store_model import (
    AGAIN,
    AVERAGE,
    EPOCH,
    LENGTH,
    PLAN,
    REPLACED,
    UPDATE,
    NumpySGD,
    canonical_mean,
    deliver,
    end,
    gradients_of,
    initial_parameters,
    make_store,
    new_values,
    one,
    push_all,
    refused,
    updated,
)


def replace(store: StepState, values: FloatArray, *, piece: int = 10**9) -> None:
    for start in range(store.shard.start, store.shard.stop, piece):
        store.replace(0, EPOCH, store.step, start, values[start : min(start + piece, store.shard.stop)])


def test_an_average_leaves_parameters_alone_and_can_be_read() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 3, LENGTH)
    push_all(store)
    updater = end(store, AVERAGE)
    assert updater.used == []
    assert store.parameters.tobytes() == initial_parameters(LENGTH).tobytes()
    sources = [gradients_of(rank, 0, LENGTH) for rank in range(3)]
    for bucket in PLAN:
        assert store.gradients[bucket.start : bucket.stop].tobytes() == canonical_mean(sources, bucket).tobytes()


def test_an_average_can_be_used_again_once() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    push_all(store)
    end(store, AVERAGE)
    end(store, AGAIN)
    expected = updated(initial_parameters(LENGTH), 0, 0.1, 2, PLAN)
    assert store.parameters.tobytes() == expected.tobytes()
    with refused(store, ProtocolError, text="^rank 1 wants to use an average again at step 2, but there is none$"):
        store.commit(1, EPOCH, 2, AGAIN)
    push_all(store)
    end(store, UPDATE)
    assert store.parameters.tobytes() == updated(expected, 2, 0.1, 2, PLAN).tobytes()


def test_the_last_of_two_averages_is_the_one_used_again() -> None:
    store = make_store(Shard(16, 48), PLAN, 2, LENGTH)
    for _ in range(2):
        push_all(store)
        end(store, AVERAGE)
    end(store, AGAIN)
    assert store.parameters.tobytes() == updated(initial_parameters(LENGTH), 1, 0.1, 2, PLAN)[16:48].tobytes()


def test_steps_that_use_an_average_again_are_counted() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 1, LENGTH)
    for _ in range(2):
        push_all(store)
        end(store, AVERAGE)
        end(store, AGAIN)
    assert (store.step, store.used_again) == (4, 2)


def test_an_average_that_was_not_used_is_gone_after_an_update() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 1, LENGTH)
    for ending in (AVERAGE, UPDATE):
        push_all(store)
        end(store, ending)
    with refused(store, ProtocolError, text="^rank 0 wants to use an average again at step 2, but there is none$"):
        store.commit(0, EPOCH, 2, AGAIN)


def test_replaced_parameters_are_taken_before_the_update_not_earlier() -> None:
    store = make_store(Shard(16, 70), PLAN, 2, LENGTH)
    old, new = store.parameters.tobytes(), new_values(0, LENGTH)
    replace(store, new, piece=7)
    push_all(store)
    assert store.commit(0, EPOCH, 0, REPLACED) is False
    assert store.parameters.tobytes() == old
    assert store.commit(1, EPOCH, 0, REPLACED) is True
    assert store.parameters.tobytes() == old
    store.update(NumpySGD(store))
    assert store._replacement is None  # its memory is given back
    after = updated(new, 0, 0.1, 2, PLAN)[16:70]
    assert store.parameters.tobytes() == after.tobytes()
    push_all(store)
    end(store, UPDATE)  # they are taken once
    expected = updated(updated(new, 0, 0.1, 2, PLAN), 1, 0.1, 2, PLAN)[16:70]
    assert store.parameters.tobytes() == expected.tobytes()


def test_replacement_and_average_used_again_go_together() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    push_all(store)
    end(store, AVERAGE)
    replace(store, new_values(1, LENGTH))
    end(store, Ending(0.1, replaced=True, again=True))
    assert store.parameters.tobytes() == updated(new_values(1, LENGTH), 0, 0.1, 2, PLAN).tobytes()


def test_a_server_without_a_slice_ends_steps_in_every_way() -> None:
    store = make_store(Shard(LENGTH, LENGTH), PLAN, 2, LENGTH)
    for ending in (UPDATE, AVERAGE, AGAIN, REPLACED, Ending(0.1)):
        end(store, ending)
    assert store.step == 5


def test_a_parameter_is_used_if_any_rank_has_used_it() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 3, LENGTH)
    push_all(store)
    updater = end(store, UPDATE, used={0: b"\0\1\0\0", 1: b"\0\0\0\1", 2: b"\0\1\0\0"})
    assert updater.used == [b"\0\1\0\1"]
    push_all(store)
    updater = end(store, UPDATE, used={0: b"\1\0\0\0", 1: b"\0\0\0\0", 2: b"\0\0\0\0"})
    assert updater.used == [b"\1\0\0\0"]  # nothing of the step before
    push_all(store)
    assert end(store, UPDATE).used == [b""]


DISAGREEMENTS: dict[str, tuple[Ending, Ending, str]] = {
    "update against average": (
        UPDATE,
        AVERAGE,
        "read gradients or ran another backward before optimizer.step() at step {step}, rank {other} called "
        "optimizer.step() after a backward; all ranks must do the same; a program that reads gradients to decide needs "
        "--update trainer",
    ),
    "average against update": (
        AVERAGE,
        UPDATE,
        "called optimizer.step() after a backward at step {step}, rank {other} read gradients or ran another backward "
        "before optimizer.step(); all ranks must do the same; a program that reads gradients to decide needs --update "
        "trainer",
    ),
    "learning rate": (
        UPDATE,
        Ending(0.3),
        "has learning rate 0.3 at step {step}, rank {other} has 0.1; "
        "give all trainers the same learning rate and scheduler",
    ),
    "replaced against kept": (
        UPDATE,
        REPLACED,
        "changed its parameters at step {step}, rank {other} kept its parameters; load the same state on all ranks",
    ),
    "kept against replaced": (
        REPLACED,
        UPDATE,
        "kept its parameters at step {step}, rank {other} changed its parameters; load the same state on all ranks",
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_another_ending_is_refused_saying_what_both_did(name: str) -> None:
    first, second, text = DISAGREEMENTS[name]
    store = make_store(Shard(0, LENGTH), PLAN, 3, LENGTH)
    push_all(store)
    replace(store, new_values(0, LENGTH))
    assert store.commit(0, EPOCH, 0, first) is False
    with refused(store, LayoutMismatch, text=f"^rank 2 {re.escape(text.format(step=0, other=0))}$"):
        store.commit(2, EPOCH, 0, second)


@pytest.mark.parametrize(("first", "second"), [(UPDATE, AGAIN), (AGAIN, UPDATE)])
def test_with_and_without_another_backward_is_refused(first: Ending, second: Ending) -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    push_all(store)
    end(store, AVERAGE)
    for rank, ending in enumerate((first, second)):
        if not ending.again:
            for bucket in range(3):
                deliver(store, rank, bucket, LENGTH)
    store.commit(0, EPOCH, 1, first)
    words = {UPDATE: "after a backward", AGAIN: "without another backward"}
    text = f"{words[second]} at step 1, rank 0 called optimizer.step() {words[first]}; all ranks must do the same; "
    text += "a program that reads gradients to decide needs --update trainer"
    with refused(store, LayoutMismatch, text=rf"^rank 1 called optimizer\.step\(\) {re.escape(text)}$"):
        store.commit(1, EPOCH, 1, second)


def test_another_number_of_parameters_is_refused() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 3, LENGTH)
    push_all(store)
    store.commit(1, EPOCH, 0, UPDATE, b"\1\1\0")
    with refused(store, ProtocolError, text="^rank 0 told of 2 parameters at step 0, not 3$"):
        store.commit(0, EPOCH, 0, UPDATE, b"\1\1")
    with refused(store, ProtocolError, text="^rank 2 told of 0 parameters at step 0, not 3$"):
        store.commit(2, EPOCH, 0, UPDATE)


def test_a_mask_after_one_that_stands_for_all_is_refused() -> None:
    """Otherwise what the first has used would be left out."""
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    push_all(store)
    store.commit(0, EPOCH, 0, UPDATE)
    with refused(store, ProtocolError, text="^rank 1 told of 2 parameters at step 0, not 0$"):
        store.commit(1, EPOCH, 0, UPDATE, b"\0\1")


def test_an_average_to_be_used_again_is_refused_with_pushes() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    push_all(store)
    end(store, AVERAGE)
    deliver(store, 1, 2, LENGTH)
    with refused(store, ProtocolError, text="^rank 1 committed step 1 after 16 of 70 words$"):
        store.commit(1, EPOCH, 1, AGAIN)


def test_an_average_to_be_used_again_without_an_update_is_refused() -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 1, LENGTH)
    push_all(store)
    end(store, AVERAGE)
    with refused(store, ProtocolError, text="^rank 0 wants to use an average again at step 1, but there is none$"):
        store.commit(0, EPOCH, 1, Ending(0.1, update=False, again=True))


def test_a_replacement_must_be_whole_from_rank_0_and_in_order() -> None:
    store, values = make_store(Shard(16, 48), PLAN, 2, LENGTH), new_values(0, LENGTH)
    push_all(store)
    with refused(store, ProtocolError, text="^rank 0 replaced 0 of 32 words at step 0$"):
        store.commit(0, EPOCH, 0, REPLACED)
    with refused(store, ProtocolError, text="^rank 1 sent parameters from word 16, expected 16 from rank 0$"):
        store.replace(1, EPOCH, 0, 16, values[16:48])
    with refused(store, ProtocolError, text="^rank 0 sent parameters from word 17, expected 16 from rank 0$"):
        store.replace(0, EPOCH, 0, 17, values[17:18])
    with refused(store, ProtocolError, text="^rank 0 sent parameters from word 16, expected 16 from rank 0$"):
        store.replace(0, EPOCH, 0, 16, values[16:49])
    store.replace(0, EPOCH, 0, 16, values[16:20])
    with refused(store, ProtocolError, text="^rank 0 sent parameters from word 16, expected 20 from rank 0$"):
        store.replace(0, EPOCH, 0, 16, values[16:20])
    with refused(store, ProtocolError, text="^rank 0 replaced 4 of 32 words at step 0$"):
        store.commit(0, EPOCH, 0, REPLACED)
    store.replace(0, EPOCH, 0, 20, values[20:48])
    with refused(store, ProtocolError, text="^rank 0 sent parameters from word 48, expected 48 from rank 0$"):
        store.replace(0, EPOCH, 0, 48, values[48:49])
    store.commit(0, EPOCH, 0, REPLACED)
    with refused(store, ProtocolError, text="^rank 0 sent more after committing step 0$"):
        store.replace(0, EPOCH, 0, 16, values[16:48])


@pytest.mark.parametrize(
    ("epoch", "step", "kind", "text"),
    [
        (2, 0, StaleEpoch, "^rank 0 sent a message of epoch 2, this is epoch 3$"),
        (EPOCH, 1, ProtocolError, "^rank 0 sent step 1, this is step 0$"),
    ],
)
def test_a_replacement_of_another_time_is_refused(epoch: int, step: int, kind: type[GradSyncError], text: str) -> None:
    store = make_store(Shard(0, LENGTH), PLAN, 2, LENGTH)
    with refused(store, kind, text=text):
        store.replace(0, epoch, step, 0, one)
