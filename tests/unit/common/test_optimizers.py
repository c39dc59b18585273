"""The descriptions of Paddle's optimizers: what travels to a server, and that Paddle knows every word of it."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UsageError
from common.tensors.optimizers import (
    OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Momentum,
    Optimizer,
    RMSProp,
    make_optimizer,
)

KINDS = {"sgd": SGD, "momentum": Momentum, "adagrad": Adagrad, "rmsprop": RMSProp, "adam": Adam, "adamw": AdamW}
SPECIAL = [
    SGD(learning_rate=0.1, weight_decay=1e-4),
    Momentum(learning_rate=0.05, momentum=0.8, use_nesterov=True, weight_decay=5e-4),
    Adagrad(learning_rate=0.01, epsilon=1e-7, initial_accumulator_value=0.1),
    RMSProp(learning_rate=0.002, rho=0.9, momentum=0.5, centered=True),
    Adam(learning_rate=1e-3, beta1=0.8, beta2=0.99, epsilon=1e-6, weight_decay=0.1),
    AdamW(weight_decay=0.0),
]


def test_names() -> None:
    assert OPTIMIZERS == KINDS
    assert {name: kind().name for name, kind in KINDS.items()} == {name: name for name in KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_made_by_name(name: str) -> None:
    made = make_optimizer(name, {"learning_rate": 0.25})
    assert type(made) is KINDS[name]
    assert made == dataclasses.replace(KINDS[name](), learning_rate=0.25)
    assert make_optimizer(name, {}) == KINDS[name]()


def test_settings_are_numbers_by_name() -> None:
    assert Momentum(learning_rate=1, use_nesterov=True).settings() == {
        "learning_rate": 1.0,
        "momentum": 0.9,
        "use_nesterov": 1.0,
        "weight_decay": 0.0,
    }


@pytest.mark.parametrize("description", SPECIAL, ids=lambda d: d.name)
def test_a_description_survives_the_journey_as_floats(description: Optimizer) -> None:
    settings = description.settings()
    assert all(type(value) is float for value in settings.values())
    again = make_optimizer(description.name, settings)
    assert again == description
    for field in dataclasses.fields(again):
        assert type(getattr(again, field.name)) is type(field.default)


@given(st.sampled_from(sorted(KINDS)), st.data())
def test_any_numbers_survive_the_journey(name: str, data: st.DataObject) -> None:
    number, flag = st.floats(0, 1e6), st.booleans()
    fields = dataclasses.fields(KINDS[name])
    chosen = {f.name: data.draw(flag if isinstance(f.default, bool) else number) for f in fields}
    description = KINDS[name](**chosen)
    assert make_optimizer(name, description.settings()) == description


@pytest.mark.parametrize(("name", "near"), [("adm", "adam"), ("sdg", "sgd"), ("Momentum", "momentum")])
def test_an_unknown_optimizer_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"unknown optimizer '{name}'; did you mean '{near}'"):
        make_optimizer(name, {})


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown setting of sgd 'momentum'"):
        make_optimizer("sgd", {"momentum": 0.9})
    with pytest.raises(UsageError, match="unknown setting of adam 'beta_1'; did you mean 'beta1'"):
        make_optimizer("adam", {"beta_1": 0.9})


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_descriptions_are_frozen_and_take_keywords_only(kind: type[Optimizer]) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().learning_rate = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        kind(0.1)  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_field_is_paddles_with_paddles_default(kind: type[Optimizer]) -> None:
    paddle = pytest.importorskip("paddle")
    parameters = inspect.signature(getattr(paddle.optimizer, kind.__name__).__init__).parameters
    for field in dataclasses.fields(kind):
        default = parameters[field.name].default
        if default is inspect.Parameter.empty:  # Adagrad's and RMSProp's learning rate
            continue
        assert (default or 0.0) == field.default, field.name
