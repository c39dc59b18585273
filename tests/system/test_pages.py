"""The page of a whole job in a browser: every plot drawn, nothing complained of, all within reach of the Tab key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.page.language import LANGUAGES, speaking
from benchmarks.reports.suite import to_html
from tests.support.browser import CHROMIUM, Browser
from tests.support.report_samples import every_job

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (apt-get install chromium)"),
    pytest.mark.processes,
]
WIDTHS = (1280, 390)  # a screen's and a phone's
DRAWN = """[...document.querySelectorAll('.plot')].filter(plot => {
  const marks = plot.querySelector('.cartesianlayer .trace, .cartesianlayer .hm');
  return marks && plot.querySelector('.main-svg').getBoundingClientRect().width > 200;
}).map(plot => plot.id)"""
# Where the focus is: what it is, and whether it is in view and marked.
FOCUS = """(() => {
  const at = document.activeElement, box = at.getBoundingClientRect();
  const shown = box.bottom > 0 && box.top < innerHeight && getComputedStyle(at).outlineStyle === 'solid';
  return [at.getAttribute('href') || at.id || at.getAttribute('aria-label'), shown];
})()"""
TABLES = "[...document.querySelectorAll('.scroll')].map(box => box.getAttribute('aria-label'))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_page_at_two_widths(language: str, browser: Browser, tmp_path: Path) -> None:
    suite = next(every_job())
    with speaking(language):
        html = to_html(suite)
    (tmp_path / "suite.html").write_text(html, encoding="utf-8")
    plots = re.findall(r'<div class="plot" id="([^"]+)"', html)
    assert len(plots) == 3 + 1 + 1 + 1 + 3
    browser.resize(WIDTHS[0])
    browser.open(tmp_path / "suite.html")
    for width in WIDTHS:
        browser.resize(width)
        assert browser.wait(f"innerWidth === {width} && document.documentElement.scrollWidth <= {width}"), width
        assert browser.run(DRAWN) == plots
    assert browser.complaints() == []
    links = [f"#part-{part['name']}" for part in suite["parts"]]
    expected = {*links, *plots, *browser.run(TABLES)}
    reached = []
    for _ in expected:
        browser.press_tab()
        where, shown = browser.run(FOCUS)
        assert shown, where
        reached.append(where)
    assert set(reached) == expected
    assert reached[: len(links)] == links
