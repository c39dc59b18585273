"""A measurement says beforehand that it replaces the results of an earlier one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from benchmarks.measuring import run as measuring
from common.errors import CertificateFailed


@pytest.mark.parametrize("there", [True, False])
def test_results_of_an_earlier_run_are_not_replaced_without_a_word(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: object) -> None:
        raise CertificateFailed("stop here")

    monkeypatch.setattr(measuring, "measure", measure)
    if there:
        (tmp_path / "it.json").write_text("{}")
    given: Any = SimpleNamespace(file="it.json", report="it"), SimpleNamespace(out=tmp_path)
    with pytest.raises(CertificateFailed):
        measuring.run(*given, Console(width=400))
    words = f"{tmp_path} has results of an earlier run, which this one replaces; --out FOLDER keeps both\n"
    assert capsys.readouterr().out == (words if there else "")
