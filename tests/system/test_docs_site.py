"""The site that `make docs` builds, in a browser: it can be read at any width and searched in both languages."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from docs.tools import offline
from tests.support.browser import CHROMIUM, Browser
from tests.support.groups import ROOT

pytestmark = [
    pytest.mark.long,
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]
PAGES = ["", "get-started/", "choose-a-scheme/", "performance/", "troubleshooting/", "api/"]
HITS = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
        """Say nothing of each request."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def test_nothing_is_loaded_from_outside(site: Path) -> None:
    assert offline.main([str(site)]) == 0


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("language", ["", "zh/"])
def test_every_width_shows_whole_pages(browser: Browser, address: str, language: str, width: int) -> None:
    browser.resize(width)
    for page in PAGES:
        browser.visit(address + language + page)
        assert browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0, page
        assert browser.run("document.querySelectorAll('img[src*=\".svg\"]').length") == 0, f"{page}: not inline"
        assert browser.complaints() == []


@pytest.mark.parametrize(
    ("language", "words", "found"),
    [
        ("", "PeerStalled", "troubleshooting/"),
        ("zh/", "退出码", "zh/troubleshooting/"),
        ("zh/", "慢", "zh/performance/"),
    ],
)
def test_the_search_finds_pages_of_its_language(
    browser: Browser, address: str, language: str, words: str, found: str
) -> None:
    browser.visit(f"{address}{language}?q={words}")
    assert browser.wait(f"{HITS}.length > 0")
    hits = browser.run(HITS)
    assert any(hit.startswith(address + found) for hit in hits), hits
    assert all(hit.startswith(address + language) for hit in hits), hits
    assert language or not any(hit.startswith(f"{address}zh/") for hit in hits), hits
