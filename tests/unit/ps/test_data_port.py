"""What a server knows of those who come to its data port."""

from __future__ import annotations

import pytest

from ps.planes.data_port import DataPort


@pytest.mark.parametrize(("host", "near"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_who_comes_to_a_loopback_address_is_of_this_host(host: str, near: bool) -> None:
    with DataPort(host, 0) as port:
        assert port.more(0, [b"token"]).near == near
