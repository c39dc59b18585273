from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("version", "rank", "nranks", "epoch", "backend", "address", "note", "timeout", "model", "seat")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NRANKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    version: str
    rank: int
    nranks: int
    epoch: int
    backend: str
    address: str
    note: bytes
    timeout: float
    model: int
    seat: bytes
    def __init__(self, version: _Optional[str] = ..., rank: _Optional[int] = ..., nranks: _Optional[int] = ..., epoch: _Optional[int] = ..., backend: _Optional[str] = ..., address: _Optional[str] = ..., note: _Optional[bytes] = ..., timeout: _Optional[float] = ..., model: _Optional[int] = ..., seat: _Optional[bytes] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("addresses", "token", "shard", "shards", "notes", "desk", "data_port")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    DESK_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    token: bytes
    shard: int
    shards: int
    notes: _containers.RepeatedScalarFieldContainer[bytes]
    desk: str
    data_port: int
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., token: _Optional[bytes] = ..., shard: _Optional[int] = ..., shards: _Optional[int] = ..., notes: _Optional[_Iterable[bytes]] = ..., desk: _Optional[str] = ..., data_port: _Optional[int] = ...) -> None: ...

class TrainerMessage(_message.Message):
    __slots__ = ("hello", "register", "parameters", "gradients", "commit", "gather", "goodbye", "configure", "state", "state_request", "gradients_at", "pull", "alive", "parcel", "taken", "awaiting", "keep")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    GATHER_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_AT_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    PARCEL_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    AWAITING_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    register: Register
    parameters: Chunk
    gradients: Chunk
    commit: Commit
    gather: Gather
    goodbye: Goodbye
    configure: Configure
    state: StatePiece
    state_request: StateRequest
    gradients_at: Place
    pull: Pull
    alive: Alive
    parcel: Parcel
    taken: Taken
    awaiting: Awaiting
    keep: Keep
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., register: _Optional[_Union[Register, _Mapping]] = ..., parameters: _Optional[_Union[Chunk, _Mapping]] = ..., gradients: _Optional[_Union[Chunk, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., gather: _Optional[_Union[Gather, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., configure: _Optional[_Union[Configure, _Mapping]] = ..., state: _Optional[_Union[StatePiece, _Mapping]] = ..., state_request: _Optional[_Union[StateRequest, _Mapping]] = ..., gradients_at: _Optional[_Union[Place, _Mapping]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., parcel: _Optional[_Union[Parcel, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ..., awaiting: _Optional[_Union[Awaiting, _Mapping]] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("parameters", "served", "gathered", "failure", "state", "plane", "alive", "parcel", "taken")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    GATHERED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    PARCEL_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    parameters: Chunk
    served: Served
    gathered: Gather
    failure: Failure
    state: StatePiece
    plane: Plane
    alive: Alive
    parcel: Parcel
    taken: Taken
    def __init__(self, parameters: _Optional[_Union[Chunk, _Mapping]] = ..., served: _Optional[_Union[Served, _Mapping]] = ..., gathered: _Optional[_Union[Gather, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., state: _Optional[_Union[StatePiece, _Mapping]] = ..., plane: _Optional[_Union[Plane, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., parcel: _Optional[_Union[Parcel, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ("say",)
    SAY_FIELD_NUMBER: _ClassVar[int]
    say: str
    def __init__(self, say: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("epoch", "rank", "token", "model")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    token: bytes
    model: int
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., token: _Optional[bytes] = ..., model: _Optional[int] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("epoch", "rank", "slots", "length", "buckets", "optimizer", "probe", "parameters", "mode", "trace", "connected", "commit_every", "first_step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_EVERY_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    slots: _containers.RepeatedCompositeFieldContainer[Slot]
    length: int
    buckets: _containers.RepeatedCompositeFieldContainer[Bucket]
    optimizer: Optimizer
    probe: Memory
    parameters: Place
    mode: str
    trace: bool
    connected: bool
    commit_every: int
    first_step: int
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[Slot, _Mapping]]] = ..., length: _Optional[int] = ..., buckets: _Optional[_Iterable[_Union[Bucket, _Mapping]]] = ..., optimizer: _Optional[_Union[Optimizer, _Mapping]] = ..., probe: _Optional[_Union[Memory, _Mapping]] = ..., parameters: _Optional[_Union[Place, _Mapping]] = ..., mode: _Optional[str] = ..., trace: bool = ..., connected: bool = ..., commit_every: _Optional[int] = ..., first_step: _Optional[int] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("epoch", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("size", "key")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    size: int
    key: bytes
    def __init__(self, size: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("memory", "offset")
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    memory: Memory
    offset: int
    def __init__(self, memory: _Optional[_Union[Memory, _Mapping]] = ..., offset: _Optional[int] = ...) -> None: ...

class Plane(_message.Message):
    __slots__ = ("kind", "why_not", "parameters", "in_place", "mailboxes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    MAILBOXES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    why_not: str
    parameters: Place
    in_place: bool
    mailboxes: Memory
    def __init__(self, kind: _Optional[str] = ..., why_not: _Optional[str] = ..., parameters: _Optional[_Union[Place, _Mapping]] = ..., in_place: bool = ..., mailboxes: _Optional[_Union[Memory, _Mapping]] = ...) -> None: ...

class Slot(_message.Message):
    __slots__ = ("name", "shape", "start", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    start: int
    dtype: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("start", "stop", "dtype")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    dtype: str
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class Optimizer(_message.Message):
    __slots__ = ("name", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings: _containers.ScalarMap[str, float]
    def __init__(self, name: _Optional[str] = ..., settings: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("epoch", "step", "bucket", "start", "data", "size")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    bucket: int
    start: int
    data: bytes
    size: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., bucket: _Optional[int] = ..., start: _Optional[int] = ..., data: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("epoch", "step", "learning_rate", "update", "again", "replaced", "used", "ahead")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    learning_rate: float
    update: bool
    again: bool
    replaced: bool
    used: bytes
    ahead: bool
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., learning_rate: _Optional[float] = ..., update: bool = ..., again: bool = ..., replaced: bool = ..., used: _Optional[bytes] = ..., ahead: bool = ...) -> None: ...

class Configure(_message.Message):
    __slots__ = ("epoch", "rank", "optimizer", "names")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    optimizer: Optimizer
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., optimizer: _Optional[_Union[Optimizer, _Mapping]] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("epoch", "updates", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    updates: int
    step: int
    def __init__(self, epoch: _Optional[int] = ..., updates: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("epoch", "number")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class StatePiece(_message.Message):
    __slots__ = ("epoch", "key", "slot", "dtype", "size", "first", "data", "last", "number", "request")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    key: str
    slot: int
    dtype: str
    size: int
    first: int
    data: bytes
    last: bool
    number: int
    request: int
    def __init__(self, epoch: _Optional[int] = ..., key: _Optional[str] = ..., slot: _Optional[int] = ..., dtype: _Optional[str] = ..., size: _Optional[int] = ..., first: _Optional[int] = ..., data: _Optional[bytes] = ..., last: bool = ..., number: _Optional[int] = ..., request: _Optional[int] = ...) -> None: ...

class Served(_message.Message):
    __slots__ = ("epoch", "step", "gradients")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    gradients: Place
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., gradients: _Optional[_Union[Place, _Mapping]] = ...) -> None: ...

class Gather(_message.Message):
    __slots__ = ("epoch", "sequence", "size", "data")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    size: int
    data: bytes
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., size: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Parcel(_message.Message):
    __slots__ = ("epoch", "rank", "channel", "size", "data", "number")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    channel: int
    size: int
    data: bytes
    number: int
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., channel: _Optional[int] = ..., size: _Optional[int] = ..., data: _Optional[bytes] = ..., number: _Optional[int] = ...) -> None: ...

class Taken(_message.Message):
    __slots__ = ("epoch", "rank", "bytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    bytes: int
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Awaiting(_message.Message):
    __slots__ = ("epoch", "rank", "parcels", "room", "over")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PARCELS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    parcels: int
    room: bool
    over: bool
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., parcels: _Optional[int] = ..., room: bool = ..., over: bool = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("epoch", "reason", "because")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    reason: str
    because: Failure
    def __init__(self, epoch: _Optional[int] = ..., reason: _Optional[str] = ..., because: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "message", "served")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    served: int
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., served: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("shard", "shards", "nranks", "steps", "state", "parameters", "trainers", "models", "restarts")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    NRANKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    shard: int
    shards: int
    nranks: int
    steps: int
    state: str
    parameters: int
    trainers: _containers.RepeatedCompositeFieldContainer[TrainerStatus]
    models: int
    restarts: int
    def __init__(self, shard: _Optional[int] = ..., shards: _Optional[int] = ..., nranks: _Optional[int] = ..., steps: _Optional[int] = ..., state: _Optional[str] = ..., parameters: _Optional[int] = ..., trainers: _Optional[_Iterable[_Union[TrainerStatus, _Mapping]]] = ..., models: _Optional[int] = ..., restarts: _Optional[int] = ...) -> None: ...

class TrainerStatus(_message.Message):
    __slots__ = ("rank", "data_plane", "steps", "times_last", "lag", "bytes_pushed", "bytes_served", "left", "waiting")
    RANK_FIELD_NUMBER: _ClassVar[int]
    DATA_PLANE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TIMES_LAST_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    BYTES_PUSHED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SERVED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    rank: int
    data_plane: str
    steps: int
    times_last: int
    lag: float
    bytes_pushed: int
    bytes_served: int
    left: bool
    waiting: bool
    def __init__(self, rank: _Optional[int] = ..., data_plane: _Optional[str] = ..., steps: _Optional[int] = ..., times_last: _Optional[int] = ..., lag: _Optional[float] = ..., bytes_pushed: _Optional[int] = ..., bytes_served: _Optional[int] = ..., left: bool = ..., waiting: bool = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: bool
    def __init__(self, events: bool = ...) -> None: ...

class TraceReply(_message.Message):
    __slots__ = ("clock", "host", "data")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    clock: int
    host: str
    data: bytes
    def __init__(self, clock: _Optional[int] = ..., host: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...
