"""What a server's gRPC methods are called."""

from __future__ import annotations

__all__ = ["JOIN", "SERVICE", "SESSION", "STATUS", "TRACE"]

SERVICE = "gradsync.ParameterServer"
JOIN, SESSION, STATUS, TRACE = (f"/{SERVICE}/{method}" for method in ("Join", "Session", "Status", "Trace"))
