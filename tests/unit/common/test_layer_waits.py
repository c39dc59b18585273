"""Each layer waits for its own parameters, and training so ends in the same bits."""

from __future__ import annotations

import dataclasses

import pytest

paddle = pytest.importorskip("paddle")

from common.errors import PeerLost  # noqa: E402
from common.launch.config import TrainingConfig  # noqa: E402
from common.paddle_api.binding import layout_of  # noqa: E402
from common.paddle_api.layer_waits import LayerWaits  # noqa: E402
from common.sync.local import LocalSynchronizer  # noqa: E402
from common.sync.synchronizer import Synchronizer  # noqa: E402
from common.trainer.models import make_model  # noqa: E402
from common.trainer.training import train  # noqa: E402
from ps.client.session import Client  # noqa: E402
from ps.coordinator.servicer import ParameterServer  # noqa: E402
from ps.synchronizer import synchronizer_for  # noqa: E402

CONFIG = TrainingConfig(model="mlp:16,8", batch_size=96, steps=4, lr=0.01)


class Noting(LocalSynchronizer):
    """Says what is waited for."""

    priority = True

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []

    def wait_for(self, start: int, stop: int) -> None:
        self.waits.append((start, stop))


def test_each_layer_waits_for_its_own_parameters_before_it_computes() -> None:
    model, synchronizer = make_model("mlp:16,8", seed=1), Noting()
    layout = layout_of(model)
    waits = LayerWaits(model, layout, synchronizer)
    places = [(slot.start, slot.stop) for slot in layout.slots]
    seen = []
    for layer in (model[1], model[2], model[3]):  # Linear, ReLU, Linear
        layer.register_forward_pre_hook(lambda _, __: seen.append(len(synchronizer.waits)))
    model(paddle.zeros([1, 1, 28, 28]))
    assert seen == [2, 2, 4]
    assert synchronizer.waits == places
    assert waits.rest() > 0
    assert synchronizer.waits.pop() == (0, layout.length)
    waits.close()
    model(paddle.zeros([1, 1, 28, 28]))
    assert (synchronizer.waits, waits.rest()) == (places, 0.0)


def test_without_priority_nobody_waits() -> None:
    model, synchronizer = make_model("mlp:16", seed=1), Noting()
    synchronizer.priority = False
    waits = LayerWaits(model, layout_of(model), synchronizer)
    model(paddle.zeros([1, 1, 28, 28]))
    assert (synchronizer.waits, waits.rest()) == ([], 0.0)


def test_what_happens_to_a_server_while_a_layer_waits_is_told_with_the_step() -> None:
    class Lost(Noting):
        def wait_for(self, start: int, stop: int) -> None:
            super().wait_for(start, stop)
            if len(self.waits) == 2 * (6 + 1) + 3:
                raise PeerLost(f"server 0 was lost while waiting for words {start}..{stop}")

    text = r"^server 0 was lost while waiting for words 12560\.\.12688 \[in step 2 of 4 of this rank\]$"
    with pytest.raises(PeerLost, match=text), Lost() as synchronizer:
        train(CONFIG, synchronizer)


@pytest.mark.parametrize("overlap", [True, False])
def test_training_with_priority_ends_in_the_same_bits(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.coordinator.training_group.PIECE", 1024)
    waited = []
    wait_for = Client.wait_for
    monkeypatch.setattr(Client, "wait_for", lambda self, *words: (waited.append(words), wait_for(self, *words)))

    def result(synchronizer: Synchronizer) -> tuple[str, list[float]]:
        with synchronizer:
            config = dataclasses.replace(CONFIG, overlap=overlap)
            record = train(config, synchronizer, evaluate_model=False).record
        return record.parameters_sha256, [loss for _, loss in record.curve]

    alone = result(LocalSynchronizer())
    with ParameterServer("127.0.0.1:0", 1) as server:
        client = Client([server.address], 0, 1, data_plane="grpc", priority=True)
        assert result(synchronizer_for(client, overlap=overlap)) == alone
    assert len(waited) == 4 * (6 + 1)  # each parameter, and all, in each step
