"""What is said of addresses: the next one, the brackets of IPv6, whether one is ours."""

from __future__ import annotations

import pytest

from common.errors import PeerUnreachable, UsageError
from common.system.addresses import address_after, address_of, is_ours, own_host

NOBODY = "203.0.113.1"  # RFC 5737: of documentation, no machine's


@pytest.mark.parametrize(
    ("host", "expected"), [("10.0.0.1", "10.0.0.1:80"), ("a", "a:80"), ("::1", "[::1]:80"), ("[::1]", "[::1]:80")]
)
def test_address_of(host: str, expected: str) -> None:
    assert address_of(host, 80) == expected


@pytest.mark.parametrize(
    ("address", "count", "expected"),
    [("10.0.0.1:80", 0, "10.0.0.1:80"), ("a:80", 2, "a:82"), ("[::1]:8600", 1, "[::1]:8601")],
)
def test_address_after(address: str, count: int, expected: str) -> None:
    assert address_after(address, count) == expected


def test_ports_come_to_an_end() -> None:
    assert address_after("a:65534", 1) == "a:65535"
    with pytest.raises(UsageError, match="not an address: 'a:65536'"):
        address_after("a:65534", 2)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost"])
def test_ours(host: str) -> None:
    assert is_ours(host)


@pytest.mark.parametrize("host", [NOBODY, "no-such-host.invalid"])
def test_not_ours(host: str) -> None:
    assert not is_ours(host)


def test_the_host_that_others_reach_us_by() -> None:
    assert own_host("127.0.0.1") == "127.0.0.1"
    with pytest.raises(PeerUnreachable, match=r"no way leads to no-such-host\.invalid \(.+\); is the address right\?"):
        own_host("no-such-host.invalid")
