"""The credentials of a launcher's job, for another command of the same user that knows no more than a port of it."""

from __future__ import annotations

import os

from common.credentials.credentials import Credentials, find

__all__ = ["credentials_at"]


def credentials_at(port: int) -> Credentials | None:
    """Those of the process of this user's that listens at that port of this host; None: there is none, or it keeps its
    environment to itself. Other users' processes are not asked: who holds a port could say anything."""
    import psutil

    for process in psutil.process_iter():
        try:
            if process.uids().real != os.geteuid():
                continue
            listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            if any(c.laddr.port == port for c in listening):
                return find(environment=process.environ())
        except psutil.Error:  # it has ended, or may not be looked at
            continue
    return None
