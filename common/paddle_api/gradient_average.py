"""The mean over all ranks of a model's gradients, after every backward; or, where servers update, their push to them.

One bucket's way from Paddle's backward: Binding's hook -> EarlyBuckets.complete -> Synchronizer.mark_ready.
"""

from __future__ import annotations

import time

from common.launch.settings import Settings, settings_from
from common.paddle_api.arena_binding import Binding
from common.paddle_api.backward import forget
from common.paddle_api.gradient_hooks import Named
from common.paddle_api.pushed_step import PushedStep
from common.paddle_api.ready_buckets import EarlyBuckets
from common.paddle_api.replicas import ReplicaCheck
from common.paddle_api.scalers import some_scaler_is_on
from common.paddle_api.used_mask import UsedMask, layout_with_used
from common.sync.guard import Guard
from common.sync.synchronizer import Synchronizer
from common.tensors.arena import Arena

__all__ = ["GradientAverage"]


class GradientAverage:
    """Averages the gradients of a model's parameters at the end of every backward.

    Args:
        named: its parameters.
        first_bytes, bucket_bytes: of the bucket plan.
    """

    def __init__(self, named: Named, synchronizer: Synchronizer, *, first_bytes: int, bucket_bytes: int) -> None:
        layout = layout_with_used(named)
        buckets = layout.plan(first_bytes=first_bytes, bucket_bytes=bucket_bytes)
        arena = Arena(layout, buckets=buckets, empty=synchronizer.empty)
        refuses = settings_from(Settings).non_finite == "error"
        synchronizer.guard = Guard(arena, synchronizer.rank, refuses=refuses, excused=some_scaler_is_on)
        self._synchronizer = synchronizer
        self._buckets = EarlyBuckets(synchronizer, len(buckets))
        self.binding = Binding(named, arena, self._buckets.complete, self._on_again)
        self._used = UsedMask(self.binding)
        self._replicas = ReplicaCheck(synchronizer)
        self.pushed_step: PushedStep | None = None
        if servers := synchronizer.server_optimizer:
            self.pushed_step = PushedStep(synchronizer, servers, self.binding, self._used, self._buckets)
        self.enabled = True  # else backward accumulates this rank's gradients only

    def share_parameters(self) -> None:
        """Give every rank rank 0's parameters, and agree on the layout; from then on they are views of the arena."""
        self.binding.fill_arena()
        self._synchronizer.attach(self.binding.arena, None)
        self.binding.bind_parameters()
        if self.pushed_step:
            self.pushed_step.note_parameters()

    def stop(self) -> None:
        """Backward is Paddle's own from now on."""
        self.binding.stop()
        forget(self)

    def before_backward(self) -> None:
        """Put lost views back; what was cleared is zero again."""
        self._began = time.monotonic()
        kept = self.binding.kept()
        if self.pushed_step:
            self.pushed_step.before_backward(kept)
        self._buckets.begin(synchronise=self.enabled)
        self.binding.begin(kept)
        self._used.keep(kept)

    def after_backward(self, *, reached: bool = False) -> None:
        """Wait until the gradients are the mean over ranks. A backward of some other model changes nothing.

        Args:
            reached: it has reached something else of this model.
        """
        self._used.reach(self.binding.reached)
        self.binding.raise_error()
        if self.binding.reached or reached:
            self._buckets.learn()
            self._synchronizer.trace.add("backward", self._began, time.monotonic())
            if self.enabled:
                self._synchronise()
            if self.pushed_step:
                self.pushed_step.after_backward(synchronised=self.enabled)
        self._used.drop_unused()

    def _synchronise(self) -> None:
        self._used.tell()
        if self.pushed_step and self.pushed_step.servers_update:
            self.pushed_step.push()
            return
        self._synchronizer.finish(0.0)
        self._buckets.agree_on_order()
        self._replicas.after_average(p for _, p in self.binding.named)
        self._used.take_all()

    def _on_again(self, index: int) -> None:
        self._buckets.reached_again(self.binding.bucket_of[index], self.binding.named[index][0])
