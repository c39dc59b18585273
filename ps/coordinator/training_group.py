"""The trainers of one server: hears their messages in any order, drives the store, and answers all of them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from common.errors import (
    GradSyncError,
    LayoutMismatch,
    PeerLost,
    PeerStalled,
    ProtocolError,
    StaleEpoch,
    error_from_name,
)
from common.network.gradsync_pb2 import (
    Chunk,
    Configure,
    Failure,
    Gather,
    Goodbye,
    Place,
    Plane,
    Pull,
    Register,
    Served,
    ServerMessage,
    StatePiece,
    StateRequest,
    StatusReply,
    TrainerMessage,
)
from common.network.rendezvous import GRACE
from common.sync.trace import NO_TRACE, Recorder, Trace
from common.system.handover import Link
from common.system.memory import Segment, SegmentPool, Unreachable, aligned_empty
from common.system.semaphore import Semaphore
from common.tensors.arena import FloatArray, Layout
from common.tensors.buckets import Bucket
from ps.coordinator.pace import Pace
from ps.planes.frames import Outgoing, frames
from ps.planes.mailboxes import Mailbox, Mailboxes, mailboxes_bytes
from ps.planes.send_queue import SendQueue
from ps.planes.shared_memory import Desk, OthersMemory, memory_of, place_of
from ps.planes.wire import data_of, layout_of, optimizer_of, pieces, state_of, state_pieces
from ps.store.ending import Ending
from ps.store.make import make_store
from ps.store.modes import SYNC, parse_mode
from ps.store.shards import plan_shards
from ps.store.store import Progress, Result, Store

__all__ = ["ServerQueue", "TrainingGroup", "tell"]

WATCH_S = 0.1  # how often the watchdog looks
SIGN_S = GRACE / 2  # trainers that wait hear so often that others still send
ServerQueue = SendQueue[ServerMessage | Outgoing]


def tell(queue: ServerQueue, error: GradSyncError) -> None:
    """The last message of a session that failed."""
    queue.put([ServerMessage(failure=Failure(kind=type(error).__name__, message=str(error)))])
    queue.end()


class TrainingGroup:
    """Thread-safe. The first error fails the group: every trainer is told, `wait` raises it, nothing else happens.

    Args:
        shard: (index, count) of this server.
        timeout: how long, in seconds, trainers may wait for one that does not take part.
        pool: makes the arrays that trainers of this host and user read; without one none does.
        helper: a thread that shares the work on large arrays.
    """

    def __init__(
        self,
        nranks: int,
        *,
        shard: tuple[int, int] = (0, 1),
        timeout: float = 30.0,
        epoch: int = 0,
        pool: SegmentPool | None = None,
        helper: ThreadPoolExecutor | None = None,
    ) -> None:
        self.nranks, self.shard, self.timeout, self.epoch = nranks, shard, timeout, epoch
        self._pool, self._helper = pool, helper
        self._desk = Desk() if pool is not None else None
        self._others_memory = self._desk or OthersMemory()
        self._links: dict[int, Link] = {}  # to the trainers that share memory with this server
        self._planes: dict[int, Plane] = {}  # how data travel to and from each trainer
        self._parameters_at: tuple[Segment, int] | None = None  # rank 0's, and where in it, in bytes
        self._average_at: Place | None = None  # in our memory
        self._landings: dict[int, FloatArray] = {}  # trainers' memory, where what is served to them is written
        self._mailboxes: Mailboxes | None = None
        self._open: dict[int, tuple[Mailbox, Mailbox]] = {}  # from and to the trainers that use them
        self.steps = 0
        self._mode = SYNC
        self._lock = threading.Condition()
        self._queues: dict[int, ServerQueue] = {}
        self._registered: set[int] = set()
        self._first: Register | None = None
        self._store: Store | None = None
        self._begun = False  # all have registered, and rank 0's parameters are served
        self._configuration: Configure | None = None  # of a user's optimizer
        self._configured: set[int] = set()
        self._loading: list[StatePiece] = []  # pieces of an optimizer state that rank 0 is sending
        self._filled = 0  # elements of rank 0's parameters that have arrived
        self._gathers = 0
        self._gathering: dict[int, bytearray] = {}  # what each trainer has sent of the gather under way
        self._gathered: set[int] = set()  # whose part is complete
        self._gone: set[int] = set()
        self._pace = Pace(nranks)
        self.trace: Trace = NO_TRACE
        self._failure: GradSyncError | None = None
        self._stop: GradSyncError | None = None  # to fail with when the step is complete
        self._over = False
        self._waiting_since: float | None = None
        self._sign_at = time.monotonic()
        self._watchdog = threading.Thread(target=self._watch, name="gradsync-watchdog", daemon=True)
        self._watchdog.start()

    def enter(self, message: TrainerMessage, queue: ServerQueue) -> int:
        """A trainer's first message; returns its rank."""
        hello = message.hello
        with self._lock:
            if message.WhichOneof("kind") != "hello":
                raise ProtocolError("a trainer did not say hello before it sent anything else")
            self._check_epoch(hello.epoch, hello.rank)
            if hello.rank in self._queues or hello.rank >= self.nranks:
                raise ProtocolError(f"rank {hello.rank} came twice or is outside 0..{self.nranks - 1}")
            self._queues[hello.rank] = queue
            if len(self._queues) == self.nranks:
                self._nobody_waits()
            if self._failure:
                tell(queue, self._failure)
        return hello.rank

    @property
    def desk(self) -> str:
        """Where trainers of this host and user hand in their memory; "": nowhere."""
        return self._desk.name if self._desk else ""

    def expect(self) -> None:
        """All trainers have joined, and are about to enter."""
        with self._lock:
            if len(self._queues) < self.nranks:
                self._someone_waits()

    def handle(self, rank: int, message: TrainerMessage, words: FloatArray | None = None) -> None:
        """Any later message of a trainer, perhaps with the words of its chunk apart. Raises what `fail` is then to be
        called with."""
        with self._lock:
            self._take_notes(rank)  # it left them before it sent this
            self._handle(rank, message, words)

    def _handle(self, rank: int, message: TrainerMessage, words: FloatArray | None = None) -> None:
        kind = message.WhichOneof("kind")
        if self._failure:
            return
        if kind == "register" and rank not in self._registered:
            self._register(rank, message.register)
        elif kind == "parameters":
            self._take_parameters(rank, message.parameters, words)
        elif kind == "gradients":
            self._take_gradients(rank, message.gradients, words)
        elif kind == "gradients_at":
            self._read_in_place(rank, message.gradients_at)
        elif kind == "commit":
            self._commit(rank, message)
        elif kind == "pull":
            self._pull(rank, message.pull)
        elif kind == "gather":
            self._gather(rank, message.gather)
        elif kind == "configure":
            self._configure(rank, message.configure)
        elif kind == "state":
            self._load_state(rank, message.state)
        elif kind == "state_request":
            self._send_state(rank, message.state_request)
        elif kind == "goodbye":
            self._leave(rank, message.goodbye)
        else:
            raise ProtocolError(f"rank {rank} sent an unexpected {kind} message at step {self.steps}")

    def _take_notes(self, rank: int) -> None:
        if rank in self._open:
            while (note := self._open[rank][0].take()) is not None:
                self._handle(rank, TrainerMessage.FromString(note))

    def lost(self, rank: int) -> None:
        """A trainer's stream ended."""
        with self._lock:
            if rank not in self._gone:
                at = self._store.steps[rank] if self._store else self.steps
                self._fail(PeerLost(f"rank {rank} died at step {at}: its connection closed without a goodbye"))

    def fail(self, error: GradSyncError) -> None:
        with self._lock:
            self._fail(error)

    def status(self) -> StatusReply:
        """How the training goes."""
        with self._lock:
            training = "training" if self._begun else "waiting for trainers"
            state = str(self._failure) if self._failure else "complete" if self._over else training
            index, count = self.shard
            reply = StatusReply(shard=index, shards=count, nranks=self.nranks, steps=self.steps, state=state)
            reply.parameters = self._store.shard.length if self._store else 0
            for rank in sorted(self._queues):
                plane = self._planes.get(rank)
                reply.trainers.add(
                    rank=rank,
                    data_plane="" if plane is None else plane.kind,
                    steps=self._pace.steps[rank],
                    times_last=self._pace.times_last[rank],
                    lag=self._pace.lag(rank),
                    bytes_pushed=self._pace.pushed[rank],
                    bytes_served=self._pace.served[rank],
                    left=rank in self._gone,
                    waiting=self._store is not None and rank in self._store.waiting(),
                )
            return reply

    def straggler(self) -> str:
        """Which trainer the others waited for most often, in words; "" if there is no telling."""
        with self._lock:
            return self._pace.straggler()

    @property
    def failure(self) -> GradSyncError | None:
        """What it failed with, if it did."""
        with self._lock:
            return self._failure

    def stop_after_step(self, error: GradSyncError) -> None:
        """Fail with this error as soon as no step is half committed; that one may take `timeout`."""
        with self._lock:
            self._stop = error
            if self._store and self._store.within_step():
                self._someone_waits()
            else:
                self._fail(error)

    def close(self) -> None:
        """Give all memory back, when nobody is heard any longer, whoever still refers to this group."""
        with self._lock:
            self._store = None
        self._others_memory.close()

    def wait(self) -> None:
        """Block until training is over; raises the group's failure, if it failed. Trainings have no time limit."""
        with self._lock:
            self._lock.wait_for(lambda: self._over)
            if self._failure:
                raise self._failure

    def _register(self, rank: int, register: Register) -> None:
        self._check_epoch(register.epoch, rank)
        self._compare(register)
        if register.trace and not self.trace.active:
            self.trace = Recorder("server", self.shard[0])
            if self._store:
                self._store.trace = self.trace
        if self._store is None:
            self._mode = parse_mode(register.mode or str(SYNC))
            if self._mode != SYNC and not register.HasField("optimizer"):
                raise ProtocolError(f"rank {rank} registered for mode {self._mode} without an optimizer")
            self._store = self._make_store(*layout_of(register))
        self._planes[rank] = self._plane_for(rank, register)
        self._registered.add(rank)
        self._someone_waits()
        self._begin_if_ready()
        if self._gone and self._waiting_since is not None:
            self._finished_early()

    def _plane_for(self, rank: int, register: Register) -> Plane:
        """Whether data need to be sent between this server and a trainer."""
        if not register.HasField("probe"):
            return Plane(kind="grpc", why_not="the trainer does not offer its memory")
        if self._pool is None:
            return Plane(kind="grpc", why_not="the server does not offer its memory")
        try:
            self._others_memory.segment(register.probe)
            link = self._others_memory.giver_of(register.probe)
            store = self._running(rank)
            if self._mode != SYNC:
                whole = self._others_memory.array(register.parameters, register.length)
                self._landings[rank] = whole[store.shard.start : store.shard.stop]
            elif rank == 0 and register.HasField("parameters"):
                whole = self._others_memory.array(register.parameters, register.length)
                store.keep_parameters_in(whole[store.shard.start : store.shard.stop])
                mine = self._others_memory.segment(register.parameters.memory)  # rank 0 may leave before others map it
                self._parameters_at = mine, register.parameters.offset + 4 * store.shard.start
        except Unreachable as exc:
            return Plane(kind="grpc", why_not=str(exc))
        self._links[rank] = link
        if self._mailboxes is None:  # which carry what is small and belongs to a step
            self._mailboxes = Mailboxes(self._pool.create(mailboxes_bytes(self.nranks)), self.nranks, create=True)
        return Plane(kind="shm", mailboxes=memory_of(self._mailboxes.segment))

    def _compare(self, register: Register) -> None:
        """All trainers must be about to do the same."""
        if self._first is None:
            self._first = register
            return
        (mine, my_buckets), (theirs, their_buckets) = layout_of(self._first), layout_of(register)
        difference = mine.difference(theirs)
        if difference is None and my_buckets != their_buckets:
            difference = f"bucket plan of {len(my_buckets)} against one of {len(their_buckets)} buckets"
        if difference is None and self._first.optimizer != register.optimizer:
            difference = f"{optimizer_of(self._first)} against {optimizer_of(register)}"
        if difference is None and self._first.mode != register.mode:
            difference = f"--mode {self._first.mode or SYNC} against {register.mode or SYNC}"
        if difference:
            raise LayoutMismatch(
                f"rank {self._first.rank} and rank {register.rank} disagree: {difference}; "
                "give all trainers the same model and flags"
            )

    def _begin_if_ready(self) -> None:
        """Once rank 0's parameters are complete and all have registered, serve them to everyone."""
        store = self._store
        if store is None or len(self._registered) < self.nranks or self._filled < store.shard.length:
            return
        assert self._first is not None
        results = store.begin(optimizer_of(self._first))
        self._begun = True
        parameters_at = self._hand_out(store)
        for rank, queue in self._queues.items():
            plane = self._planes[rank]
            if plane.kind == "shm" and self._mode == SYNC:
                plane.parameters.CopyFrom(parameters_at)
                plane.in_place = self._parameters_at is not None
            queue.put([ServerMessage(plane=plane)])
        for result in results:
            self._deliver(result)
        self._nobody_waits()
        self._open_mailboxes()

    def _hand_out(self, store: Store) -> Place:
        """Let the trainers that share memory have the mailboxes' and, in sync mode, the parameters'; where in it these
        lie. Nobody else comes."""
        if self._desk:
            self._desk.shut()
        if self._mailboxes:
            self._give(self._mailboxes.segment)
        if self._mode != SYNC or self._pool is None:
            return Place()
        if self._parameters_at is None:
            return self._place(store.parameters)
        segment, offset = self._parameters_at
        self._give(segment)
        return Place(memory=memory_of(segment), offset=offset)

    def _give(self, segment: Segment) -> None:
        for rank, link in self._links.items():
            try:
                link.give(segment)
            except Unreachable as exc:
                raise PeerLost(f"rank {rank} has left at step {self.steps}: {exc}") from exc

    def _place(self, array: FloatArray) -> Place:
        """Where the trainers that share memory, which are handed it now, find an array of this server."""
        return place_of(array, self._pool, self._give) if self._pool else Place()

    def _open_mailboxes(self) -> None:
        """All trainers know now where the mailboxes are."""
        if self._mailboxes is None:
            return
        for rank, plane in self._planes.items():
            if plane.kind == "shm":
                self._open[rank] = self._mailboxes.to_server[rank], self._mailboxes.to_trainer[rank]
        threading.Thread(
            target=self._listen, args=(self._mailboxes.bell,), name="gradsync-mailboxes", daemon=True
        ).start()

    def _listen(self, bell: Semaphore) -> None:
        """One thread hears all mailboxes; it sleeps until somebody rings."""
        try:
            while not self._over:
                if bell.sleep(WATCH_S):
                    with self._lock:
                        for rank in self._open:
                            self._take_notes(rank)
        except GradSyncError as exc:
            self.fail(exc)
        except Exception as exc:
            self.fail(GradSyncError(f"the server failed: {type(exc).__name__}: {exc}"))
            raise

    def _answer(self, rank: int, message: ServerMessage) -> None:
        """Tell a trainer what it waits for at the end of a step, after all else that it is told."""
        if rank not in self._open or not self._open[rank][1].put(message.SerializeToString()):
            self._queues[rank].put([message])

    def _make_store(self, layout: Layout, buckets: tuple[Bucket, ...]) -> Store:
        index, count = self.shard
        store = make_store(
            self._mode,
            plan_shards(layout.length, count)[index],
            buckets,
            self.nranks,
            epoch=self.epoch,
            empty=self._pool.empty if self._pool else aligned_empty,
            helper=self._helper,
        )
        store.trace = self.trace
        return store

    def _read_in_place(self, rank: int, place: Place) -> None:
        """A trainer tells where its gradients lie, all of the arena's."""
        store = self._running(rank)
        assert self._first is not None
        if rank not in self._planes or self._planes[rank].why_not:
            raise ProtocolError(
                f"rank {rank} offered its gradients at step {self.steps}, but its memory is out of reach"
            )
        try:
            whole = self._others_memory.array(place, self._first.length)
        except Unreachable as exc:
            raise ProtocolError(f"the gradients of rank {rank} cannot be read at step {self.steps}: {exc}") from exc
        store.read_in_place(rank, whole[store.shard.start : store.shard.stop])

    def _take_parameters(self, rank: int, chunk: Chunk, words: FloatArray | None) -> None:
        store = self._running(rank)
        self._check_epoch(chunk.epoch, rank)
        data = data_of(chunk) if words is None else words
        if self._configuration is not None and store.program:
            store.program.replace(rank, chunk.epoch, chunk.step, chunk.start, data)
            self._still_alive()
            return
        expected = store.shard.start + self._filled
        if rank != 0 or not data.size or chunk.start != expected or self._filled + data.size > store.shard.length:
            raise ProtocolError(f"rank {rank} sent parameters from word {chunk.start}, expected {expected} from rank 0")
        store.parameters[self._filled : self._filled + data.size] = data
        self._filled += data.size
        self._still_alive()
        self._begin_if_ready()

    def _take_gradients(self, rank: int, chunk: Chunk, words: FloatArray | None) -> None:
        store = self._running(rank)
        data = words if words is not None else chunk.size or data_of(chunk)
        self._pace.pushed[rank] += 4 * (data if isinstance(data, int) else data.size)
        progress = store.push(rank, chunk.epoch, chunk.step, chunk.bucket, chunk.start, data)
        self._still_alive()
        self._go_on(rank, store, progress)

    def _commit(self, rank: int, message: TrainerMessage) -> None:
        commit, store = message.commit, self._running(rank)
        if commit.update and self._first and not self._first.HasField("optimizer") and rank not in self._configured:
            raise ProtocolError(f"rank {rank} asked for an update at step {commit.step} without naming an optimizer")
        ending = Ending(commit.learning_rate, commit.update, commit.replaced, commit.again)
        progress = store.commit(rank, commit.epoch, commit.step, ending, commit.used, ahead=commit.ahead)
        self._go_on(rank, store, progress)
        for each in self._gathered:  # which takes as long as others train; see Gather
            at_work = Gather(epoch=self.epoch, sequence=self._gathers, size=1)
            self._queues[each].put([ServerMessage(gathered=at_work)])

    def _go_on(self, rank: int, store: Store, progress: Progress) -> None:
        """A trainer has pushed or committed: what there is with it is handed out, and the others wait or not."""
        if progress.finished:
            self._pace.committed(rank, time.monotonic())
        self.steps = min(store.steps)
        for result in progress.results:
            self._deliver(result)
        if progress.finished:
            self._waiting_has_changed()
        if progress.finished and self._stop and not store.within_step():
            self._fail(self._stop)
        if self._gone and store.misses(self._gone):
            self._finished_early()

    def _waiting_has_changed(self) -> None:
        """As of now somebody waits for others, or nobody does."""
        if self._gathered or (self._store and self._store.waiting()):
            self._someone_waits()
            self._still_alive()
        else:
            self._nobody_waits()

    def _deliver(self, result: Result) -> None:
        """Send what trainers wait for to those who cannot read it by themselves, and tell all that it is there.

        Lasting words are read when they are sent; others are copied, or written into the trainer's memory, at once,
        for the next update may come before they have been read."""
        served = Served(epoch=self.epoch, step=result.step)
        if result.averages and result.complete:
            served.gradients.CopyFrom(self._place_of_average(result))
        for rank in result.ranks:
            if rank in self._landings:
                self._landings[rank][...] = result.words
            elif self._planes[rank].why_not:
                self._pace.served[rank] += result.words.nbytes
                words = result.words if result.lasting else result.words.copy()
                label = {"epoch": self.epoch, "step": result.step}
                messages = frames(ServerMessage, "parameters", words, first=result.start, **label)
                self._queues[rank].put(messages)
            if result.complete:
                self._answer(rank, ServerMessage(served=served))

    def _place_of_average(self, result: Result) -> Place:
        """Where trainers of this host find it; made with the first step that ends so."""
        if self._average_at is None:
            self._average_at = self._place(result.words)
        return self._average_at

    def _pull(self, rank: int, pull: Pull) -> None:
        self._deliver(self._running(rank).pull(rank, pull.epoch, pull.step))

    def _configure(self, rank: int, configure: Configure) -> None:
        """Trainers name the optimizer of a user's program before their first update."""
        store = self._running(rank)
        self._check_epoch(configure.epoch, rank)
        optimizer = optimizer_of(configure)
        assert self._first is not None
        layout, _ = layout_of(self._first)
        program = None if self._first.HasField("optimizer") else store.program
        if optimizer is None or program is None or len(configure.names) != len(layout.slots):
            raise ProtocolError(f"rank {rank} sent a wrong configuration at step {self.steps}")
        if self._configuration is None:
            self._configuration = configure
            program.configure(optimizer, layout, list(configure.names))
        mine = self._configuration
        if (mine.optimizer, list(mine.names)) != (configure.optimizer, list(configure.names)):
            theirs = optimizer_of(mine) if mine.optimizer != configure.optimizer else "other parameter names"
            raise LayoutMismatch(
                f"rank {mine.rank} and rank {rank} disagree on the optimizer: {theirs} against {optimizer}; "
                "make the same optimizer on all ranks"
            )
        self._configured.add(rank)

    def _load_state(self, rank: int, piece: StatePiece) -> None:
        self._check_epoch(piece.epoch, rank)
        program = self._running(rank).program
        if rank != 0 or program is None or self._configuration is None:
            raise ProtocolError(f"rank {rank} sent optimizer state at step {self.steps}, expected it from rank 0 only")
        self._loading.append(piece)
        self._still_alive()
        if piece.last:
            state, self._loading = state_of(self._loading), []
            program.load(state)

    def _send_state(self, rank: int, request: StateRequest) -> None:
        self._check_epoch(request.epoch, rank)
        program = self._running(rank).program
        state = program.state() if program else None
        if state is None:
            raise ProtocolError(
                f"rank {rank} asked for optimizer state at step {self.steps}, but there is no optimizer"
            )
        answer = state_pieces(state, epoch=self.epoch)
        self._queues[rank].put(ServerMessage(state=piece) for piece in answer)

    def _gather(self, rank: int, gather: Gather) -> None:
        self._check_epoch(gather.epoch, rank)
        begun = self._gathering.setdefault(rank, bytearray())
        if gather.sequence != self._gathers or rank in self._gathered:
            raise ProtocolError(f"rank {rank} called gather number {gather.sequence} out of turn")
        begun += gather.data
        self._still_alive()
        if len(begun) > gather.size:
            raise ProtocolError(f"rank {rank} sent {len(begun)} bytes of a gather of {gather.size}")
        if len(begun) < gather.size:
            return
        self._gathered.add(rank)
        self._someone_waits()
        if len(self._gathered) == self.nranks:
            data = b"".join(self._gathering[r] for r in range(self.nranks))
            for queue in self._queues.values():
                answer = pieces(data, epoch=self.epoch, sequence=gather.sequence)
                queue.put(ServerMessage(gathered=piece) for piece in answer)
            self._gathering.clear()
            self._gathered.clear()
            self._gathers += 1
            self._nobody_waits()
        elif self._gone:
            self._finished_early()

    def _leave(self, rank: int, goodbye: Goodbye) -> None:
        self._gone.add(rank)
        if goodbye.HasField("because"):
            self._fail(error_from_name(goodbye.because.kind, goodbye.because.message))
            return
        if goodbye.reason:
            self._fail(PeerLost(f"rank {rank} left at step {self.steps} with {goodbye.reason}"))
            return
        self._queues[rank].end()
        if len(self._gone) == self.nranks:
            self._end()
        elif self._waiting_since is not None:
            self._finished_early()

    def _finished_early(self) -> None:
        left = ", ".join(str(rank) for rank in sorted(self._gone))
        self._fail(PeerLost(f"rank {left} finished at step {self.steps} while others go on; give all the same --steps"))

    def _running(self, rank: int) -> Store:
        if self._store is None:
            raise ProtocolError(f"rank {rank} sent data before registering")
        return self._store

    def _check_epoch(self, epoch: int, rank: int) -> None:
        if epoch != self.epoch:
            raise StaleEpoch(f"rank {rank} sent a message of epoch {epoch}, this is epoch {self.epoch}")

    def _fail(self, error: GradSyncError) -> None:
        if self._over:
            return
        self._failure = error
        for queue in self._queues.values():
            tell(queue, error)
        self._end()

    def _end(self) -> None:
        self._over = True
        self._lock.notify_all()
        if self._mailboxes:
            self._mailboxes.bell.post()

    def _someone_waits(self) -> None:
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()

    def _still_alive(self) -> None:
        """Data have come, so the time that others may wait counts from now: here, and at the trainers, who would else
        take the server for frozen before it can name who is."""
        now = time.monotonic()
        if self._waiting_since is not None:
            self._waiting_since = now
        if now - self._sign_at > SIGN_S:
            self._sign_at = now
            for rank in self._queues.keys() - self._gone:
                self._queues[rank].put([ServerMessage()])

    def _nobody_waits(self) -> None:
        self._waiting_since = None

    def _missing(self) -> list[int]:
        """Whom the others wait for."""
        if len(self._queues) < self.nranks:
            return [rank for rank in range(self.nranks) if rank not in self._queues]
        if self._gathered:
            return [rank for rank in range(self.nranks) if rank not in self._gathered]
        if self._store is None or len(self._registered) < self.nranks:
            return [rank for rank in range(self.nranks) if rank not in self._registered]
        return self._store.waiting_for() if self._filled == self._store.shard.length else [0]

    def _watch(self) -> None:
        with self._lock:
            while not self._over:
                self._lock.wait(WATCH_S)
                since = self._waiting_since
                if since is not None and time.monotonic() - since > self.timeout:
                    ranks = ", ".join(str(rank) for rank in self._missing())
                    self._fail(
                        PeerStalled(
                            f"rank {ranks} did not take part in step {self.steps} for {self.timeout:g} s; "
                            "it is frozen or slower than --timeout allows"
                        )
                    )
