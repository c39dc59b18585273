"""A server's side: its trainers, their messages and its figures.

A dead trainer's stream ends (servicer.py), and liveness.py says who it was; a living one that is silent or slow is
noticed by frozen_or_slow.py.
"""

__all__: list[str] = []
