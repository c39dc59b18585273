"""The models of one process that were given to DataParallel: each with an average of its gradients, for as long as it
lives."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from weakref import ref

import numpy as np
import paddle

from common.errors import GradSyncError, PeerError, PeerUnreachable
from common.paddle_api.arena_binding import is_trained, statistics_of, trainable
from common.paddle_api.backward import forget, listen_to_backward
from common.paddle_api.gradient_average import GradientAverage
from common.paddle_api.optimizer_hook import OptimizerHook, forget_steps, listen_to_steps
from common.paddle_api.refusals import check_parameters
from common.paddle_api.sparse_gradients import SparseGradients, sparse_parameters
from common.sync.synchronizer import Synchronizer

__all__ = ["WrappedModel", "WrappedModels", "share_buffers"]

OnFailure = Callable[[GradSyncError], None]


class WrappedModels:
    """
    Args:
        joined: the synchronizer of the group, which is joined if it was not before.
    """

    def __init__(self, joined: Callable[[], Synchronizer]) -> None:
        self._joined = joined
        self._models: list[WrappedModel] = []
        self._first: Synchronizer | None = None  # the group's own, once a model has it
        self.states = 0  # how many a program has made of TrainingState
        self.backwards = 0  # that have ended
        self._on_failure: OnFailure | None = None
        self.failed = False  # the group, and somebody will see to it

    @property
    def nranks(self) -> int:
        """Of the group."""
        return self._joined().nranks

    def __len__(self) -> int:
        return len(self._models)

    def wrap(
        self, model: Any, *, first_bytes: int, bucket_bytes: int, among: Synchronizer | None = None
    ) -> WrappedModel:
        """Average a model's gradients from now on, until it is gone; called by all ranks in the same order. Parameters
        that another model has too stay with that one.

        Args:
            first_bytes, bucket_bytes: of the bucket plan.
            among: of the ranks that average it, if these are not all.

        Raises:
            UsageError: something of the model cannot be synchronised.
        """
        group = self._joined()
        self._drop_dead()
        if among:
            check_parameters(trainable(model))
            share_buffers(model, group, self.owned())
        wrapped = WrappedModel(
            model,
            among or group,
            among.another if among else self.next_synchronizer,
            self.owned(),
            self.fail,
            first_bytes=first_bytes,
            bucket_bytes=bucket_bytes,
        )
        forget(self)
        listen_to_backward(self)
        self._models.append(wrapped)
        return wrapped

    def next_synchronizer(self) -> Synchronizer:
        """For one more arena."""
        group = self._joined()
        if self._first is not group:
            self._first = group
            return group
        return group.another()

    def owned(self) -> set[int]:
        """The `id` of every parameter that some model averages."""
        return {id(p) for each in self._models for p in each.parameters}

    @property
    def only_hook(self) -> OptimizerHook | None:
        """That of the one model, whose gradients the group's own synchronizer averages, so that servers keep what they
        have of it; None: there are several, or servers have nothing of it."""
        self._drop_dead()
        if len(self._models) != 1 or not self._models[0].is_first:
            return None
        return self._models[0].hook

    def forget_forwards(self) -> None:
        """What was called so far decides no longer whether a backward synchronises."""
        for each in self._models:
            each.forget_forwards()

    def watch(self, on_failure: OnFailure | None) -> None:
        """Call this instead of raising that the group has failed in a backward or an update, unless it raises. Backward
        is this rank's alone from then on, until `begin_again`."""
        self._on_failure = on_failure

    def begin_again(self) -> None:
        """In a new group of the same ranks, where all wrap their models anew."""
        self._first, self.failed = None, False
        self._drop_dead()
        for each in self._models:
            each.begin_again()

    def before_backward(self) -> None:
        if self.failed:
            return
        self._drop_dead()
        try:
            for each in self._models:
                each.before_backward()
        except (PeerError, PeerUnreachable) as exc:
            self.fail(exc)

    def after_backward(self) -> None:
        self.backwards += 1
        if self.failed:
            return
        first = self._first
        try:
            for each in sorted(self._models, key=lambda each: each.group is not first):  # of some: not within a step
                each.after_backward()
        except (PeerError, PeerUnreachable) as exc:
            self.fail(exc)

    def fail(self, error: GradSyncError) -> None:
        """The group has failed so.

        Raises:
            GradSyncError: that error, unless somebody sees to it.
        """
        if self._on_failure is None or any(each.group is not self._first for each in self._models):
            raise error
        self._on_failure(error)
        self.failed = True
        for each in self._models:
            each.stand_still()

    def stop(self) -> None:
        """Backward and optimizers are Paddle's own from now on."""
        forget(self)
        for each in self._models:
            each.stop()
        self._models, self._first = [], None

    def _drop_dead(self) -> None:
        """Models go when a garbage collector finds them; what was theirs goes here, where nothing is under way."""
        for each in [m for m in self._models if m.is_gone]:
            each.stop()
            self._models.remove(each)
            each.close()


