"""Imports Paddle as a process of ours needs it."""

from __future__ import annotations

__all__ = ["import_paddle"]


def import_paddle() -> None:
    """Import Paddle without its signal handlers: a SIGTERM is no crash to print a C++ traceback for.

    Handlers of one's own are installed after this.
    """
    import paddle

    paddle.disable_signal_handler()
