"""Row 7, of what a program of the user's own says more to servers than the built-in training does: its optimizer is
named, its state kept, asked for and loaded, its gradients lie elsewhere; in the mode async parameters are pulled."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

pytest.importorskip("paddle")

from benchmarks.faults.interceptor import FATES, Interceptor
from common.tensors.arena import Arena
from common.tensors.optimizers import SGD, Momentum
from ps.client.client import Client
from ps.store.modes import Mode
from tests.faults.test_messages import LEAVING, judge, patience, second_epoch
from tests.support.groups import Outcome, outcomes_of, sample
from tests.support.sessions import RATE, make_arena, serving, take_step

__all__ = ["second_epoch"]

STEPS, NRANKS = 3, 2
NAMES = [slot.name for slot in make_arena(0).layout.slots]
KINDS = ("keep", "configure", "state", "state_request", "server's state")
# who says the same as another, or again what it has said before:
PERHAPS_MISSED = {("keep", "lost"), *((kind, "doubled") for kind in ("keep", "configure", "gradients_at"))}
HARMLESS = ("state_request", "doubled")  # the second answer is known by its number
WITHOUT_EPOCH = ("shm", "gradients_at", "of an old epoch")
SAID = {"grpc": KINDS, "shm": (*KINDS, "gradients_at"), "tcp": KINDS}


def program(client: Client, arena: Arena) -> bytes:
    client.register(arena, None)
    client.keep(0, 0)
    client.configure(Momentum(momentum=0.5), NAMES)
    gradients = np.empty(arena.layout.length, np.float32)
    client.gradients_in(gradients)
    end_step(client, arena, gradients)
    state = client.optimizer_state()
    client.load_optimizer_state({key: 2 * values for key, values in state.items()})
    for _ in range(STEPS - 1):
        end_step(client, arena, gradients)
    found = client.optimizer_state()
    return arena.parameters.tobytes() + b"".join(values.tobytes() for values in found.values())


def end_step(client: Client, arena: Arena, gradients: np.ndarray) -> None:
    gradients[...] = sample(client.rank, arena.layout.length, "float32", seed=client.step)
    for bucket in range(len(arena.buckets)):
        client.push(bucket)
    client.commit(RATE, used=b"\1" * len(NAMES))


def trained(plane: str, timeout: float, mode: str = "sync") -> list[Outcome[bytes]]:
    with serving(NRANKS, timeout=timeout) as (server,):

        def body(rank: int) -> bytes:
            client = Client([server.address], rank, NRANKS, data_plane=plane, timeout=timeout, mode=Mode(mode))
            try:
                found = (program if mode == "sync" else pulling)(client, make_arena(rank))
            except BaseException as exc:
                client.close(f"{type(exc).__name__}: {exc}")
                raise
            client.close()
            return found

        return outcomes_of(NRANKS, body)


@cache
def undisturbed() -> list[bytes]:
    found = [each.value or b"" for each in trained("shm", 20.0)]
    assert found[0] == found[1] != b""
    return found


@pytest.mark.parametrize(
    ("plane", "kind", "fate"),
    [each for plane, kinds in SAID.items() for each in product((plane,), kinds, FATES) if each != WITHOUT_EPOCH],
)
def test_a_program_at_servers(plane: str, kind: str, fate: str) -> None:
    right = undisturbed()
    with Interceptor(kind, fate) as interceptor:
        outcomes = trained(plane, patience(fate))
    assert interceptor.struck
    if (kind, fate) in PERHAPS_MISSED and any(each.error for each in outcomes):
        judge(outcomes, right, LEAVING, missed=True)  # what came of it perhaps when the other has left
    else:
        judge(outcomes, right, fate, missed=(kind, fate) not in {*PERHAPS_MISSED, HARMLESS})


def pulling(client: Client, arena: Arena) -> bytes:
    client.register(arena, SGD())
    for _ in range(STEPS):
        take_step(client, arena)
        client.pull()
    return b""


@pytest.mark.parametrize(("plane", "fate"), [*product(("grpc", "tcp", "shm"), FATES)])
def test_parameters_are_pulled(plane: str, fate: str) -> None:
    with Interceptor("pull", fate) as interceptor:
        outcomes = trained(plane, patience(fate), "async")
    assert interceptor.struck
    judge(outcomes, [b""] * NRANKS, LEAVING, missed=True)
