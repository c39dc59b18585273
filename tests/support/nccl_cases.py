"""Cases and limits of the tests of NCCL without a GPU."""

from __future__ import annotations

import pytest

from collective.nccl.binding import BINDINGS

__all__ = ["bindings", "kinds"]

bindings = pytest.mark.parametrize("binding", BINDINGS)
kinds = pytest.mark.parametrize("ring", [False, True], ids=["nccl", "nccl-ring"])


def algorithms(groups):
    return [group._algorithm for group in groups]
