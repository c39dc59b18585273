"""The page of a whole job in a browser: every plot drawn, nothing complained of, all within reach of the Tab key, in
light and dark and on paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.page.language import LANGUAGES, speaking
from tests.support.browser import CHROMIUM, Browser
from tests.support.compare_samples import a_run
from tests.support.compare_samples import results_of as compared
from tests.support.report_samples import every_job
from tests.support.reporting import to_html
from tests.support.sweep_samples import results_of, row_of

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (apt-get install chromium)"),
    pytest.mark.processes,
]
WIDTHS = (1280, 390)  # a screen's and a phone's
DRAWN = """[...document.querySelectorAll('.plot')].filter(plot => {
  const marks = [...plot.querySelectorAll('.segment, svg path:not(.grid), td[style]')];
  return marks.some(mark => mark.getBoundingClientRect().width > 0) && plot.getBoundingClientRect().width > 200;
}).map(plot => plot.id)"""
# Where the focus is: what it is, and whether it is in view and marked.
FOCUS = """(() => {
  const at = document.activeElement, box = at.getBoundingClientRect();
  const shown = box.bottom > 0 && box.top < innerHeight && getComputedStyle(at).outlineStyle === 'solid';
  return [at.getAttribute('href') || at.id || at.getAttribute('aria-label') || at.tagName, shown];
})()"""
TABLES = """[...document.querySelectorAll('.scroll')].filter(box => box.checkVisibility())
  .map(box => box.getAttribute('aria-label'))"""
HIDDEN = "[...document.querySelectorAll('.scroll')].filter(box => !box.checkVisibility()).length"
TOUCHING = """[...document.querySelectorAll('.x-axis')].flatMap(axis => {
  const labels = [...axis.children].map(label => [label.textContent, label.getBoundingClientRect()]);
  return labels.flatMap(([text, box], i) => labels.slice(0, i)
    .filter(([, other]) => other.right + 3 > box.left && other.bottom > box.top && box.bottom > other.top)
    .map(([other]) => `${other} ${text}`));
})"""
ON_A_LINE = """[...document.querySelectorAll('.track:has(.mark)')].filter(track => {
  const [line, text] = ['.mark', '.value'].map(each => track.querySelector(each).getBoundingClientRect());
  return line.right + 3 > text.left && text.right + 3 > line.left;
}).map(track => track.textContent.trim())"""
LOOK = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"


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
    plots = re.findall(r'<div class="plot \w+" id="([^"]+)"', html)
    assert len(plots) == 1 + 3 + 1 + 1 + 1 + 4
    browser.resize(WIDTHS[0])
    browser.open(tmp_path / "suite.html")
    for width in WIDTHS:
        browser.resize(width)
        assert browser.wait(f"innerWidth === {width} && document.documentElement.scrollWidth <= {width}"), width
        assert browser.run(DRAWN) == plots
    assert browser.complaints() == []
    links = [f"#part-{part['name']}" for part in suite["parts"]]
    folded = html.count("<details>")
    assert browser.run(HIDDEN) == folded - 1 > 0  # what stands behind the recommendation is no table
    expected = {*links, *plots, *browser.run(TABLES), "SUMMARY"}
    reached = []
    for _ in range(len(expected) - 1 + folded):
        browser.press_tab()
        where, shown = browser.run(FOCUS)
        assert shown, where
        reached.append(where)
    assert set(reached) == expected
    assert reached[: len(links)] == links


def test_no_labels_of_an_axis_touch(browser: Browser, tmp_path: Path) -> None:
    sizes = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 10**8)
    rows = [row_of("shm", 2, size, [0.1, 0.2, 0.3], 0, 0.1) for size in sizes]
    (tmp_path / "sweep.html").write_text(to_html({**results_of(*rows), "absent": {}}), encoding="utf-8")
    browser.open(tmp_path / "sweep.html")
    for width in WIDTHS:
        browser.resize(width)
        assert browser.wait(f"innerWidth === {width}")
        assert browser.run(TOUCHING) == []


@pytest.mark.parametrize("rate", [850, 990, 1040])
def test_no_text_beside_a_bar_touches_the_line_of_linear_scaling(rate: int, browser: Browser, tmp_path: Path) -> None:
    runs = [a_run("local N=1", 500), a_run("ps N=2", rate), a_run("ring/shm N=2", rate + 30)]
    (tmp_path / "compare.html").write_text(to_html(compared(*runs)), encoding="utf-8")
    browser.open(tmp_path / "compare.html")
    for width in (*WIDTHS, 500):
        browser.resize(width)
        assert browser.wait(f"innerWidth === {width}")
        assert browser.run("document.querySelectorAll('.track .mark').length") == len(runs)
        assert browser.run(ON_A_LINE) == []


def test_certificates_open_and_the_page_follows_the_theme_and_prints(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "suite.html").write_text(to_html(next(every_job())), encoding="utf-8")
    browser.open(tmp_path / "suite.html")
    before = browser.run(f"{TABLES}.length")
    browser.run("document.querySelector('details:has(.scroll) summary').click()")
    assert browser.run(f"{TABLES}.length") == before + 1
    looks = []
    for theme, medium in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        feature = {"name": "prefers-color-scheme", "value": theme}
        browser.call("Emulation.setEmulatedMedia", media=medium, features=[feature])
        looks.append(browser.run(LOOK))
    light, dark, printed = looks
    assert light == ["rgb(255, 255, 255)", "rgb(28, 33, 40)"] == printed
    assert dark == ["rgb(20, 23, 28)", "rgb(228, 232, 238)"]
    assert browser.complaints() == []
