"""Commands that are ended with the test that has started them."""

from tests.processes.conftest import start

__all__ = ["start"]
