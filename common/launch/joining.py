"""Whether the ranks of a user's program join their group, as far as the launcher of this host can see."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence

from common.errors import RendezvousError, UsageError
from common.launch.child import Child
from common.launch.ranks import name_of

__all__ = ["Joining"]


class Joining:
    """Watches the ranks of a job until all have begun to join.

    Args:
        script: the user's program, and its arguments.
        flags: of the launcher.
        package: the launcher's, "ps" or "collective".
        nranks: of the job, on all hosts.
        timeout: in seconds; who has not joined by then is named, once. Nothing is ended for it: only a wait for another
            process has a limit, and a program may prepare as long as it likes before it joins.
    """

    def __init__(
        self, script: Sequence[str], package: str, nranks: int, timeout: float, *, flags: Collection[str] = ()
    ) -> None:
        given = (word.partition("=")[0].replace("_", "-") for word in script[1 + (script[0] == "-m") :])
        self._misplaced = [word for word in given if word in flags]
        self._script, self._package, self._nranks, self._timeout = name_of(script), package, nranks, timeout
        self._deadline: float | None = time.monotonic() + timeout  # None: it has passed, and been spoken of

    def look(self, children: Sequence[Child]) -> None:
        """
        Raises:
            RendezvousError: a rank has ended well without joining, while another waits for it.
        """
        ranks = [child for child in children if child.name.startswith("rank")]
        gone = [rank for rank in ranks if rank.code == 0 and not rank.has_joined()]
        waiting = [rank for rank in ranks if gone and rank.code is None and rank.has_joined(self._nranks)]
        if waiting:
            raise RendezvousError(
                f"{names(gone)} ended with exit code 0 without joining the group: "
                f"{names(waiting)} would wait for it in vain; every rank of {self._script} must {self._how()}"
            )
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline = None
            if late := [rank for rank in ranks if rank.code is None and not rank.has_joined()]:
                print(
                    f"{self._package}.run: {self._timeout:g} s have passed (--timeout) without {names(late)} joining "
                    f"the group; unless {self._script} still prepares, end it and see that it does {self._how()}",
                    file=sys.stderr,
                )

    def needless(self, children: Sequence[Child]) -> bool:
        """Whether all ranks have ended well and none has joined, so that servers need not wait: the program has only
        asked for its rank, say. A line says so."""
        ranks = [child for child in children if child.name.startswith("rank")]
        if not ranks or any(rank.code != 0 or rank.has_joined() for rank in ranks):
            return False
        print(
            f"{self._package}.run: no rank of {self._script} joined the group: they ran apart"
            f"{', and servers had nothing to do' * (self._package == 'ps')}; where they should train together, "
            f"{self._script} must {self._how()}",
            file=sys.stderr,
        )
        return True

    def note_on(self, code: int, children: Sequence[Child]) -> str:
        """A line about flags of the launcher's among the script's arguments, if the script ended before it joined, as
        Python's do that do not understand theirs; else "", for a script may have flags of these names itself."""
        if not self._misplaced or code != UsageError.exit_code or any(child.has_joined() for child in children):
            return ""
        return (
            f"{self._package}.run: {self._script} was given {', '.join(self._misplaced)}, which stands after its name; "
            f"put what is meant for {self._package}.run before it"
        )

    def _how(self) -> str:
        return f"call init_parallel_env() or fleet.init(), with --no-install those of {self._package}"


def names(ranks: Sequence[Child]) -> str:
    return "rank " + ", ".join(rank.name.removeprefix("rank ") for rank in ranks)
