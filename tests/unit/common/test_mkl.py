"""Which matrix kernels Paddle's MKL is told to use, and that it does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from common.system.mkl import CPU_TYPE, MKL_CHOOSES, OTHER_CHOICES, set_cpu_type, wanted_cpu_type
from tests.support.groups import ROOT

EPYC = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu sse2 avx fma avx2\n\nprocessor\t: 1\nflags\t\t: \n"
XEON = EPYC.replace("AuthenticAMD", "GenuineIntel")
ARM = "processor\t: 0\nFeatures\t: asimd\n"
SGD = """
import sys
import numpy as np
{first}
import paddle
x = np.random.default_rng(0).standard_normal((2, 10_003)).astype("float32")
parameter = paddle.create_parameter([10_003], "float32", default_initializer=paddle.nn.initializer.Assign(x[0]))
parameter.grad = paddle.to_tensor(x[1])
paddle.optimizer.SGD(0.1, parameters=[parameter]).step()
rate = np.float32(0.1)
once = (x[0].astype(float) - float(rate) * x[1].astype(float)).astype("float32")
twice = x[0] - rate * x[1]
assert not np.array_equal(once, twice)
found = parameter.numpy()
print("once" if np.array_equal(found, once) else "twice" if np.array_equal(found, twice) else "neither")
"""


@pytest.fixture(autouse=True)
def nobody_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_TYPE, "so that what a test sets does not stay")
    monkeypatch.delenv(CPU_TYPE)
    for name in OTHER_CHOICES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def epyc(tmp_path: Path) -> Path:
    """What the kernel says of one."""
    (tmp_path / "epyc").write_text(EPYC)
    return tmp_path / "epyc"


@pytest.mark.parametrize(
    ("processor", "wanted"),
    [
        (EPYC, "5"),
        (EPYC.replace("AuthenticAMD", "HygonGenuine"), "5"),
        (EPYC.rstrip("\n"), "5"),
        (EPYC.replace(" avx2", ""), None),
        (EPYC.replace(" fma", ""), None),
        (XEON, None),
        (ARM, None),
        ("", None),
        (None, None),
    ],
)
def test_avx2_where_mkl_would_not_use_it(processor: str | None, wanted: str | None, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    if processor is not None:
        file.write_text(processor)
    assert wanted_cpu_type(file) == wanted
    set_cpu_type(file)
    assert os.environ.get(CPU_TYPE) == wanted


@pytest.mark.parametrize("chosen", ["0", "7", "auto", ""])
def test_what_the_user_set_stays(chosen: str, epyc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_TYPE, chosen)
    set_cpu_type(epyc)
    assert os.environ[CPU_TYPE] == wanted_cpu_type(epyc) == chosen


@pytest.mark.parametrize("name", ["MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"])
def test_another_choice_of_the_users_is_not_overridden(name: str, epyc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "COMPATIBLE")
    set_cpu_type(epyc)
    assert CPU_TYPE not in os.environ


def rounding_of_sgd(first: str, folder: Path, *, settings: Mapping[str, str], command: Sequence[str]) -> str:
    """What a process prints that has seen how Paddle's SGD rounds, on one rank."""
    program = folder / "sgd.py"
    program.write_text(SGD.format(first=first))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "settings", "command"),
    [
        ("from common.system.process import prepare_process; prepare_process()", {}, ()),
        pytest.param("import paddle, collective; collective.get_rank()", {}, (), marks=pytest.mark.long),
        ("import paddle, ps; ps.get_rank()", {}, ()),
        pytest.param("import paddle, collective", {"PADDLE_TRAINER_ID": "0"}, (), marks=pytest.mark.long),
        ("import paddle, ps", {"PADDLE_TRAINER_ID": "0"}, ()),
        ("import collective as dist; dist.init_parallel_env()", {}, ("-m", "collective.run", "--nranks", "1")),
        pytest.param(
            *("import ps as dist; dist.init_parallel_env()", {}, ("-m", "ps.run", "--nranks", "1")),
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_way_in_sets_it_before_paddle_computes(
    first: str, settings: dict[str, str], command: Sequence[str], tmp_path: Path
) -> None:
    """Seen by Paddle's SGD, which rounds once where MKL uses FMA, as on Intel's processors, and else twice."""
    pytest.importorskip("paddle")
    if wanted_cpu_type() is None:
        pytest.skip("MKL knows what this processor can do, so nothing is set")
    assert rounding_of_sgd(first, tmp_path, settings=settings, command=command) == "once"


@pytest.mark.processes
def test_auto_is_mkls_own_choice(tmp_path: Path) -> None:
    """Which SSE2 is on the processors that it misjudges."""
    pytest.importorskip("paddle")
    chosen = [rounding_of_sgd("", tmp_path, settings=s, command=()) for s in ({}, {CPU_TYPE: MKL_CHOOSES})]
    assert chosen[0] == chosen[1]
    assert wanted_cpu_type() is None or chosen[0] == "twice"
