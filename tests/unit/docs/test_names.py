"""The page of names is what the table makes, and has every name in both languages."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.paddle_api.names_table import TABLE
from common.paddle_api.strategy import DEGREES, SWITCHES
from docs.tools import names
from tests.support.groups import ROOT


def test_the_pages_are_what_the_table_makes() -> None:
    assert names.main(["--check"]) == 0


@pytest.mark.parametrize("words", [names.ENGLISH, names.CHINESE], ids=lambda words: words.file)
def test_a_page_has_every_name_with_its_words(words: names.Words) -> None:
    lines = names.page(words).splitlines()
    for group in TABLE:
        said = group.words if words is names.ENGLISH else group.chinese
        for name in group.names:
            assert any(f"`{name}`" in line and said in line for line in lines), name
    assert all(any(f"`{field}`" in line for line in lines) for field in (*SWITCHES, *DEGREES))


def test_a_page_that_is_not_current_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(names, "FOLDER", tmp_path)
    assert names.main(["--check"]) == 1
    assert names.main([]) == 0
    assert names.main(["--check"]) == 0
    (tmp_path / "names.zh.md").write_text("old")
    capsys.readouterr()
    assert names.main(["--check"]) == 1
    assert capsys.readouterr().out.startswith("docs/names.zh.md is not what the table of names makes; run")
    assert (ROOT / "docs" / "names.zh.md").read_text("utf-8") != "old"
