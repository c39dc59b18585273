"""`TrainingState`: a user's training that goes on from its last commit when its job is started again."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from common.commit.folder import CommitFolder, say
from common.commit.manifest import Manifest, PartEntry
from common.commit.parts import Part
from common.commit.resuming import ACCUMULATORS, BUFFERS, PARAMETERS, RANDOM, check_fits, participants
from common.commit.writer import Writer
from common.errors import GradSyncError, PeerError, PeerUnreachable, UsageError
from common.launch.settings import Settings, settings_from
from common.paddle_api.arena_binding import trainable
from common.paddle_api.data_position import DataPosition
from common.paddle_api.gradient_hooks import Named
from common.paddle_api.gradient_reads import grad_of
from common.paddle_api.random_states import RandomStates, random_arrays
from common.paddle_api.servers_part import ServersPart
from common.paddle_api.unused_gradients import UnusedGradients
from common.paddle_api.wrapped_models import WrappedModels
from common.sync.boundaries import Boundaries
from common.sync.synchronizer import Synchronizer
from common.tensors.arena import sha256_of_parameters

__all__ = ["TrainingState"]

Array = npt.NDArray[Any]
BEGAN = "began."  # random states when the epoch began
ENDS_WITHIN_S = 1.0  # a process, after an error that nothing catches
LONG = 100  # steps that a commit may wait for an update before that is said
PLAIN = (bool, int, float, str, type(None))


class TrainingState:
    """All that decides how a training goes on, kept in commits: parameters and buffers of the model, the optimizer's
    state, schedulers, GradScaler, the random states of Python, NumPy and Paddle, and the position in the data.

    Make it on all ranks, after the model was wrapped and the optimizer made; if there is a commit, all of them are as
    they were at the newest whole one. What else a program counts begins anew; `step` says how many steps were made.

    Args:
        model, optimizer: as the program uses them.
        checkpoint_dir: folder of the commits, the same for all ranks; to be given.
        commit_every: steps between two commits. While gradients are accumulated, one waits for the update.
        keep: how many stay.
        sampler: whose `epoch` says how it shuffles, if it is not the loader's batch sampler.
        scheduler: has `state_dict` and `set_state_dict`. The optimizer's own is kept with it anyway.
        scaler: a GradScaler.
        elastic: also go on from a commit of another number of ranks. The epoch goes on where it was, and the bits from
            there on are another run's.

    Raises:
        CommitCorrupt: there are commits, and none is whole.
        UsageError: they are of another model or number of ranks; or the folder was not given, or cannot be written.
    """

    def __init__(
        self,
        *,
        model: Any,
        optimizer: Any,
        checkpoint_dir: str | os.PathLike[str] = "",
        commit_every: int = 100,
        keep: int = 3,
        sampler: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        elastic: bool = False,
        joined: Callable[[], Synchronizer],
        models: WrappedModels | None = None,
    ) -> None:
        if commit_every < 1 or keep < 1:
            raise ValueError(f"commit_every and keep must be at least 1 (got {commit_every}, {keep})")
        if not os.fspath(checkpoint_dir):
            raise UsageError(
                "TrainingState needs a folder for its commits, the same on all ranks: "
                'TrainingState(model=model, optimizer=optimizer, checkpoint_dir="commits")'
            )
        self._synchronizer = joined()
        self._model, self._optimizer = model, getattr(optimizer, "_inner_opt", optimizer)
        self._others = {"scheduler": scheduler, "scaler": scaler}
        self._every, self._keep, self._elastic = commit_every, keep, elastic
        self._position = DataPosition(sampler)
        self._folder = CommitFolder(Path(checkpoint_dir))
        self._name = f"rank-{self._synchronizer.rank}"
        self._writer = Writer(self._folder, self._name)
        self._random = RandomStates()
        self._models = models or WrappedModels(joined)
        self._models.states += 1
        self._unused = UnusedGradients(self._optimizer, partial(getattr, self._models, "backwards"))
        self._waits_since: int | None = None  # the step whose commit waits for an update
        self._told_of_gradients = False
        self._servers = ServersPart(self._synchronizer, self._models, self._optimizer)
        self._trained = names_of(trainable(model))
        self._boundaries = Boundaries(self._synchronizer, settings_from(Settings).wait_limit)
        self._leaving: threading.Timer | None = None
        self.step = 0  # that were made
        if not self._roll_back():
            self._restore()
            if self._boundaries.are_kept and self._models.states == 1:
                self._servers.keep(self.step)

    def steps(self, loader: Iterable[Any], *, epochs: int = 1) -> Iterator[tuple[int, Any]]:
        """(epoch, batch) of what is left of so many passes over the loader; the body of the loop is one step.

        Raises:
            CommitFailed: a commit could not be written.
            UsageError: the loader has fewer batches than when the commit was made.
        """
        self._has_left()
        if self._boundaries.are_kept:
            self._models.watch(self._leave)
        try:
            while (epoch := self._position.epoch) < epochs:
                for batch in self._position.batches(loader):
                    self._models.forget_forwards()  # who comes back to this step has not made them
                    yield epoch, batch
                    if not self._models.failed:
                        self.step += 1
                        self._position.done(loader)
                        self._after_step()
                    if self._models.failed:
                        break
                else:
                    self._position.end(epoch)
                if self._models.failed:
                    self._go_on()
            self._position.at_end()
        except GeneratorExit:  # by a break, or by an error in the body, which may end this process
            self._leaving = threading.Timer(ENDS_WITHIN_S, self._has_left)
            self._leaving.daemon = True
            self._leaving.start()
            raise
        finally:
            self._models.watch(None)
            if self._leaving is None:
                self._boundaries.forget()
        self._finish()

    def _has_left(self) -> None:
        """The loop was left before its end: now this rank cannot come back to it. Who takes the place of one that an
        error has ended can."""
        if self._leaving is not None and getattr(sys, "last_value", None) is None:
            self._leaving.cancel()
            self._leaving = None
            self._boundaries.forget()

    def _leave(self, error: GradSyncError) -> None:
        """As of Boundaries, unless the model trains other parameters now than one that a program begins with, as who
        takes the place of another does."""
        if names_of(trainable(self._model)) != self._trained:
            raise error
        self._boundaries.leave(error)

    def _go_on(self) -> None:
        """The group has failed, and this rank outlives it: wait until it is whole again, and go back with it."""
        self._writer.close()
        self._boundaries.rejoin()
        self._models.begin_again()
        self._writer = Writer(self._folder, self._name)
        self._roll_back()

    def _roll_back(self) -> bool:
        """Whether this is not the first group, so that all ranks are now at the last step that all still have."""
        boundary = self._boundaries.agree()
        if boundary is None:
            return False
        self._servers.go_back(boundary.common.state["servers"], boundary.step)
        self._load(boundary.own, boundary.common)
        for _, p in trainable(self._model):
            p.clear_gradient()
        self.step, self._waits_since = boundary.step, None
        if self._synchronizer.rank == 0:
            self._folder.remove_after(self.step)
            self._folder.remove_unfinished()
        self._synchronizer.all_gather(np.zeros(1, np.uint8))  # before anybody writes there
        self._boundaries.gone_back(self.step)
        if self.step % self._every == 0:
            self._commit(boundary.own, boundary.common)  # it may have been under way
        return True

    def _after_step(self) -> None:
        self._writer.check()
        trained = trainable(self._model)  # of a large model to be looked for once
        keep, commit = self._can_go_back_here(trained), self._commits_here(trained)
        own, common = Part(), Part()
        if keep or commit:
            own = Part(self._own_arrays(trained), {"position": self._position.state(), **self._own_state()})
            common = self._common(trained) if keep or self._synchronizer.rank == 0 else common
        try:
            if keep:
                self._boundaries.keep(self.step, own, common)
            else:
                self._boundaries.keep_none()
            if commit:
                self._commit(own, common)
        except (PeerError, PeerUnreachable) as exc:  # copies are exchanged, servers asked for what they have
            self._models.fail(exc)

    def _can_go_back_here(self, trained: Named) -> bool:
        """Whether what this object knows is all there is: neither gradients that the next step adds to, nor models of
        others."""
        if not self._boundaries.are_kept or self._models.states > 1 or not self._servers.can_be_left:
            return False
        if names_of(trained) != self._trained:
            self._boundaries.forget()
            return False
        mine = [p for _, p in trained]
        if not self._models.owned() <= {id(p) for p in mine}:
            return False
        if (cleared := all(map(is_cleared, mine))) or self._unused.may_be_left() or self._told_of_gradients:
            return cleared
        self._told_of_gradients = True
        if self._synchronizer.rank == 0:
            say(
                "if a process dies, all are started again from the last commit: the loop's body leaves gradients after "
                "its update; if it cleared them at its end, clear_grad(), the others could go on"
            )
        return False

    def _commits_here(self, trained: Named) -> bool:
        """Whether a commit is due, and none of what it needs lies in gradients, which it does not have."""
        if self.step % self._every and self._waits_since is None:
            return False
        if not self._unused.may_be_left() or all(is_cleared(p) for _, p in trained):
            self._waits_since = None
            return True
        self._waits_since = self.step if self._waits_since is None else self._waits_since
        if self.step == self._waits_since + LONG and self._synchronizer.rank == 0:
            say(
                f"the commit of step {self._waits_since:,} waits for an update: {LONG} steps have added to the "
                "gradients since, which commits do not keep"
            )
        return False

    def _common(self, trained: Named) -> Part:
        """What all ranks have alike, without what servers have."""
        parameters = {name: p.numpy() for name, p in trained}
        optimizer = parted(self._servers.state_here())
        return Part(
            {**named(PARAMETERS, parameters), **optimizer.arrays},
            {"optimizer": optimizer.state, "servers": self._servers.note()},
        )

    def _commit(self, own: Part, common: Part) -> None:
        if self._synchronizer.rank > 0:
            self._writer.write(self.step, own)
            return
        optimizer = Part(common.arrays, common.state["optimizer"])
        if self._servers.has_optimizer:
            optimizer = parted(self._optimizer.state_dict())
        arrays = {**own.arrays, **common.arrays, **optimizer.arrays}
        self._writer.write(self.step, Part(arrays, {**own.state, "optimizer": optimizer.state}))
        parameters = common.beginning(PARAMETERS)
        names = participants(self._synchronizer.nranks, 0)
        describe = partial(self._describe, self.step, self._position.epoch, parameters)
        self._writer.complete(self.step, names, describe, keep=self._keep, timeout=settings_from(Settings).timeout)

    def _describe(
        self, step: int, epoch: int, parameters: Mapping[str, Array], parts: dict[str, PartEntry]
    ) -> Manifest:
        return Manifest(
            scheme=self._synchronizer.scheme,
            nranks=self._synchronizer.nranks,
            step=step,
            epoch=epoch,
            parts=parts,
            parameters_sha256=sha256_of_parameters(parameters.items()),
        )

    def _own_arrays(self, trained: Named) -> dict[str, Array]:
        """Of this rank: all of the model that is not trained, such as BatchNorm statistics, and random states."""
        shared = {id(p) for _, p in trained}
        buffers = {name: t.numpy() for name, t in self._model.state_dict().items() if id(t) not in shared}
        random = named(RANDOM, self._random.arrays()) | named(BEGAN, self._position.began())
        return named(BUFFERS, buffers) | random

    def _own_state(self) -> dict[str, Any]:
        others = {name: each.state_dict() for name, each in self._others.items() if each is not None}
        return {
            name: {key: plain_or_array(value, f"{name}'s {key}", plain_only=True) for key, value in state.items()}
            for name, state in others.items()
        }

    def _restore(self) -> None:
        rank = self._synchronizer.rank
        manifest, goes_on = self._find() if rank == 0 else (None, "")
        step = self._synchronizer.all_gather(np.array([manifest.step if manifest else 0], np.int64))[0, 0]
        if step == 0:
            return
        manifest = manifest or self._folder.manifest(int(step))
        common = self._folder.part(manifest, "rank-0")
        has_own = self._name in manifest.parts
        own = self._folder.part(manifest, self._name) if has_own and rank > 0 else common
        self._load(own, common, of=manifest.nranks, has_own=has_own)
        self.step = manifest.step
        if goes_on:
            say(goes_on)

    def _load(self, own: Part, common: Part, *, of: int | None = None, has_own: bool = True) -> None:
        """Be where these were kept, by that many ranks; not `has_own`: by none of this number."""
        self._fill_model(common.beginning(PARAMETERS) | own.beginning(BUFFERS))
        accumulators = {key: paddle.to_tensor(array) for key, array in common.beginning(ACCUMULATORS).items()}
        self._servers.set_state({**accumulators, **common.state["optimizer"]})
        for name, each in self._others.items():
            if each is not None and name in own.state:
                load = getattr(each, "set_state_dict", None) or each.load_state_dict
                load({key: np.array(v) if isinstance(v, list) else v for key, v in own.state[name].items()})
        position, nranks = dict(own.state["position"]), self._synchronizer.nranks
        position["batch"] = position["batch"] * (of or nranks) // nranks
        began, now = (own.beginning(BEGAN), own.beginning(RANDOM)) if has_own else ({}, random_arrays())
        self._position.load(position, began, now)

    def _find(self) -> tuple[Manifest | None, str]:
        """The newest commit, and what to say of going on from it."""
        self._folder.make()
        self._folder.hold()
        found, goes_on = self._folder.newest(), ""
        if found is not None:
            elastic = None if self._elastic else "elastic=True"
            goes_on = check_fits(found, self._folder, nranks=self._synchronizer.nranks, job={}, elastic=elastic)
        self._folder.remove_after(found.step if found else 0)
        return found, goes_on

    def _fill_model(self, arrays: Mapping[str, Array]) -> None:
        """
        Raises:
            UsageError: the commit is of another model.
        """
        there = {name: t for name, t in self._model.state_dict().items() if name in arrays}
        names = {name for name, _ in trainable(self._model)}
        for name in sorted(names | arrays.keys()):
            mine = list(there[name].shape) if name in there else "none"
            theirs = list(arrays[name].shape) if name in arrays else "none"
            if mine != theirs:
                raise UsageError(f"the commits in {self._folder} are of another model: {name} {theirs}, here {mine}")
        with paddle.no_grad():
            for name, tensor in there.items():
                tensor.set_value(arrays[name])

    def _finish(self) -> None:
        """Blocks until all commits are written."""
        if self._synchronizer.rank > 0:
            self._writer.finish()
        self._synchronizer.all_gather(np.zeros(1, np.uint8))  # who could not write its part has said so
        self._writer.finish()


def names_of(parameters: Named) -> list[str]:
    return [name for name, _ in parameters]


def is_cleared(parameter: Any) -> bool:
    """Whether it has no gradient, or zero."""
    grad = grad_of(parameter)
    return grad is None or grad.data_ptr() is None or not grad.numpy().any()


def parted(optimizer: Mapping[str, Any]) -> Part:
    """Its state_dict as commits have it: accumulators, and plain values."""
    values = {key: plain_or_array(value, key) for key, value in optimizer.items()}
    arrays = {key: value for key, value in values.items() if isinstance(value, np.ndarray)}
    return Part(named(ACCUMULATORS, arrays), {key: value for key, value in values.items() if key not in arrays})


def named(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {prefix + name: array for name, array in arrays.items()}


def plain_or_array(value: Any, name: str, *, plain_only: bool = False) -> Any:
    """What a part can keep of a value: a tensor as an array, or else, as a list; a scalar or a dict as it is.

    Raises:
        UsageError: it can be kept in no way.
    """
    if isinstance(value, paddle.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return value.tolist() if plain_only else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain_or_array(each, f"{name} {key}", plain_only=True) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_or_array(each, name, plain_only=True) for each in value]
    if isinstance(value, PLAIN):
        return value
    raise UsageError(f"TrainingState cannot keep {name}, a {type(value).__name__}; keep numbers, texts and tensors")
