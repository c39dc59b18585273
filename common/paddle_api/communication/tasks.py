"""What a call that need not wait gives back: a task to be waited for."""

from __future__ import annotations

from typing import Any

__all__ = ["Task"]


class Task:
    """Of a call that was carried out at once, as all are but `irecv`."""

    def wait(self, timeout: Any = None) -> bool:
        """Block until it is done; the launcher's --timeout and --wait-limit say for how long."""
        return True

    def is_completed(self) -> bool:
        """Whether it is done; what can only be done by this thread is done for it first."""
        return self.wait()

    def is_sync(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()
