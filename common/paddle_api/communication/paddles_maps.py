"""Paddle's own maps of groups, in which libraries look one up by its number or name: ours are found there, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from paddle.base import core
from paddle.distributed import collective, parallel_helper
from paddle.distributed.communication import group as communication

__all__ = ["NO_MAPS", "Maps", "PaddlesMaps"]


class Maps(ABC):
    """Where others look for the groups of this process."""

    @abstractmethod
    def add(self, group: Any) -> None:
        """It is made; that of all ranks comes first."""

    @abstractmethod
    def drop(self, group: Any) -> None:
        """It is destroyed, or all of them are left."""


class NoMaps(Maps):
    """Nobody looks."""

    def add(self, group: Any) -> None:
        pass

    def drop(self, group: Any) -> None:
        pass


class PaddlesMaps(Maps):
    """Those of paddle.distributed.collective and of its communication; not where Paddle has groups of its own."""

    def __init__(self) -> None:
        self._by_id: dict[int, Any] = vars(communication)["_GroupManager"].group_map_by_id
        self._mine: list[Any] = []

    def add(self, group: Any) -> None:
        if group.id != 0 and self._mine[:1] != [self._by_id.get(0)]:
            return
        if group.id == 0:
            if isinstance(getattr(self._by_id.get(0), "process_group", None), core.ProcessGroup):
                return
            vars(collective)["_default_backend"] = group.backend.lower()
            if not parallel_helper._is_parallel_ctx_initialized():
                parallel_helper._set_parallel_ctx(True)
        self._mine.append(group)
        self._by_id[group.id] = collective._group_map[group.id] = group
        collective._group_map_by_name[group.name] = group
        collective._group_map_backend[group] = group.backend.lower() if group.process_group else None

    def drop(self, group: Any) -> None:
        if group not in self._mine:
            return
        self._mine.remove(group)
        for found, key in (
            (self._by_id, group.id),
            (collective._group_map, group.id),
            (collective._group_map_by_name, group.name),
        ):
            if found.get(key) is group:
                del found[key]
        collective._group_map_backend.pop(group, None)


NO_MAPS = NoMaps()
