"""Another user of this host, with our code in hand: he reaches our ports and gets no further."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from common.credentials.user_secret import user_secret
from common.launch.servers import start_servers
from common.network import rpc
from ps.status import ask, credentials_for
from tests.support.groups import ROOT, environment
from tests.support.short_job import Job

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user"),
]

NOBODY = 65534
LIMIT_S = 40.0
STRANGER = """
import sys
from common.credentials.credentials import Credentials, current
from common.credentials.of_listener import credentials_at
from common.errors import CredentialsRefused
from common.network import rpc
address = sys.argv[1]
assert credentials_at(int(address.rpartition(":")[2])) is None
for credentials in (current(), Credentials("none", "--insecure")):
    try:
        with rpc.connect(address, timeout=30, credentials=credentials):
            pass
    except CredentialsRefused as error:
        print("refused")
"""


@pytest.mark.long
def test_he_is_refused_by_a_server_of_ours_and_reads_no_secret(tmp_path: Path) -> None:
    """Neither the user's own credentials, nor a launcher's, which stand in its environment."""
    with Job(tmp_path) as job:
        for how in ("a launcher's", "the user's own"):
            if how == "the user's own":
                job.secret = ""
            (address,) = start_servers(job, 1, nranks=1, timeout=LIMIT_S, environment=environment())
            said = as_nobody(["-c", STRANGER, address])
            assert said == "refused\nrefused\n", how
            with rpc.connect(address, timeout=LIMIT_S, credentials=credentials_for(address)) as channel:
                (reply,) = ask([address], [channel], LIMIT_S)
            assert reply.state == "waiting for trainers"
            job.end(job.children[0].process)
            (job.scratch / "server-0").unlink()


def test_he_cannot_read_our_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        user_secret()
        with pytest.raises(subprocess.CalledProcessError) as caught:
            as_nobody(["-c", f"open({folder + '/gradsync/secret'!r}, 'rb')"])
    assert "PermissionError" in caught.value.stderr


def as_nobody(command: list[str]) -> str:
    """What he prints."""
    runs = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv here")
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    his = Path(tempfile.mkdtemp())
    try:
        os.chown(his, NOBODY, NOBODY)
        return said_by([*runs, sys.executable, *command], {**env, "XDG_RUNTIME_DIR": str(his)})
    finally:
        shutil.rmtree(his)


def said_by(command: list[str], env: dict[str, str]) -> str:
    imports = [*command[: command.index("-c")], "-c", "import common"]
    if subprocess.run(imports, env=env, capture_output=True).returncode:
        pytest.skip("another user cannot read this checkout")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return done.stdout
