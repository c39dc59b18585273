"""What is measured over TLS is encrypted, and what stands beside it is not."""

from __future__ import annotations

import pytest

from benchmarks.contestants.encryption import encrypt_if_secure
from benchmarks.contestants.table_of_sweeps import BACKENDS, is_encrypted
from benchmarks.netlab.hosts import OneHost
from benchmarks.operations.group import MeasuredGroup
from common.credentials.credentials import Credentials, current, using
from common.launch.job import Job
from common.network import proofs
from common.network.proofs import encrypts
from tests.support.credentials import tcp_pair

PLAIN = Credentials("none", "a test")


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name.startswith(("tcp", "ps-"))])
def test_processes_of_a_backend_have_credentials_only_if_it_is_measured_over_tls(backend: str) -> None:
    seen: list[Credentials] = []

    class Told(MeasuredGroup):
        def _start(self, control: str) -> None:
            seen.append(current())

    with using(PLAIN, warn=False), Job() as job, Told(job, backend, OneHost(), []):
        assert current().kind == "none"
    assert [each.kind for each in seen] == ["token" if is_encrypted(backend) else "none"]


@pytest.mark.parametrize(("kind", "secure"), [("none", False), ("token", True)])
def test_who_has_credentials_encrypts_the_loopback(kind: str, secure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "ENCRYPT_LOOPBACK", False)
    credentials = Credentials(kind, "a test", bytes(32))
    here, there = tcp_pair()
    with here, there, using(credentials, warn=False):
        encrypt_if_secure()
        assert encrypts(here, credentials) == secure
