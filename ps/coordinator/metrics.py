"""A server's figures for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.credentials.credentials import Credentials
from common.errors import PortInUse
from common.network.gradsync_pb2 import StatusReply
from common.network.rpc import is_loopback

__all__ = ["StatusCollector", "metrics_host", "serve_metrics"]

THIS_HOST = "127.0.0.1"


class StatusCollector(Collector):
    """Metrics made from a server's status when they are asked for."""

    def __init__(self, status: Callable[[], StatusReply]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield CounterMetricFamily("gradsync_steps", "Steps that have ended.", value=status.steps)
        again = "How often the job was started again after a failure."
        yield CounterMetricFamily("gradsync_restarts", again, value=status.restarts)
        waiting = sum(t.waiting for t in status.trainers)
        yield GaugeMetricFamily("gradsync_waiting_trainers", "Trainers that wait for others.", value=waiting)
        training = status.state == "training"
        yield GaugeMetricFamily("gradsync_training", "1 while the training goes on.", value=training)
        steps = CounterMetricFamily("gradsync_trainer_steps", "Steps committed by a trainer.", labels=["rank"])
        last = CounterMetricFamily("gradsync_times_last", "Steps that waited for a trainer last.", labels=["rank"])
        lag = GaugeMetricFamily(
            "gradsync_arrival_lag_seconds",
            "Median time from the first trainer's commit to this one's.",
            labels=["rank"],
        )
        behind = GaugeMetricFamily(
            "gradsync_staleness_steps",
            "How many steps a trainer is behind the one that is furthest ahead.",
            labels=["rank"],
        )
        labels = ["rank", "direction", "data_plane"]
        moved = CounterMetricFamily("gradsync_bytes", "Gradients pushed, and what was served.", labels=labels)
        furthest = max((t.steps for t in status.trainers), default=0)
        for t in status.trainers:
            rank = str(t.rank)
            steps.add_metric([rank], t.steps)
            last.add_metric([rank], t.times_last)
            lag.add_metric([rank], t.lag)
            behind.add_metric([rank], 0 if t.left else furthest - t.steps)
            moved.add_metric([rank, "pushed", t.data_plane], t.bytes_pushed)
            moved.add_metric([rank, "served", t.data_plane], t.bytes_served)
        yield from (steps, last, lag, behind, moved)


def metrics_host(host: str, credentials: Credentials) -> str:
    """Where figures are served by a server that listens at `host`: Prometheus shows no certificate, so they are told to
    other hosts with --insecure only."""
    return THIS_HOST if credentials.secure and not is_loopback(host) else host


@contextmanager
def serve_metrics(status: Callable[[], StatusReply], host: str, port: int) -> Iterator[int]:
    """Serve http://host:port/metrics; gives the port, a free one for 0.

    Raises:
        PortInUse: somebody listens there.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as exc:
        raise PortInUse(
            f"cannot serve metrics at {host}:{port}: {exc.strerror}; choose another --metrics-port"
        ) from exc
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
