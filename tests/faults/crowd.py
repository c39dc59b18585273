"""`python -m tests.faults.crowd FILE PORT...`: in turn nobody comes for a while, a crowd of strangers comes to a port
of nobody's, and one to these ports.

Each crowd comes evenly within COME_S seconds, most of it silent, and stays until HOLD_S seconds later. FILE then says
when each was where, monotonic seconds: [[begin, end, one of WHERE], ...].
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from common.system.process import prepare_process
from tests.support.crowds import SAYINGS

__all__ = ["COUNT", "WHERE"]

COUNT, ROUNDS = 500, 3
WHERE = ("nowhere", "elsewhere", "here")
COME_S, HOLD_S = 0.7, 0.4


def come(ports: list[int]) -> tuple[float, float]:
    """A crowd, evenly to each of these; without any port it stays away as long."""
    begin = time.monotonic()
    with ExitStack() as opened:
        for number in range(COUNT if ports else 0):
            due = begin + COME_S * number / COUNT
            if (early := due - time.monotonic()) > 0:
                time.sleep(early)
            with suppress(OSError):  # nobody listens there at the moment
                stranger = opened.enter_context(socket.socket())
                stranger.settimeout(1.0)
                stranger.connect(("127.0.0.1", ports[number % len(ports)]))
                stranger.setblocking(False)
                stranger.send(SAYINGS[number % len(SAYINGS)] if number % 4 == 0 else b"")
        time.sleep(HOLD_S if ports else COME_S + HOLD_S)
        return begin, time.monotonic()


def hold_all(listener: socket.socket) -> None:
    """As somebody does who wants nothing of them."""
    held = []
    with suppress(OSError):
        while True:
            held.append(listener.accept()[0])
            del held[:-COUNT]


def main(file: Path, ports: list[int]) -> None:
    prepare_process()
    turns = []
    with socket.create_server(("127.0.0.1", 0), backlog=COUNT) as nobody:
        threading.Thread(target=hold_all, args=[nobody], daemon=True).start()
        places = {"nowhere": [], "elsewhere": [nobody.getsockname()[1]], "here": ports}
        for where in WHERE * ROUNDS:
            turns.append([*come(places[where]), where])
    file.write_text(json.dumps(turns))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(each) for each in sys.argv[2:]])
