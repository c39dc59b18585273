"""`python -m tests.faults.overheard FILE`: what clients on this host say to listeners, as root can hear it.

FILE holds a JSON object, {"HOST:PORT": hexadecimal bytes of one client, in the order in which they came}.
"""

from __future__ import annotations

import ctypes
import json
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

from common.system.process import prepare_process

__all__: list[str] = []

IPV4, TCP = 0x0800, 6
SYN, ACK = 2, 16
SO_ATTACH_FILTER, SO_RCVBUFFORCE = 26, 33  # of <asm-generic/socket.h>
LOAD_LENGTH, IF_MORE, GIVE = 0x80, 0x25, 0x06  # of <linux/filter.h>
OFTEN_S = 0.05
MOST = 1 << 14  # bytes of a client: its handshake, and some of what follows
BUFFER = 1 << 26  # bytes of packets that were not taken yet


class Heard:
    """Packets, put together to what a client has said. Whose SYN was not heard is no client."""

    def __init__(self) -> None:
        self.said: dict[str, bytes] = {}  # by listener
        self._next: dict[str, tuple[int, int]] = {}  # likewise, the client's port and its next sequence number

    def take(self, packet: bytes) -> None:
        head = (packet[0] & 15) * 4
        (length,) = struct.unpack_from("!H", packet, 2)
        if packet[9] != TCP:
            return
        client, port, number = struct.unpack_from("!HHI", packet, head)
        listener, flags = f"{socket.inet_ntoa(packet[16:20])}:{port}", packet[head + 13]
        data = packet[head + (packet[head + 12] >> 4) * 4 : length or None]
        if flags & SYN and not flags & ACK and len(self.said.get(listener, b"")) < MOST:
            self.said.setdefault(listener, b"")
            self._next.setdefault(listener, (client, (number + 1) % (1 << 32)))
        elif data and self._next.get(listener) == (client, number) and len(self.said[listener]) < MOST:
            self.said[listener] += data
            self._next[listener] = client, (number + len(data)) % (1 << 32)


def leave_out_bulk(listener: socket.socket) -> None:
    """Large packets stay in the kernel: the data of all others on this host would push out a handshake."""
    rules = [(LOAD_LENGTH, 0, 0, 0), (IF_MORE, 0, 1, MOST), (GIVE, 0, 0, 0), (GIVE, 0, 0, 0xFFFFFFFF)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = struct.pack("HP", len(rules), ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    listener.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)


def main(file: Path) -> None:
    prepare_process()
    heard, draft, written = Heard(), file.with_suffix(".draft"), time.monotonic()
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(IPV4)) as listener:
        leave_out_bulk(listener)
        listener.settimeout(OFTEN_S)
        print("listens", flush=True)
        while True:
            with suppress(TimeoutError):
                heard.take(listener.recv(1 << 17))
            if time.monotonic() >= written + OFTEN_S:
                draft.write_text(json.dumps({name: said.hex() for name, said in heard.said.items() if said}))
                draft.replace(file)
                written = time.monotonic()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
