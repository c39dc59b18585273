"""Groups of every backend, opened once a module."""

from __future__ import annotations

import pytest

from tests.support.groups import on_ranks, open_groups


class Groups:
    """The groups of each (backend, nranks), opened once and again only after they were left in pieces."""

    def __init__(self):
        self._open = {}

    def of(self, backend, nranks):
        if (backend, nranks) not in self._open:
            self._open[backend, nranks] = open_groups(backend, nranks)
        return self._open[backend, nranks]

    def run(self, backend, nranks, function):
        try:
            return on_ranks(self.of(backend, nranks), function)
        except BaseException:
            self.give_back(backend, nranks)
            raise

    def give_back(self, backend, nranks):
        """The memory of a group's arrays, which it keeps until it is closed."""
        self._close(self._open.pop((backend, nranks), []))

    def close(self):
        for groups in self._open.values():
            self._close(groups)

    def _close(self, groups):
        for group in groups:
            group.close()


@pytest.fixture(scope="module")
def groups():
    every = Groups()
    yield every
    every.close()
