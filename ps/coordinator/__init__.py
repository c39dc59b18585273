"""A server's side: its trainers, their messages and its figures."""

__all__: list[str] = []
