"""A server's figures among those that Prometheus reads from Ray's nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import Metric
from ray.util.metrics import Gauge

__all__ = ["RayGauges", "shown"]

EVERY_S = 2.0  # Ray itself collects them every 10 s


class RayGauges:
    """
    Args:
        tags: what each figure is marked with, beside labels of its own.
    """

    def __init__(self, tags: dict[str, str]) -> None:
        self._tags = tags
        self._gauges: dict[str, Gauge] = {}

    def show(self, figures: Iterable[Metric]) -> None:
        """The values of Prometheus's metrics are Ray's from now on; Ray adds `ray_` before their names."""
        for metric in figures:
            for sample in metric.samples:
                if sample.name not in self._gauges:
                    keys = (*self._tags, *sample.labels)
                    self._gauges[sample.name] = Gauge(sample.name, metric.documentation, tag_keys=keys)
                self._gauges[sample.name].set(sample.value, {**self._tags, **sample.labels})


@contextmanager
def shown(figures: Callable[[], Iterable[Metric]], tags: dict[str, str]) -> Iterator[None]:
    """Within, Ray is told the figures every other second, and a last time at the end."""
    gauges, over = RayGauges(tags), threading.Event()

    def tell() -> None:
        while not over.wait(EVERY_S):
            gauges.show(figures())

    teller = threading.Thread(target=tell, name="ray-gauges", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
        gauges.show(figures())
