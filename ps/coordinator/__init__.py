"""A server's side: its trainers, their messages and its figures.

A trainer that died is noticed by the end of its stream (servicer.py) and named by members.py; one that is silent, by
watchdog.py.
"""

__all__: list[str] = []
