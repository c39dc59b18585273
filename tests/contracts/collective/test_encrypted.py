"""Over TLS every algorithm gives the bits that it gives without; in `make test-long` all contracts say so."""

from __future__ import annotations

import numpy as np
import pytest

from common.network.links import Link
from tests.support.groups import ENCRYPTED, assert_same_bits, on_ranks, opened, reduced, sample, transport_of

SIZES = (0, 1, 3, 17, 1_009, 400_003)


@pytest.mark.parametrize("backend", ENCRYPTED)
@pytest.mark.parametrize("nranks", [2, 4])
def test_an_all_reduce_over_tls(backend, nranks):
    def body(group):
        results = []
        for size in SIZES:
            array = sample(group.rank, size, "float32")
            group.all_reduce(array)
            results.append(array)
        return results

    with opened(backend, nranks) as groups:
        for links in (each for group in groups for each in links_of(group)):
            assert links.connection.version() == "TLSv1.3"
            assert links.checksum(np.ones(3, np.float32), b"tag") == 0  # TLS has its own
        for results in on_ranks(groups, body):
            for size, result in zip(SIZES, results, strict=True):
                assert_same_bits(result, reduced([sample(r, size, "float32") for r in range(nranks)], "mean"))


def links_of(group) -> list[Link]:
    found = getattr(group._algorithm, "_transport", None) or transport_of(group)
    links = list(found._links.values())
    assert links
    return links