class WrappedModel:
    """One model's gradients, dense and sparse, and who updates its parameters.

    Args:
        group: for what is not synchronised in every step.
        next_synchronizer: makes one for an arena.
        elsewhere: the `id` of parameters that other models average.
        failed: is called with what the group has failed with in an update by servers.

    Attributes:
        enabled: whether a forward has its backward synchronise; else that accumulates this rank's gradients only.
    """

    def __init__(
        self,
        model: Any,
        group: Synchronizer,
        next_synchronizer: Callable[[], Synchronizer],
        elsewhere: Collection[int],
        failed: OnFailure,
        **limits: int,
    ) -> None:
        self._model, self.group, self._elsewhere, self._failed = ref(model), group, frozenset(elsewhere), failed
        self._next_synchronizer, self._limits = next_synchronizer, limits
        self.enabled = True
        self._asked: bool | None = None
        self._synchronises = True
        self._build(model)
        share_buffers(model, group, self._elsewhere | {id(p) for _, p in self._dense(model)})

    @property
    def parameters(self) -> list[Any]:
        """That this model averages."""
        dense = self._average.binding.named if self._average else []
        return [p for _, p in (*dense, *self._sparse.named)]

    @property
    def hook(self) -> OptimizerHook | None:
        """Where servers can make its update."""
        return self._hook

    @property
    def is_first(self) -> bool:
        """Whether the group's own synchronizer averages its gradients."""
        return self._average is not None and self._synchronizer is self.group

    @property
    def is_gone(self) -> bool:
        return self._model() is None

    def note_forward(self, *, synchronise: bool) -> None:
        """As in Paddle, forwards since the last backward that synchronised decide whether the next one does: if one of
        them was outside `no_sync`."""
        self._asked = synchronise or bool(self._asked)

    def forget_forwards(self) -> None:
        """A backward synchronises if it stands outside `no_sync`, unless a forward comes before it."""
        self._asked = None

    def before_backward(self) -> None:
        self._sparse.reached = False
        self._synchronises = self.enabled if self._asked is None else self._asked
        if self._average:
            self._average.enabled = self._synchronises
            self._average.before_backward()
        model = self._model()
        if model is not None and any(is_trained(p) for p in self._frozen):
            self._rebuild(model)

    def after_backward(self) -> None:
        if self._average:
            self._average.after_backward(reached=self._sparse.reached)
        if self._synchronises and (self._sparse.reached or (self._average and self._average.binding.reached)):
            self._sparse.average()
            self._asked = None

    def stop(self) -> None:
        """Backward and the optimizer are Paddle's own from now on."""
        self._sparse.stop()
        if self._average:
            self._average.stop()
        if self._hook:
            forget_steps(self._hook)

    def stand_still(self) -> None:
        """As `stop`, but for an optimizer whose state servers have: its updates are none from now on."""
        self._sparse.stop()
        if self._average:
            self._average.stop()
        if self._hook:
            self._hook.stand_still()

    def begin_again(self) -> None:
        """After `stand_still`, in a new group: as when it was wrapped."""
        model = self._model()
        self.forget_forwards()
        self.stop()
        if model is not None:
            self.close()
            self._build(model)
            share_buffers(model, self.group, self._elsewhere | {id(p) for _, p in self._dense(model)})

    def close(self) -> None:
        """End the synchronisation of a model that is gone."""
        if self._average and self._synchronizer is not self.group:
            self._synchronizer.close()

    def _build(self, model: Any) -> None:
        self._average: GradientAverage | None = None
        self._hook: OptimizerHook | None = None
        named = [(name, p) for name, p in trainable(model) if id(p) not in self._elsewhere]
        check_parameters(trainable(model))
        tables = sparse_parameters(model)
        statistics = statistics_of(model)
        self._frozen = [p for p in model.parameters() if not is_trained(p) and id(p) not in statistics]
        self._sparse = SparseGradients([(name, p) for name, p in named if id(p) in tables], self.group)
        if dense := self._dense(model):
            self._synchronizer = self._next_synchronizer()
            self._average = GradientAverage(dense, self._synchronizer, **self._limits)
            self._average.enabled = self._synchronises
            self._average.share_parameters()
            if self._synchronizer.server_optimizer:
                self._hook = OptimizerHook(self._synchronizer, self._average, self._failed)
                listen_to_steps(self._hook)

    def _dense(self, model: Any) -> list[tuple[str, Any]]:
        apart = self._elsewhere | sparse_parameters(model)
        return [(name, p) for name, p in trainable(model) if id(p) not in apart]

    def _rebuild(self, model: Any) -> None:
        """The program has unfrozen a parameter: begin anew with it. Gradients and the optimizer's state stay."""
        old = self._average, self._hook.estate() if self._hook else None  # its gradients lie there until they are moved
        self.stop()
        self.close()
        self._build(model)
        if self._hook and old[1]:
            self._hook.inherit(*old[1])
        if self._average:
            self._average.before_backward()


def share_buffers(model: Any, synchronizer: Synchronizer, apart: Collection[int]) -> None:
    """BatchNorm's statistics, frozen parameters and other buffers become rank 0's, once; later each rank keeps its own,
    as in Paddle.

    Args:
        apart: the `id` of parameters that the ranks have alike.
    """
    with paddle.no_grad():
        for _, tensor in model.state_dict().items():
            if id(tensor) not in apart:
                tensor.set_value(np.asarray(synchronizer.all_gather(tensor.numpy())[0]))  # as in FleetApi.all_reduce
