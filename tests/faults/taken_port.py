"""`python -m tests.faults.taken_port PLACE HOST:PORT`: listens where it cannot, and tells how soon it found out."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from typing import Any

from common.errors import PortInUse
from common.network.gradsync_pb2 import StatusReply
from common.network.rendezvous import RendezvousServer
from common.system.process import prepare_process
from ps.coordinator.metrics import serve_metrics
from ps.coordinator.servicer import ParameterServer

__all__: list[str] = []


def listen(place: str, address: str) -> AbstractContextManager[Any]:
    host, _, port = address.partition(":")
    if place == "rendezvous":
        return RendezvousServer(address, 2, timeout=1.0)
    if place == "metrics":
        return serve_metrics(StatusReply, host, int(port))
    if place == "data port":
        return ParameterServer(f"{host}:0", 1, data_port=int(port))
    return ParameterServer(address, 1)


def main(place: str, address: str) -> None:
    prepare_process()
    begin = time.monotonic()
    try:
        with listen(place, address):
            print("it listens")
    except PortInUse as exc:
        print(f"{time.monotonic() - begin:.3f} PortInUse {exc}")


if __name__ == "__main__":
    main(*sys.argv[1:])
