"""Where a server's figures for Prometheus, which shows no certificate, are served."""

from __future__ import annotations

import pytest

from ps.coordinator.metrics import metrics_host
from tests.support.channels import INSECURE
from tests.support.credentials import with_secret


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "fd00::1"])
def test_figures_are_told_to_this_host_only_unless_asked_for(host: str) -> None:
    assert metrics_host(host, with_secret(1)) == "127.0.0.1"
    assert metrics_host(host, INSECURE) == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_a_loopback_address_stays_as_it_is(host: str) -> None:
    assert metrics_host(host, with_secret(1)) == metrics_host(host, INSECURE) == host
