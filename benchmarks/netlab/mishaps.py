"""What a bad network does to packets: it loses them, brings them twice, late, behind those that were sent later, or
with a bit of their data flipped, of which TCP learns nothing.

    eth0 of a host ---- port --[ relay ]-- wire ==== relayed ---- the switch

Not every kernel has netem, so the packets of one host's link pass a program, `python -m benchmarks.netlab.mishaps`, on
their way to the switch and back.
"""

from __future__ import annotations

import heapq
import itertools
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from benchmarks.netlab.cluster import Cluster, run
from common.errors import GradSyncError

__all__ = ["Mishaps"]

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
EVERYTHING = 0x0003  # ETH_P_ALL
LARGEST = 1 << 17  # a packet with its headers
LATE_S = 0.02  # longer than a round trip, shorter than a TCP's patience
READY = b"ready\n"
VIRTUAL = struct.Struct("<BBHHHH")  # before every packet: flags, ...; linux/virtio_net.h
NEEDS_CHECKSUM, ETHERNET_BYTES, IPV4, TCP = 1, 14, 4, 6


class Mishaps:
    """A context manager: on the link of a host of an entered cluster.

    Args:
        lost, twice, late, flipped: of which share of the packets, each way, 0 to 1; flipped: of those with data of TCP.
        seed: of the choice.
    """

    def __init__(
        self,
        cluster: Cluster,
        host: int,
        *,
        lost: float = 0.0,
        twice: float = 0.0,
        late: float = 0.0,
        flipped: float = 0.0,
        seed: int = 1,
    ) -> None:
        self._cluster, self._host, self._shares = cluster, host, (lost, twice, late, flipped, seed)

    def __enter__(self) -> Mishaps:
        switch, port = self._cluster.switch, f"port{self._host}"
        for name in self._cluster.names:  # a packet is a packet, not 40 in a row
            run(f"ip -n {name} link set eth0 gso_max_segs 1".split())
        for command in (
            f"link set {port} nomaster",
            "link add wire type veth peer name relayed",
            "link set wire up",
            "link set relayed master switch up",
        ):
            run(f"ip -n {switch} {command}".split())
        relay = ["ip", "netns", "exec", switch, sys.executable, "-m", __name__, port, "wire"]
        self._relay = subprocess.Popen([*relay, *map(str, self._shares)], stdout=subprocess.PIPE)
        if self._relay.stdout is None or self._relay.stdout.readline() != READY:
            self.__exit__()
            raise GradSyncError("the program between the host and the switch ended at once")
        return self

    def __exit__(self, *_: object) -> None:
        self._relay.kill()
        self._relay.communicate()


def main(arguments: Sequence[str]) -> None:
    """Until it is killed."""
    *devices, lost, twice, late, flipped, seed = arguments
    ends = [opened(device) for device in devices]
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    relay(ends, (float(lost), float(twice), float(late), float(flipped)), random.Random(int(seed)))


def opened(device: str) -> socket.socket:
    """All packets that arrive there, each behind what says how far its checksum and its segments are made."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERYTHING))
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.bind((device, EVERYTHING))
    return end


def relay(ends: Sequence[socket.socket], shares: tuple[float, float, float, float], chance: random.Random) -> None:
    lost, twice, late, flipped = shares
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    number = itertools.count()
    with selectors.DefaultSelector() as selector:
        for end, other in zip(ends, reversed(ends), strict=True):
            selector.register(end, selectors.EVENT_READ, other)
        while True:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, other, packet = heapq.heappop(waiting)
                send(other, packet)
            for key, _ in selector.select(waiting[0][0] - now if waiting else None):
                packet = key.fileobj.recv(LARGEST)  # type: ignore[union-attr]
                if chance.random() < lost:
                    continue
                if flipped and chance.random() < flipped:
                    packet = with_a_flip(packet, chance)
                for _ in range(2 if chance.random() < twice else 1):
                    if chance.random() < late:
                        heapq.heappush(waiting, (time.monotonic() + LATE_S, next(number), key.data, packet))
                    else:
                        send(key.data, packet)


def with_a_flip(packet: bytes, chance: random.Random) -> bytes:
    """One bit of TCP's data is another; its checksum is right, for the kernel has not made it yet."""
    ip = VIRTUAL.size + ETHERNET_BYTES
    flags = packet[0]
    if len(packet) < ip + 40 or packet[ip] >> 4 != IPV4 or packet[ip + 9] != TCP or not flags & NEEDS_CHECKSUM:
        return packet
    tcp = ip + 4 * (packet[ip] & 15)
    data, end = tcp + 4 * (packet[tcp + 12] >> 4), ip + int.from_bytes(packet[ip + 2 : ip + 4], "big")
    if data >= end:
        return packet
    found = bytearray(packet)
    found[chance.randrange(data, end)] ^= 1 << chance.randrange(8)
    return bytes(found)


def send(end: socket.socket, packet: bytes) -> None:
    with suppress(OSError):  # it is lost then
        end.send(packet)


if __name__ == "__main__":
    main(sys.argv[1:])
