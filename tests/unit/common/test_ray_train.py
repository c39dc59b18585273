"""What `PaddleTrainer` asks of Ray and tells its workers. With the real Ray: tests/system/test_ray.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

import ps
from common.credentials.credentials import TOKEN_VARIABLE
from common.errors import PeerUnreachable, UsageError
from common.system.addresses import host_identity
from tests.support.fake_ray import Cluster, Workers, ray_train_on
from tests.support.groups import on_threads

THREE = [("10.0.0.1", 7001, "a"), ("10.0.0.2", 7002, "b"), ("10.0.0.1", 7003, "a")]  # ranks 0 and 2 on one host


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def ray_train(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(TOKEN_VARIABLE, "a" * 64)  # as a server sets it, in this process
    with ray_train_on(cluster) as module:
        yield module


def variables_told(workers: Workers, ray_train: Any, scheme: str) -> list[dict[str, str]]:
    """By rank; each is to become one of this scheme."""
    assert [(rank, function, args[0]) for rank, function, args in workers.told] == [
        (rank, ray_train.become, scheme) for rank in range(len(workers))
    ]
    return [args[1] for _, _, args in workers.told]


def started(ray_train: Any, workers: Workers, **config: Any) -> Any:
    backend = ray_train.PaddleBackend()
    backend.on_start(workers, ray_train.PaddleConfig(**config))
    return backend


def test_ranks_of_the_ring_meet_at_the_first_worker(ray_train: Any, cluster: Cluster) -> None:
    workers = Workers(THREE)
    backend = started(ray_train, workers, timeout=17.0, token="b" * 64)
    told = variables_told(workers, ray_train, "collective")
    for rank, variables in enumerate(told):
        assert variables["GRADSYNC_RENDEZVOUS"] == "10.0.0.1:7001"
        assert variables["GRADSYNC_TIMEOUT"] == "17.0"
        assert variables[TOKEN_VARIABLE] == "b" * 64
        assert (variables["PADDLE_TRAINER_ID"], variables["PADDLE_TRAINERS_NUM"]) == (str(rank), "3")
        assert variables["PADDLE_NNODES"] == "2"
    assert [variables["PADDLE_LOCAL_RANK"] for variables in told] == ["0", "0", "1"]
    assert len({variables["PADDLE_CURRENT_ENDPOINT"] for variables in told}) == 3
    assert not cluster.groups
    backend.on_shutdown(workers, ray_train.PaddleConfig())
    assert workers.left == ["collective"]


def test_workers_that_share_memory_meet_there(ray_train: Any) -> None:
    workers = Workers([THREE[0], THREE[2]])
    started(ray_train, workers)
    (place,) = {variables["GRADSYNC_RENDEZVOUS"] for variables in variables_told(workers, ray_train, "collective")}
    assert place.startswith("unix-abstract:")


def test_servers_are_actors_in_a_placement_group_and_serve_the_workers(ray_train: Any, cluster: Cluster) -> None:
    workers = Workers(THREE[:2])
    resources = {"CPU": 2.0, "memory": 1e9, "disk": 1.0}
    backend = started(ray_train, workers, scheme="ps", servers=2, resources_per_server=resources)
    (group,) = cluster.groups
    assert (group.bundles, group.strategy) == ([resources] * 2, "SPREAD")
    for index, actor in enumerate(cluster.actors):
        asked = (actor.options["num_cpus"], actor.options["memory"], actor.options["resources"])
        assert asked == (2.0, 1e9, {"disk": 1.0})
        assert actor.options["scheduling_strategy"] == (group, index)
    told = variables_told(workers, ray_train, "ps")
    addresses = told[0]["GRADSYNC_SERVERS"].split(",")
    assert told[1]["GRADSYNC_SERVERS"].split(",") == addresses
    assert len({*addresses}) == 2
    os.environ[TOKEN_VARIABLE] = told[0][TOKEN_VARIABLE]

    def body(rank: int) -> float:
        with ps.connect(addresses, rank, 2) as connection:
            parameters = np.zeros(40, np.float32)
            connection.register(parameters, optimizer=ps.SGD(learning_rate=1.0))
            connection.push_pull(np.full(40, rank + 1, np.float32), out=parameters)
            return float(parameters[0])

    assert on_threads(2, body) == [-1.5, -1.5]
    for actor in cluster.actors:
        actor.calls.shutdown()  # it has served
    for server in "01":
        assert cluster.figures["gradsync_steps_total", "job 1", server] == 1
        assert cluster.figures["gradsync_trainer_steps_total", "job 1", "1", server] == 1
    backend.on_shutdown(workers, ray_train.PaddleConfig(scheme="ps"))
    assert (cluster.killed, cluster.removed) == (cluster.actors, [group])
    backend.on_shutdown(workers, ray_train.PaddleConfig(scheme="ps"))
    assert cluster.removed == [group]


def test_servers_end_though_a_worker_is_gone(ray_train: Any, cluster: Cluster, monkeypatch: Any) -> None:
    monkeypatch.setattr(ray_train.Server, "serve", lambda server, *_: server._tell("10.0.0.9:8000"))
    workers = Workers(THREE)
    backend = started(ray_train, workers, scheme="ps")
    workers.gone = True
    backend.on_shutdown(workers, ray_train.PaddleConfig(scheme="ps"))
    assert (cluster.killed, cluster.removed) == (cluster.actors, cluster.groups)


def test_a_cluster_without_room_for_servers_is_told(ray_train: Any, cluster: Cluster) -> None:
    cluster.has_room = False
    with pytest.raises(UsageError) as caught:
        started(ray_train, Workers(THREE), scheme="ps", servers=4, timeout=3.0)
    assert str(caught.value) == (
        "Ray has had no room for 4 server(s) of {'CPU': 1.0} beside 3 workers for 3 s: give fewer of either, or "
        "smaller ones (resources_per_server)"
    )
    assert not cluster.actors


def test_a_server_that_does_not_start_is_named(ray_train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_train.Server, "serve", lambda *_: None)
    with pytest.raises(PeerUnreachable) as caught:
        started(ray_train, Workers(THREE), scheme="ps", servers=2, timeout=0.01)
    assert str(caught.value) == "server 0 did not start within 0.01 s; Ray's log says why"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"scheme": "rings"}, "unknown scheme 'rings'; did you mean 'ring'?"),
        ({"scheme": "ps", "servers": 0}, "servers must be at least 1 (got 0)"),
        ({"timeout": -1.0}, "timeout must be a positive number (got -1.0)"),
    ],
)
def test_what_cannot_be_is_refused(ray_train: Any, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        ray_train.PaddleConfig(**wrong)
    assert words in str(caught.value)


def test_the_token_is_shown_nowhere(ray_train: Any) -> None:
    config = ray_train.PaddleConfig(scheme="ps", servers=3)
    assert config.token
    assert config.token not in f"{config} {config.to_dict()}"
    assert config.to_dict() == {"scheme": "ps", "servers": 3}
    assert ray_train.PaddleConfig().to_dict() == {"scheme": "ring", "servers": 0}
    assert ray_train.PaddleConfig().token != config.token


def test_ray_gets_the_loop_and_its_options(ray_train: Any) -> None:
    config = ray_train.PaddleConfig(scheme="ps")
    trainer = ray_train.PaddleTrainer(print, paddle_config=config, scaling_config="two", run_config="here")
    assert trainer.loop is print
    assert trainer.options == {"backend_config": config, "scaling_config": "two", "run_config": "here"}
    assert ray_train.PaddleTrainer(print).options["backend_config"].scheme == "ring"
    assert config.backend_cls is ray_train.PaddleBackend


def test_a_worker_becomes_a_rank_and_leaves(ray_train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []
    monkeypatch.setattr(ray_train, "install", installed.append)
    monkeypatch.setenv("PADDLE_TRAINER_ID", "")
    assert ray_train.where() == ("127.0.0.1", 7000, host_identity("127.0.0.1"))
    ray_train.become("collective", {"PADDLE_TRAINER_ID": "3"})
    assert (installed, os.environ["PADDLE_TRAINER_ID"]) == (["collective"], "3")
    ray_train.leave("collective")  # it has trained nothing
