"""What the page on several hosts tells a new user, typed on two emulated hosts by one who is not root."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.netlab.cluster import Cluster, why_no_cluster
from tests.support.groups import ROOT

pytest.importorskip("paddle")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster() or "-"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv here"),
]
PAGE = (ROOT / "docs" / "several-hosts.md").read_text("utf-8")
USER = 65534
SHORT = ["--model", "mlp:8", "--dataset", "synthetic", "--steps", "5", "--batch-size", "4"]
LIMIT_S = 100
HOSTS = ("10.0.0.1", "10.0.0.2")
OPEN_PYTHON = """
set -e
python=$1; shift
top=/$(echo "$python" | cut -d/ -f2)
if [ -d "$top" ] && ! setpriv --reuid=65534 --regid=65534 --clear-groups test -r "$python"; then
  mkdir -p "$HOME/.python"
  mount --bind "$python" "$HOME/.python"
  mount -t tmpfs -o mode=755 none "$top"
  mkdir -p "$python"
  mount --bind "$HOME/.python" "$python"
fi
exec "$@"
"""  # where this Python is below a folder of root's alone: shown to others too, to the processes of the command only


def told(beginning: str) -> str:
    """The line of the page that begins so."""
    (line,) = re.findall(rf"^ *({re.escape(beginning)}.*)$", PAGE, re.MULTILINE)
    return str(line)


class User:
    """A new user, with a home of his own on each of two hosts."""

    def __init__(self, hosts: tuple[str, str], homes: tuple[Path, Path]) -> None:
        self.hosts, self.homes = hosts, homes

    def types(self, line: str, host: int) -> subprocess.Popen[str]:
        for number, address in enumerate(HOSTS):
            line = line.replace(address, f"10.77.0.{number + 1}")
        words = shlex.split(line.replace("[script.py ARGS...]", "").replace("--node-rank I", f"--node-rank {host}"))
        words = [sys.executable if word == "python" else word for word in words]
        who = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
        home = str(self.homes[host])
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GRADSYNC", "XDG"))}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.hosts[host], "sh", "-c", OPEN_PYTHON, "sh", sys.base_prefix, *who, *words],
            cwd=home,
            env={**kept, "HOME": home, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def types_on_both(self, line: str) -> list[tuple[int, str, str]]:
        """Exit codes and output, of the second host first."""
        started = [self.types(line, host) for host in (1, 0)]
        try:
            return [(one.wait(LIMIT_S), *one.communicate()) for one in started]
        finally:
            for one in started:
                one.kill()
                one.communicate()


@pytest.fixture
def user() -> Iterator[User]:
    with Cluster([0, 0]) as cluster, tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as there:
        homes = Path(here), Path(there)
        for home in homes:
            os.chown(home, USER, USER)
        first, second = cluster.names
        found = User((first, second), homes)
        if (can := found.types("python -c 'import paddle'", 0)).wait(LIMIT_S):
            pytest.skip(f"another user cannot read this checkout: {can.communicate()[1]}")
        can.communicate()
        yield found


def copy_token(user: User) -> None:
    """`scp -p`, between hosts that share a disk."""
    file = Path(told("scp ").split()[2])
    shutil.copy2(user.homes[0] / file, user.homes[1] / file)
    os.chown(user.homes[1] / file, USER, USER)


def test_one_token_and_the_same_line_on_each_host_train_under_both_schemes(user: User) -> None:
    made = user.types(told("python -m common.credentials token"), 0)
    assert made.wait(LIMIT_S) == 0, made.communicate()
    made.communicate()
    copy_token(user)
    digests = []
    for beginning in ("python -m collective.run --ips", "python -m ps.run --master"):
        ended = user.types_on_both(f"{told(beginning)} {shlex.join(SHORT)}")
        assert [code for code, _, _ in ended] == [0, 0], ended
        lines = [line for _, _, err in ended for line in err.splitlines()]
        slow = (" compil", "starting servers: ")  # loops, once for a new user; a machine in use
        assert [line for line in lines if not any(text in line for text in slow)] == []
        digests.append(re.findall("[0-9a-f]{64}", ended[1][1]))
    assert len(digests[0]) == 1
    assert digests[0] == digests[1]


def test_without_the_token_he_is_told_what_to_do(user: User) -> None:
    line = told("python -m collective.run --ips").replace("--token-file job.token", "")
    for code, _, err in user.types_on_both(line):
        assert code == 2
        assert "refusing to " in err
        assert "python -m common.credentials token FILE" in err
