"""What parameter servers have been given of a step, and what the program has changed since."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import UsageError
from common.paddle_api.arena_binding import Binding
from common.paddle_api.ready_buckets import EarlyBuckets
from common.paddle_api.used_mask import UsedMask
from common.sync.synchronizer import ServerOptimizer, Synchronizer
from common.tensors.fingerprint import fingerprint, fingerprint_and_look

__all__ = ["PushedStep"]


class PushedStep:
    """The steps of a model whose update servers can make. A backward's gradients are pushed, and stay with the servers
    until the optimizer steps or another backward comes; or their mean has come back, of which servers keep a copy.

    After an update the arena has this rank's own gradients still, where all other programs would find the mean. What
    adds to them must add to the mean: it is fetched then, by pushing them once more.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        servers: ServerOptimizer,
        binding: Binding,
        used: UsedMask,
        buckets: EarlyBuckets,
    ) -> None:
        self._synchronizer, self._servers = synchronizer, servers
        self._binding, self._used, self._buckets = binding, used, buckets
        self.servers_update = False  # from then on a backward does not wait for the average
        self.has_begun = False  # there has been a backward
        self.pushed = False  # the last backward's gradients are with the servers
        self._averaged = False  # and their mean is in the arena
        self._left = False  # after an update, and until they are cleared
        self._void = False  # they were cleared when the servers had them
        self._gradients = self._parameters = 0  # fingerprints

    @property
    def withholds_mean(self) -> bool:
        """Whether the program, between backward and step, would find its own gradients in place of the mean."""
        return self.pushed and not self._void

    def push(self) -> None:
        """A backward is done."""
        self._buckets.mark_rest()
        self.pushed = True

    def after_backward(self, *, synchronised: bool) -> None:
        """Take note of what the program finds: its own gradients, or the mean."""
        self._averaged, self._left, self._void = synchronised and not self.pushed, False, False
        self.has_begun = True
        self._gradients, finite = fingerprint_and_look(self._binding.arena.gradients)
        if self._servers.looks_later and not finite:
            self._servers.look_back()

    def before_backward(self, kept: list[bool]) -> None:
        """What an earlier backward has left is the mean over ranks, if another one is to add to it.

        Args:
            kept: which parameters have a gradient; brought up to date.
        """
        if self.pushed and self.parameters_changed():
            raise UsageError(
                "the program changed parameters by itself after a backward, whose gradients only the servers had "
                "averaged; start with --update trainer"
            )
        if self._left and any(kept):
            self._push_anew(kept)
        if self.pushed:
            self._take_average(kept)
        self._servers.looks_later = self.servers_update

    def end_updates_by_servers(self) -> None:
        """The gradients are the mean over ranks, and the optimizers' own affair from now on."""
        kept = self._binding.kept()
        if self._left:
            self._push_anew(kept)
        if self.pushed:
            self._take_average(kept)
        self.servers_update = False

    def cleared(self) -> None:
        """The program has cleared all gradients."""
        self._left, self._void = False, self.pushed

    def _take_average(self, kept: list[bool]) -> None:
        """End the step that the last backward has pushed with the average, as if its backward had waited for it. What
        the program has cleared since stays zero; so does what only other ranks have used, if all else was cleared."""
        binding, mine = self._binding, self._used.has
        cleared = self._cleared(kept)
        all_cleared = all(c for c, has in zip(cleared, mine, strict=True) if has)
        self._synchronizer.finish(0.0)
        self.pushed, self._averaged = False, True
        used = self._used.take_all()
        for index, slot in enumerate(binding.slots):
            if cleared[index] if mine[index] else all_cleared:
                binding.arena.gradients[slot.start : slot.stop] = 0
            elif used[index] and not kept[index]:
                binding.attach(index)
                kept[index] = True
        self._gradients = fingerprint(binding.arena.gradients)

    def gradients_changed(self) -> bool:
        """By the program, since backward."""
        lost = any(has and not self._binding.has_view(index) for index, has in enumerate(self._used.not_frozen()))
        return lost or fingerprint(self._binding.arena.gradients) != self._gradients

    def update(self, learning_rate: float) -> None:
        """Have the servers end the step with an update: blocks until the parameters are the new ones."""
        if self._void:  # the step that they belong to ends without an update
            self._synchronizer.finish(0.0)
            self._binding.arena.gradients.fill(0)
            self.pushed = self._void = False
        if not self.pushed and (not self._averaged or self.gradients_changed()):  # no_sync, a second step, or cleared
            self._push_anew(self._binding.kept())
        self._servers.update(
            learning_rate,
            used=self._used.of_slots(),
            again=not self.pushed,
            replaced=self.parameters_changed(),
        )
        self.note_parameters()

    def note_parameters(self) -> None:
        """These are the parameters of all ranks; what the program changes of them from now on is new."""
        self._left = self.pushed  # not the mean
        self.pushed = self._averaged = False
        self._parameters = fingerprint(self._binding.arena.parameters)

    def parameters_changed(self) -> bool:
        """By the program, since the last update; they are views of the arena again."""
        self._binding.take_replaced_parameters()
        return fingerprint(self._binding.arena.parameters) != self._parameters

    def can_change(self) -> bool:
        """Whether servers need not have what the program has made of the gradients since backward."""
        return self._has_none() if self._void or self._averaged else not self.pushed

    def _has_none(self) -> bool:
        """Whether all gradients are zero, or not there."""
        gradients = self._binding.arena.gradients
        slots = zip(self._binding.slots, self._binding.kept(), strict=True)
        return not any(has and gradients[slot.start : slot.stop].any() for slot, has in slots)

    def _push_anew(self, kept: Sequence[bool]) -> None:
        """Push the gradients as they are now."""
        for slot, has in zip(self._binding.slots, kept, strict=True):
            if not has:
                self._binding.arena.gradients[slot.start : slot.stop] = 0
        self._used.keep(kept)
        self._used.tell()
        self._buckets.mark_rest(all_again=True)
        self.pushed = True

    def _cleared(self, kept: Sequence[bool]) -> list[bool]:
        """Which parameters' gradients the program has cleared since backward."""
        gradients = self._binding.arena.gradients
        touched = fingerprint(gradients) != self._gradients
        return [
            not k or (touched and not gradients[slot.start : slot.stop].any())
            for k, slot in zip(kept, self._binding.slots, strict=True)
        ]
