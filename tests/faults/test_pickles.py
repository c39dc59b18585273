"""Row 15: a pickle is loaded from no wire and no file: the file that it would make is not there."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from tests.faults.jobs import LAUNCHERS, SCHEMES, Start
from tests.fuzz.test_pickles import Canary
from tests.support.commands import JOB

schemes = pytest.mark.parametrize("scheme", SCHEMES)
PROGRAM = """
import json, struct, sys
from pathlib import Path
import paddle.distributed as dist
dist.init_parallel_env()
if dist.get_rank() and sys.argv[2] == "forged":  # as an honest one would, if it had been asked to
    from common.paddle_api.communication.objects import Codec
    payload = Path(sys.argv[1]).read_bytes()
    text = json.dumps(["o", len(payload)]).encode()
    Codec.encode = lambda self, value: struct.pack("<Q", len(text)) + text + payload
class Unknown:
    pass
got = []
dist.all_gather_object(got, Unknown() if sys.argv[2] == "honest" else 1)
"""


def poisoned(folder: Path) -> Path:
    file = folder / "pickle"
    file.write_bytes(pickle.dumps(Canary(folder / "canary")))
    return file


@pytest.mark.parametrize("how", ["honest", "forged"])
@schemes
def test_an_object_of_another_rank(scheme: str, how: str, start: Start, tmp_path: Path) -> None:
    """An honest rank does not send it, and none loads what another sends."""
    (tmp_path / "program.py").write_text(PROGRAM)
    flags = ["--log-dir", tmp_path, "--timeout", 5]
    job = start(*LAUNCHERS[scheme], *flags, tmp_path / "program.py", poisoned(tmp_path), how)
    assert job.code, job.out
    logs = "".join((tmp_path / f"workerlog.{rank}").read_text() for rank in range(2))
    assert "--allow-pickle" in logs
    assert ("UsageError: " if how == "honest" else "ProtocolError: ") in logs
    assert not (tmp_path / "canary").exists()


@schemes
def test_a_data_set(scheme: str, start: Start, tmp_path: Path) -> None:
    payload = gzip.compress(poisoned(tmp_path).read_bytes())
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(payload)
    job = start(*LAUNCHERS[scheme], *JOB, "--dataset", "mnist", "--data-dir", tmp_path)
    assert job.code == 2, job.err
    assert "DataError: " in job.err
    assert not (tmp_path / "canary").exists()
