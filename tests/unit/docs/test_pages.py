"""The pages are complete: names, errors, both languages, short READMEs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from common import errors
from common.paddle_api.names import OWN, PUBLIC, SERVER_SIDE
from tests.support.groups import ROOT

DOCS = ROOT / "docs"
ONLY_ENGLISH = {"kernels", "api", "architecture", "contributing", "gpu", "profile", "programs"}
CHINESE = sorted(page for page in DOCS.glob("*.zh.md"))


def shape(page: Path) -> list[str]:
    """The skeleton of a page: its headings' levels, tables' rows, code, pictures and list items, in order."""
    marks = re.compile(r"^(#+(?= )|\||```|~~~|!\[|- |\d+\. |!!!|===)", re.MULTILINE)
    return marks.findall(re.sub(r"```.*?```", "```", page.read_text("utf-8"), flags=re.DOTALL))


def test_every_public_name_is_on_the_api_page() -> None:
    text = (DOCS / "api.md").read_text("utf-8")
    assert {name for name in (*OWN, *PUBLIC, *SERVER_SIDE) if f"`{name}`" not in text} == set()


def test_the_layout_names_every_folder() -> None:
    text = (DOCS / "contributing.md").read_text("utf-8")
    named = set(re.findall(r"`((?:ps|collective|common|benchmarks)/\w+)`", text))
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    there = {
        "/".join(file.split("/")[:2]) for file in files if re.match(r"(ps|collective|common|benchmarks)/\w+/", file)
    }
    assert named == there


@pytest.mark.parametrize("page", ["troubleshooting.md", "troubleshooting.zh.md"])
def test_every_error_has_what_to_do(page: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    found = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    raised = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert found == raised - {"GradSyncError", "PeerError"}


@pytest.mark.parametrize("page", ["troubleshooting.md", "troubleshooting.zh.md"])
def test_words_that_end_a_half_changed_program_are_explained(page: str) -> None:
    paddle = importlib.util.find_spec("paddle")
    if paddle is None or paddle.origin is None:
        pytest.skip("without Paddle there is nobody who says them")
    folder = Path(paddle.origin).parent / "distributed"
    symptoms = re.findall(r"^\*\*(.+?)\*\*", (DOCS / page).read_text("utf-8"), re.MULTILINE)
    assert any("ProcessFailed" in symptom for symptom in symptoms)
    for file, words in (
        ("parallel.py", "ParallelContext must be initialized before"),
        ("communication/group.py", "The global group is not initialized"),
    ):
        assert words in (folder / file).read_text("utf-8")
        assert any(words in symptom for symptom in symptoms)


def test_every_user_page_is_there_in_chinese() -> None:
    pages = {page.name.removesuffix(".md") for page in DOCS.glob("*.md") if ".zh." not in page.name}
    assert {page.name.removesuffix(".zh.md") for page in CHINESE} == pages - ONLY_ENGLISH


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_a_chinese_page_has_the_parts_of_the_english_one(page: Path) -> None:
    assert shape(page) == shape(page.with_name(page.name.replace(".zh.md", ".md")))


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_a_readme_is_short_and_its_links_lead_somewhere(readme: str) -> None:
    text = (ROOT / readme).read_text("utf-8")
    assert len(text.splitlines()) <= 150
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert links
