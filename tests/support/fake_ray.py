"""As much of Ray as `common.program.ray_train` uses, in this process: actors are objects whose calls are threads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

__all__ = ["Actor", "Cluster", "Workers", "ray_train_on"]

OURS = "common.program.ray_train"
ITS_GAUGES = "common.program.ray_gauges"
GET_S = 30.0


class Trainer:
    """Of Ray Train: keeps what it is given."""

    def __init__(self, loop: Callable[..., Any], **options: Any) -> None:
        self.loop, self.options = loop, options


@dataclass
class Group:
    """A placement group: bundles of resources that are reserved together."""

    bundles: Sequence[dict[str, float]]
    strategy: str
    has_room: bool

    def wait(self, timeout_seconds: float) -> bool:
        return self.has_room


class Call:
    """A method of an actor: `.remote(...)` begins it."""

    def __init__(self, calls: ThreadPoolExecutor, method: Callable[..., Any]) -> None:
        self._calls, self._method = calls, method

    def remote(self, *args: Any) -> Future[Any]:
        return self._calls.submit(self._method, *args)


class Actor:
    def __init__(self, instance: Any, options: dict[str, Any]) -> None:
        self.instance, self.options = instance, options
        self.calls = ThreadPoolExecutor(options["max_concurrency"])

    def __getattr__(self, name: str) -> Call:
        return Call(self.calls, getattr(self.instance, name))


@dataclass
class Cluster:
    """What was asked of it."""

    has_room: bool = True
    groups: list[Group] = field(default_factory=list)
    removed: list[Group] = field(default_factory=list)
    actors: list[Actor] = field(default_factory=list)
    killed: list[Actor] = field(default_factory=list)
    figures: dict[tuple[str, ...], float] = field(
        default_factory=dict
    )  # by name, then values of tags, sorted by theirs

    def gauge(self, name: str, description: str, tag_keys: tuple[str, ...]) -> Any:
        assert description

        def set_it(value: float, tags: dict[str, str]) -> None:
            assert tags.keys() == {*tag_keys}
            self.figures[(name, *(tags[key] for key in sorted(tag_keys)))] = value

        return SimpleNamespace(set=set_it)

    def placement_group(self, bundles: Sequence[dict[str, float]], strategy: str) -> Group:
        self.groups.append(Group(bundles, strategy, self.has_room))
        return self.groups[-1]

    def remote(self, kind: Callable[..., Any]) -> Any:
        def options(**given: Any) -> Any:
            return SimpleNamespace(remote=lambda *args: self._start(kind(*args), given))

        return SimpleNamespace(options=options)

    def _start(self, instance: Any, options: dict[str, Any]) -> Actor:
        self.actors.append(Actor(instance, options))
        return self.actors[-1]

    def modules(self) -> dict[str, ModuleType]:
        placing = {"PlacementGroup": Group, "placement_group": self.placement_group}
        here = {"get_runtime_context": lambda: SimpleNamespace(get_job_id=lambda: "job 1")}
        held = {
            "ray": {"remote": self.remote, "get": results_of, "kill": self.killed.append, **here},
            "ray.train": {"ScalingConfig": SimpleNamespace},
            "ray.train.backend": {"Backend": object, "BackendConfig": object},
            "ray.train.v2.api.data_parallel_trainer": {"DataParallelTrainer": Trainer},
            "ray.train._internal.utils": {"get_address_and_port": lambda: ("127.0.0.1", 7000)},
            "ray.util": {"get_node_ip_address": lambda: "127.0.0.1"},
            "ray.util.metrics": {"Gauge": self.gauge},
            "ray.util.placement_group": {**placing, "remove_placement_group": self.removed.append},
            "ray.util.scheduling_strategies": {
                "PlacementGroupSchedulingStrategy": lambda group, placement_group_bundle_index: (
                    group,
                    placement_group_bundle_index,
                )
            },
        }
        found = {}
        for name, attributes in held.items():
            found[name] = ModuleType(name)
            vars(found[name]).update(attributes)
        return found


def results_of(calls: Sequence[Future[Any]]) -> list[Any]:
    return [call.result(GET_S) for call in calls]


@dataclass
class Workers:
    """Ray's group of workers: each has an address, and notes what it is to run."""

    places: Sequence[tuple[str, int, str]]
    gone: bool = False
    told: list[tuple[int, Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.places)

    def execute(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if self.gone:
            raise RuntimeError("The actor is dead.")
        if function.__name__ == "where":
            return list(self.places)
        self.left.append(*args)
        return [None] * len(self)

    def execute_single_async(self, rank: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        self.told.append((rank, function, args))
        done: Future[Any] = Future()
        done.set_result(None)
        return done


@contextmanager
def ray_train_on(cluster: Cluster) -> Iterator[Any]:
    """The module, imported with this cluster as its Ray."""
    with patch.dict(sys.modules, cluster.modules()):
        for name in (OURS, ITS_GAUGES):
            sys.modules.pop(name, None)
        yield import_module(OURS)
    for actor in cluster.actors:
        actor.calls.shutdown()
