"""Static programs: nothing of them is synchronised, and nothing is taken in silence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("paddle")

import paddle

from common.errors import UsageError
from tests.support.three_ranks import fleet_at


@pytest.fixture(autouse=True)
def static() -> Iterator[None]:
    paddle.enable_static()
    yield
    paddle.disable_static()


@pytest.mark.parametrize("call", ["distributed_optimizer", "distributed_model", "DataParallel", "all_reduce", "recv"])
def test_a_static_program_is_refused_and_told_what_to_do_instead(call: str) -> None:
    fleet = fleet_at()
    given = paddle.optimizer.SGD(0.1)
    with paddle.static.program_guard(paddle.static.Program()):
        if call != "distributed_optimizer":
            given = paddle.nn.Linear(2, 1)
        if call in ("all_reduce", "recv"):
            given = paddle.static.data("x", [2, 2], "float32")
        with pytest.raises(UsageError) as raised:
            getattr(fleet, call)(given)
    assert str(raised.value) == (
        f"{call.replace('distributed_model', 'DataParallel')}: the program builds a static graph, of which nothing is "
        "synchronised, so its ranks would train apart: leave out paddle.enable_static(), and train with "
        "paddle.DataParallel or fleet.distributed_model"
    )
