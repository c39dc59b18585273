"""Parameter-server scheme: trainers push gradients to servers, which make one global update and serve the result."""

from __future__ import annotations

from common.optimizers import SGD, Adagrad, Adam, AdamW, Momentum, RMSProp

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Momentum", "RMSProp"]
