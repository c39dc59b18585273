"""gRPC, framed messages over TCP, and the meeting of a group's ranks."""

__all__: list[str] = []
