"""Calls back before and after every outermost backward of Paddle, wherever it is started from.

`Tensor.backward`, `paddle.autograd.backward` and AMP's scaler all end in one function, which is wrapped once. An error
raised there reaches the caller as itself, which one raised in a backward hook does not.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import paddle

from common.system.switching import switching_often

__all__ = ["BackwardListener", "forget", "listen_to_backward"]


class BackwardListener(Protocol):
    def before_backward(self) -> None: ...

    def after_backward(self) -> None: ...


_listeners: list[BackwardListener] = []
_installed = False
_depth = threading.local()  # recomputation runs a backward inside backward


def listen_to_backward(listener: BackwardListener) -> None:
    """Call `listener` from now on; installed once."""
    global _installed
    if not _installed:
        _installed = True
        engine = paddle.base.core.eager
        original = engine.run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if getattr(_depth, "inside", False):
                return original(*args, **kwargs)
            _depth.inside = True
            try:
                with switching_often():
                    for each in list(_listeners):  # one may be forgotten meanwhile
                        each.before_backward()
                    result = original(*args, **kwargs)
                    for each in _listeners:
                        each.after_backward()
            finally:
                _depth.inside = False
            return result

        engine.run_backward = run_backward
    _listeners.append(listener)


def forget(listener: BackwardListener) -> None:
    """Stop calling `listener`."""
    if listener in _listeners:
        _listeners.remove(listener)
