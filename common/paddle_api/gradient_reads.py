"""Whether a program reads its gradients: `p.grad`, `p.gradient()`, and what `clip_grad_norm_` and its like read.

Paddle's own optimizers and scalers take them another way, and are not seen here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

__all__ = ["forget_reads", "grad_of", "listen_to_reads"]

OnRead = Callable[[Any], None]

_found = {name: paddle.Tensor.__dict__[name] for name in ("grad", "grad_")}
_listeners: list[OnRead] = []

grad_of: Callable[[Any], Any] = _found["grad"].__get__  # a tensor's gradient, or None: what nobody sees


def listen_to_reads(on_read: OnRead) -> None:
    """Call this, from now on, with each tensor whose gradient the program is about to read or to replace."""
    _listeners.append(on_read)
    if len(_listeners) == 1:
        for name, found in _found.items():
            setattr(paddle.Tensor, name, _seen(found))


def forget_reads(on_read: OnRead) -> None:
    """Call it no more; after the last one Paddle's tensors have their own properties back."""
    if on_read in _listeners:
        _listeners.remove(on_read)
        if not _listeners:
            for name, found in _found.items():
                setattr(paddle.Tensor, name, found)


def _seen(found: Any) -> property:
    def read(tensor: Any) -> Any:
        for listener in _listeners:
            listener(tensor)
        return found.__get__(tensor)

    def replace(tensor: Any, value: Any) -> None:
        for listener in _listeners:
            listener(tensor)
        found.__set__(tensor, value)

    return property(read, replace, doc=found.__doc__)
