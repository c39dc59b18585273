"""What a TrainingState asks of servers, and when servers and trainers cannot come back to where they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

paddle = pytest.importorskip("paddle")
from paddle import nn  # noqa: E402

from common.errors import PeerLost  # noqa: E402
from common.paddle_api.servers_part import ServersPart  # noqa: E402
from common.paddle_api.wrapped_models import WrappedModels  # noqa: E402
from common.sync.local import LocalSynchronizer  # noqa: E402
from tests.support.paddle_models import Pair, batch  # noqa: E402


class Program:
    """Of rank 0 of two; a model whose update servers make, and what its TrainingState sees of them."""

    def __init__(self) -> None:
        self.synchronizer = Pair(serves_updates=True)
        self.models = WrappedModels(lambda: self.synchronizer)
        self.model = nn.Linear(6, 2)
        self.optimizer = paddle.optimizer.SGD(0.5, parameters=self.model.parameters())
        self.wrap(self.model)
        self.servers = ServersPart(self.synchronizer, self.models, self.optimizer)

    def wrap(self, model: Any) -> None:
        self.models.wrap(model, first_bytes=64, bucket_bytes=64)

    def step(self) -> None:
        self.synchronizer.theirs.append(("weight bias", False))
        self.model(batch()).sum().backward()
        self.optimizer.step()
        self.optimizer.clear_grad()


@pytest.fixture
def program() -> Iterator[Program]:
    made = Program()
    yield made
    made.models.stop()


def test_servers_keep_and_go_back_to_what_is_noted(program: Program) -> None:
    assert program.servers.note() == {"updates": 0, "who": ""}
    program.servers.keep(0)
    for _ in range(2):
        program.step()
        program.synchronizer.updates += 1  # as one over a client counts
    note = program.servers.note()
    assert (note, program.servers.has_optimizer) == ({"updates": 2, "who": "servers"}, True)
    program.models.watch(lambda _: None)
    program.models.fail(PeerLost("rank 1 died"))
    program.models.begin_again()
    assert program.servers.note()["who"] == ""
    program.servers.go_back(note, 7)
    program.step()
    keeps = [end for end in program.synchronizer.ends if end[0] in ("keep", "configure")]
    assert keeps == [("keep", 0, 0), ("configure", "sgd"), ("keep", 2, 7), ("configure", "sgd")]


WAYS = ["as it should", "another model", "only another model", "a state that is not sent", "an update before"]


@pytest.mark.parametrize("how", WAYS)
def test_they_cannot_be_left_where_servers_have_more_or_less_than_they_keep(how: str, program: Program) -> None:
    if how == "an update before":
        program.step()
        program.synchronizer.updates = 1
    program.servers.keep(0)
    program.step()
    if "another" in how:
        program.wrap(other := nn.Linear(2, 2))
        program.model = None if how.startswith("only") else program.model
        program.optimizer = program.servers._optimizer = paddle.optimizer.SGD(parameters=other.parameters())
    elif how == "a state that is not sent":
        program.optimizer.set_state_dict({})
    assert program.servers.can_be_left == (how == "as it should")


def test_without_servers_there_is_nothing_to_say() -> None:
    alone = LocalSynchronizer()
    model = nn.Linear(2, 2)
    models = WrappedModels(lambda: alone)
    models.wrap(model, first_bytes=64, bucket_bytes=64)
    optimizer = paddle.optimizer.Adam(parameters=model.parameters())
    servers = ServersPart(alone, models, optimizer)
    servers.keep(0)
    servers.go_back(servers.note(), 0)
    assert (servers.can_be_left, servers.note(), servers.has_optimizer) == (True, {}, False)
    model(paddle.ones([1, 2])).sum().backward()
    optimizer.step()
    assert servers.state_here().keys() == optimizer.state_dict().keys()
    models.stop()
