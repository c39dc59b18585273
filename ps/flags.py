"""How trainers and servers exchange gradients: each field is a flag, and a variable that launchers set for scripts."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import choose
from common.launch.settings import Settings
from ps.planes.plane import DATA_PLANES

__all__ = ["ScriptSettings", "ServedSettings"]

UPDATE_CHOICES = ("auto", "server", "trainer")


@dataclass(frozen=True, kw_only=True)
class ServedSettings(Settings):
    """Of all trainers alike."""

    data_plane: str = "auto"
    """What carries the gradients: shm (one host), tcp, grpc (slower; passes proxies), or auto: the first possible."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("data plane", self.data_plane, DATA_PLANES)


@dataclass(frozen=True, kw_only=True)
class ScriptSettings(ServedSettings):
    """Of trainers that run a program of the user's."""

    update: str = "auto"
    """Who applies the optimizer of your own program: server, trainer, or auto (servers where they can)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("update", self.update, UPDATE_CHOICES)
