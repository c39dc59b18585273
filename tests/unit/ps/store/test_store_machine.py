"""The store against a model of plain NumPy, whatever the order of messages, whatever illegal ones come between."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import GradSyncError, LayoutMismatch, ProtocolError, StaleEpoch
from common.tensors.arena import FloatArray
from common.tensors.buckets import Bucket, words
from ps.store.ending import Ending
from ps.store.shards import Shard, plan_shards, shard_of_bucket
from ps.store.step_state import StepState
from tests.support.store_model import (
    EPOCH,
    NumpySGD,
    canonical_mean,
    gradients_of,
    in_pieces,
    initial_parameters,
    make_store,
    mixed_plans,
    new_values,
    one,
    plans,
    rate_of,
    refused,
    updated,
)
from tests.support.thorough import examples

USED = 3  # parameters that the masks of the machine tell of


def mask_of(rank: int, step: int) -> bytes:
    return np.random.default_rng([rank, step]).integers(0, 2, USED).astype(np.uint8).tobytes()


class StoreMachine(RuleBasedStateMachine):
    """Trainers of several servers push, replace parameters and end steps as they like, all in the same way; each server
    is compared with the whole model. How steps end is drawn once, and repeats."""

    @initialize(
        plan=st.one_of(plans(), mixed_plans()),
        nranks=st.integers(1, 4),
        servers=st.integers(1, 4),
        kinds=st.lists(st.sampled_from(["update", "average", "replaced", "again", "again, replaced"]), min_size=1),
        piece=st.sampled_from([16, 48, 1 << 62]),
        takes_pieces=st.booleans(),
    )
    def begin(
        self,
        plan: tuple[int, list[Bucket]],
        nranks: int,
        servers: int,
        kinds: list[str],
        piece: int,
        takes_pieces: bool,
    ) -> None:
        self.kinds = kinds
        self.length, self.buckets = plan
        self.nranks = nranks
        shards = plan_shards(self.length, servers)
        self.stores = [make_store(s, self.buckets, nranks, self.length, piece=piece) for s in shards]
        self.piece, self.takes_pieces = piece, takes_pieces
        self.models = [initial_parameters(self.length)]
        self.endings: list[Ending] = []
        self.sent = [self.nothing_sent() for _ in self.stores]
        self.replaced = [0 for _ in self.stores]
        self.committed: list[set[int]] = [set() for _ in self.stores]
        self.ahead: list[set[int]] = [set() for _ in self.stores]
        self.averaged = [[0] * len(self.buckets) for _ in self.stores]  # words of each bucket
        self.updated = [[0] * len(self.buckets) for _ in self.stores]

    def nothing_sent(self) -> list[list[int]]:
        return [[0] * len(self.buckets) for _ in range(self.nranks)]

    def ending(self, step: int) -> Ending:
        while len(self.endings) <= step:
            at = len(self.endings)
            kind, averaged = self.kinds[at % len(self.kinds)], at > 0 and not self.endings[-1].update
            self.endings.append(
                Ending(0.0, update=False)
                if kind == "average"
                else Ending(rate_of(at), replaced="replaced" in kind, again=averaged and "again" in kind)
            )
        return self.endings[step]

    def part(self, server: int, bucket: int) -> Shard:
        return shard_of_bucket(self.stores[server].shard, self.buckets[bucket])

    def left(self, server: int, rank: int, bucket: int) -> int:
        """Words still to be pushed."""
        again = self.ending(self.stores[server].step).again
        return 0 if again else self.part(server, bucket).length - self.sent[server][rank][bucket]

    def open_ranks(self) -> list[tuple[int, int]]:
        pairs = [(s, r) for s in range(len(self.stores)) for r in range(self.nranks)]
        return [(s, r) for s, r in pairs if r not in self.committed[s]]

    def pending(self) -> list[tuple[int, int, int]]:
        pairs = self.open_ranks() + [(s, r) for s, ranks in enumerate(self.ahead) for r in sorted(ranks)]
        triples = [(s, r, b) for s, r in pairs for b in range(len(self.buckets))]
        return [triple for triple in triples if self.left(*triple)]

    def to_replace(self, server: int) -> int:
        """Words of the parameters that rank 0 has still to send to this server before it commits."""
        store = self.stores[server]
        return store.shard.length - self.replaced[server] if self.ending(store.step).replaced else 0

    def replacing(self) -> list[int]:
        return [s for s in range(len(self.stores)) if 0 not in self.committed[s] and self.to_replace(s)]

    def ready(self) -> list[tuple[int, int]]:
        waiting = {(s, r) for s, r, _ in self.pending()} | {(s, 0) for s in self.replacing()}
        return [pair for pair in self.open_ranks() if pair not in waiting]

    def push(self, server: int, rank: int, bucket: int, size: int) -> None:
        store, sent = self.stores[server], self.sent[server]
        start = self.part(server, bucket).start + sent[rank][bucket]
        data = gradients_of(rank, store.step, self.length, tuple(self.buckets))[start : start + size]
        complete = store.push(rank, EPOCH, store.step, bucket, start, data)
        sent[rank][bucket] += size
        least, part = min(sent[r][bucket] for r in range(self.nranks)), self.part(server, bucket)
        there = least if least == part.length else least // self.piece * self.piece
        assert complete == (there > self.averaged[server][bucket])
        if complete:
            if not (self.takes_pieces and store.committed):
                store.reduce(bucket)
            self.averaged[server][bucket] = there
        self.go_on(server)

    def replace(self, server: int, size: int) -> None:
        store = self.stores[server]
        start = store.shard.start + self.replaced[server]
        store.replace(0, EPOCH, store.step, start, new_values(store.step, self.length)[start : start + size])
        self.replaced[server] += size

    def commit(self, server: int, rank: int, *, ahead: bool = False) -> None:
        store, ending = self.stores[server], self.ending(self.stores[server].step)
        complete = store.commit(rank, EPOCH, store.step, ending, mask_of(rank, store.step), ahead=ahead)
        self.committed[server].add(rank)
        if ahead:
            self.ahead[server].add(rank)
        assert complete == all(self.finished(server, r) for r in range(self.nranks))
        assert store.ending == ending
        self.go_on(server)

    def finished(self, server: int, rank: int) -> bool:
        owes = any(self.left(server, rank, b) for b in range(len(self.buckets)))
        return rank in self.committed[server] and not owes

    def go_on(self, server: int) -> None:
        """Update, or average, if it is time for that."""
        store, step = self.stores[server], self.stores[server].step
        ending = self.ending(step)
        all_committed = len(self.committed[server]) == self.nranks
        all_there = all(self.finished(server, r) for r in range(self.nranks))
        a_piece = self.takes_pieces and self.averaged[server] != self.updated[server]
        due = all_committed and (all_there or a_piece)
        assert store.is_due(in_pieces=self.takes_pieces) == due
        if not due:
            return
        if not ending.update:
            store.average()
            self.compare_average(store, step)
        elif self.takes_pieces:
            runs = store.update_pieces(in_pieces(store))
            if not (ending.again or ending.replaced):
                assert sum(b - a for a, b in runs) == sum(self.averaged[server]) - sum(self.updated[server])
                self.updated[server] = list(self.averaged[server])
        else:
            updater = NumpySGD(store)
            store.update(updater)
            masks = [np.frombuffer(mask_of(r, step), np.uint8) for r in range(self.nranks)]
            assert updater.used == [np.bitwise_or.reduce(masks).tobytes()]
        assert store.step == step + all_there
        if all_there:
            self.sent[server], self.committed[server], self.replaced[server] = self.nothing_sent(), set(), 0
            self.ahead[server] = set()
            self.averaged[server], self.updated[server] = ([0] * len(self.buckets) for _ in range(2))

    def compare_average(self, store: StepState, step: int) -> None:
        sources = [gradients_of(rank, step, self.length, tuple(self.buckets)) for rank in range(self.nranks)]
        mean = np.zeros(self.length, np.float32)
        for b in self.buckets:
            mean[b.start : b.stop].view(b.dtype)[...] = canonical_mean(sources, b)
        assert store.gradients.tobytes() == mean[store.shard.start : store.shard.stop].tobytes()

    def model(self, step: int) -> FloatArray:
        while len(self.models) <= step:
            done = len(self.models) - 1
            ending, parameters = self.ending(done), self.models[-1]
            if ending.update:
                base = new_values(done, self.length) if ending.replaced else parameters
                parameters = updated(base, done - ending.again, ending.learning_rate, self.nranks, self.buckets)
            self.models.append(parameters)
        return self.models[step]

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def push_a_piece(self, data: st.DataObject) -> None:
        server, rank, bucket = data.draw(st.sampled_from(self.pending()))
        word = words(self.buckets[bucket].dtype)
        self.push(server, rank, bucket, word * data.draw(st.integers(0, self.left(server, rank, bucket) // word)))

    @precondition(lambda self: self.replacing())
    @rule(data=st.data())
    def replace_a_piece(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from(self.replacing()))
        self.replace(server, data.draw(st.integers(0, self.to_replace(server))))

    @precondition(lambda self: self.open_ranks())
    @rule(data=st.data())
    def send_the_rest_and_commit(self, data: st.DataObject) -> None:
        server, rank = data.draw(st.sampled_from(self.open_ranks()))
        for bucket in data.draw(st.permutations(range(len(self.buckets)))):
            self.push(server, rank, bucket, self.left(server, rank, bucket))
        if rank == 0:
            self.replace(server, self.to_replace(server))
        self.commit(server, rank)

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def commit_when_ready(self, data: st.DataObject) -> None:
        self.commit(*data.draw(st.sampled_from(self.ready())))

    @rule(data=st.data(), epoch=st.sampled_from([0, EPOCH - 1, EPOCH + 1]))
    def another_epoch(self, data: st.DataObject, epoch: int) -> None:
        store, rank = data.draw(st.sampled_from(self.stores)), data.draw(st.integers(0, self.nranks - 1))
        self.refuse_all(store, StaleEpoch, rank, epoch, store.step)

    @rule(data=st.data(), offset=st.sampled_from([-1, 1, 7]))
    def another_step(self, data: st.DataObject, offset: int) -> None:
        store, rank = data.draw(st.sampled_from(self.stores)), data.draw(st.integers(0, self.nranks - 1))
        self.refuse_all(store, ProtocolError, rank, EPOCH, store.step + offset)

    def refuse_all(self, store: StepState, kind: type[GradSyncError], rank: int, epoch: int, step: int) -> None:
        with refused(store, kind):
            store.push(rank, epoch, step, 0, store.shard.start, one)
        with refused(store, kind):
            store.commit(rank, epoch, step, Ending(rate_of(store.step)))
        with refused(store, kind):
            store.replace(rank, epoch, step, store.shard.start, one)

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def wrong_elements(self, data: st.DataObject) -> None:
        server, rank, bucket = data.draw(st.sampled_from(self.pending()))
        store, part = self.stores[server], self.part(server, bucket)
        at = part.start + self.sent[server][rank][bucket]
        beyond = np.ones(part.stop - at + 1, np.float32)
        with refused(store, ProtocolError):
            store.push(rank, EPOCH, store.step, bucket, at, beyond)
        with refused(store, ProtocolError):
            store.push(rank, EPOCH, store.step, bucket, at + 1, one)
        with refused(store, ProtocolError):
            store.push(rank, EPOCH, store.step, bucket, at - 1, one)
        with refused(store, ProtocolError):
            store.push(rank, EPOCH, store.step, len(self.buckets), at, one)

    @precondition(lambda self: self.open_ranks())
    @rule(data=st.data())
    def wrong_parameters(self, data: st.DataObject) -> None:
        server, rank = data.draw(st.sampled_from(self.open_ranks()))
        store = self.stores[server]
        at = store.shard.start + self.replaced[server]
        with refused(store, ProtocolError):
            store.replace(rank, EPOCH, store.step, at + 1, one)
        with refused(store, ProtocolError):
            store.replace(rank, EPOCH, store.step, at, np.ones(store.shard.stop - at + 1, np.float32))
        if rank:
            with refused(store, ProtocolError):
                store.replace(rank, EPOCH, store.step, at, one[:0])

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def commit_with_pushes_missing(self, data: st.DataObject) -> None:
        server, rank, _ = data.draw(st.sampled_from(self.pending()))
        store = self.stores[server]
        with refused(store, ProtocolError):
            store.commit(rank, EPOCH, store.step, self.ending(store.step), mask_of(rank, store.step))

    @precondition(lambda self: any((s, 0) not in {(s, r) for s, r, _ in self.pending()} for s in self.replacing()))
    @rule(data=st.data())
    def commit_with_parameters_missing(self, data: st.DataObject) -> None:
        pushing = {(s, r) for s, r, _ in self.pending()}
        server = data.draw(st.sampled_from([s for s in self.replacing() if (s, 0) not in pushing]))
        store = self.stores[server]
        with refused(store, ProtocolError, text="rank 0 replaced"):
            store.commit(0, EPOCH, store.step, self.ending(store.step), mask_of(0, store.step))

    @precondition(lambda self: any(self.committed))
    @rule(data=st.data())
    def more_after_a_commit(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from([s for s, ranks in enumerate(self.committed) if ranks]))
        rank, store = data.draw(st.sampled_from(sorted(self.committed[server]))), self.stores[server]
        if rank not in self.ahead[server]:
            self.refuse_all(store, ProtocolError, rank, EPOCH, store.step)
            return
        with refused(store, ProtocolError):
            store.commit(rank, EPOCH, store.step, self.ending(store.step), mask_of(rank, store.step), ahead=True)
        with refused(store, ProtocolError):
            store.replace(rank, EPOCH, store.step, store.shard.start, one)

    @precondition(lambda self: self.open_ranks())
    @rule(data=st.data())
    def commit_ahead(self, data: st.DataObject) -> None:
        server, rank = data.draw(st.sampled_from(self.open_ranks()))
        store = self.stores[server]
        ending = self.ending(store.step)
        if ending.update and not ending.again and not ending.replaced:
            self.commit(server, rank, ahead=True)
        else:
            with refused(store, ProtocolError):
                store.commit(rank, EPOCH, store.step, ending, mask_of(rank, store.step), ahead=True)

    @precondition(lambda self: any(self.committed[server] for server, _ in self.ready()))
    @rule(data=st.data(), what=st.sampled_from(["learning_rate", "update", "replaced", "again", "used"]))
    def disagree(self, data: st.DataObject, what: str) -> None:
        """With those who have committed, on any part of how the step ends."""
        pairs = [(server, rank) for server, rank in self.ready() if self.committed[server]]
        server, rank = data.draw(st.sampled_from(pairs))
        store, mask = self.stores[server], mask_of(rank, self.stores[server].step)
        ending = self.ending(store.step)
        if what == "used":
            with refused(store, ProtocolError):
                store.commit(rank, EPOCH, store.step, ending, mask + b"\1")
            return
        other = {
            "learning_rate": dataclasses.replace(ending, learning_rate=ending.learning_rate + 0.5),
            "update": dataclasses.replace(ending, update=not ending.update),
            "replaced": dataclasses.replace(ending, replaced=not ending.replaced),
            "again": dataclasses.replace(ending, again=not ending.again),
        }[what]
        impossible = what == "again" or (what == "update" and ending.again) or (what == "replaced" and rank == 0)
        with refused(store, LayoutMismatch, *[ProtocolError] * impossible):
            store.commit(rank, EPOCH, store.step, other, mask)

    @invariant()
    def every_server_has_its_slice_of_the_model(self) -> None:
        for server, store in enumerate(getattr(self, "stores", [])):
            expected = self.model(store.step).copy()
            for bucket, done in enumerate(self.updated[server]):
                if done:
                    new = slice(start := self.part(server, bucket).start, start + done)
                    expected[new] = self.model(store.step + 1)[new]
            assert store.parameters.tobytes() == expected[store.shard.start : store.shard.stop].tobytes()
            assert store.waiting_for() == [r for r in range(self.nranks) if not self.finished(server, r)]
            assert not store.padded_parameters[store.shard.length :].any()
            assert not store.contributions.padded_gradients[store.shard.length :].any()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=examples(20, 200), stateful_step_count=60, deadline=None)
