"""Commands that are ended with the test that has started them."""

from tests.faults.kills import run
from tests.processes.conftest import start

__all__ = ["run", "start"]
