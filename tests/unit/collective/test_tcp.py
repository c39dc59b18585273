"""Data connections between ranks: damage on the way is noticed, and what is checked when nobody says."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import numpy as np
import pytest

import collective
from collective.call_tags import FORMAT, Tag
from collective.membership.liveness import Mesh
from collective.transports import tcp
from collective.transports.tcp import TcpTransport
from common.errors import PeerUnreachable, ProtocolError, RendezvousError, UsageError
from common.launch.ranks import abstract_address
from common.network import reach
from common.network.links import FRAME, checksum_of
from tests.support.groups import assert_same_bits, on_threads, outcomes_of, reduced, sample

TAG = Tag(epoch=0, step=12, bucket=3, phase=1, chunk=0, piece=0)
VALUES = np.arange(25_000, dtype=np.float32)
HEADER_BYTES = FRAME.size + FORMAT.size
CHECKSUM_AT = 8


@pytest.fixture
def wire():
    """Two ranks' transports, and the ends of what lies between them: from rank 0, and to rank 1."""
    with ExitStack() as opened:

        def pair():
            return [opened.enter_context(end) for end in socket.socketpair()]

        control, here, there = pair(), pair(), pair()
        for number, choice in ((0, "on"), (1, "on")):
            mesh = Mesh(number, {1 - number: control[number]}, timeout=5.0)
            transport = TcpTransport(mesh, {1 - number: (here[0], there[1])[number]}, checksum=choice)
            opened.callback(transport.close)
            control[number] = transport
        yield *control, here[1], there[0]


def carried(wire, damage):
    """What rank 1 receives of VALUES if byte number `damage` changes on the way; None: none does."""
    sender, receiver, out_of, into = wire
    sender.send(1, VALUES, TAG)
    data = bytearray()
    while len(data) < HEADER_BYTES + VALUES.nbytes:
        data += out_of.recv(1 << 20)
        sender.flush()
    if damage is not None:
        data[damage] ^= 0x10
    into.sendall(data)
    out = np.empty_like(VALUES)
    receiver.receive(0, out, TAG)
    return out


def test_what_is_sent_arrives(wire):
    assert_same_bits(carried(wire, None), VALUES)


@pytest.mark.parametrize("at", [CHECKSUM_AT, HEADER_BYTES, HEADER_BYTES + 50_001, HEADER_BYTES + VALUES.nbytes - 1])
def test_a_byte_damaged_on_the_way_is_an_error_that_names_rank_step_and_bucket(wire, at):
    with pytest.raises(ProtocolError) as caught:
        carried(wire, at)
    assert str(caught.value).startswith(
        "data from rank 0 was damaged on its way to rank 1 at step 12, bucket 3: checksum"
    )


@pytest.mark.parametrize("at", [0, 4, FRAME.size, HEADER_BYTES - 1])
def test_a_damaged_header_is_an_error_too(wire, at):
    with pytest.raises(ProtocolError, match=r"^rank 0 (sent|called|has)"):
        carried(wire, at)


class Connection:
    family = socket.AF_INET

    def __init__(self, peer):
        self.peer = peer

    def getpeername(self):
        return self.peer, 1234


@pytest.mark.parametrize(
    ("choice", "peer", "checks"),
    [
        ("auto", "127.0.0.1", False),
        ("auto", "::1", False),
        ("auto", "10.0.0.7", True),
        ("on", "127.0.0.1", True),
        ("off", "10.0.0.7", False),
    ],
)
def test_what_is_checked(choice, peer, checks):
    assert (checksum_of(Connection(peer), choice)(VALUES, b"tag") != 0) == checks


@pytest.mark.parametrize("size", [1, 17, 1_000_003])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_a_group_with_checksums_computes_the_same(algorithm, size):
    rendezvous, arrays = abstract_address("test"), [sample(rank, size, "float32") for rank in range(3)]
    expected = reduced(arrays, "mean")

    def body(rank):
        with collective.connect(rank, 3, rendezvous, "tcp", algorithm=algorithm, checksum="on") as group:
            group.all_reduce(arrays[rank])

    on_threads(3, body)
    for array in arrays:
        assert_same_bits(array, expected)


def test_ranks_that_disagree_on_checksums_all_learn_it():
    rendezvous = abstract_address("test")

    def body(rank):
        collective.connect(rank, 2, rendezvous, "tcp", checksum=["on", "off"][rank]).close()

    for outcome in outcomes_of(2, body):
        assert type(outcome.error) is RendezvousError
        assert "tcp with checksum off, tcp with checksum on" in str(outcome.error)


def test_an_unknown_choice_is_refused():
    with pytest.raises(UsageError, match=r"unknown checksum 'yes' \(known: auto, on, off\)"):
        collective.connect(0, 2, checksum="yes")


@pytest.mark.parametrize(
    ("cut_off", "kind", "words"),
    [
        (False, ProtocolError, "rank 0 closed its data connection but stays in the group"),
        (True, PeerUnreachable, "rank 0 cannot be reached: its host 127.0.0.1 has acknowledged nothing for 1.5 s"),
    ],
)
def test_a_data_connection_that_closes_without_a_goodbye(monkeypatch, cut_off, kind, words):
    """As where the goodbye cannot come through, as a link is cut, and where it can, but there is none."""
    for module in (tcp, reach):
        monkeypatch.setattr(module, "is_cut_off", lambda host: cut_off and host == "127.0.0.1")
    with ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as door:

        def pair():
            here = opened.enter_context(socket.create_connection(door.getsockname()))
            return here, opened.enter_context(door.accept()[0])

        (control, _), (data, its_data) = pair(), pair()
        transport = TcpTransport(Mesh(1, {0: control}, timeout=1.5), {0: data})
        opened.callback(transport.close)
        its_data.close()
        with pytest.raises(kind, match=words):
            transport.receive(0, np.empty_like(VALUES), TAG)
