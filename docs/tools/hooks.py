"""What MkDocs does besides: pictures inline, a word on English pages of the Chinese site, a search index a language."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority

from docs.tools import charts, figures, names

__all__ = ["on_page_content", "on_page_markdown", "on_post_build", "on_post_page", "on_pre_build"]

ONLY_ENGLISH = '!!! info ""\n    本页只有英文。\n\n'
IMAGE = re.compile(r'<img alt="([^"]*)" src="[./]*assets/((?:charts|diagrams)/[^"]+\.svg)"\s*/?>')
ALTERNATE = re.compile(r"<link rel=\"alternate\"[^>]*>\s*")
LONG_CODE = re.compile(r"(?<=<code>)[^<>\s&]{25,}(?=</code>)")
STYLE = re.compile(r"<style>.*?</style>\n?", re.DOTALL)


def on_pre_build(config: Any) -> None:
    """Stop if a figure, a picture or a table of names is not what it is made from."""
    if figures.main([]) or charts.main(["--check"]) or names.main(["--check"]):
        raise PluginError("pages and what they are made from differ")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Say on a page of the Chinese site that it is in English."""
    if config.theme["language"] == "zh" and ".zh." not in page.file.src_uri:
        return ONLY_ENGLISH + markdown
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Put our pictures into the page, where they take its colours, and let long names break."""
    html = LONG_CODE.sub(lambda found: re.sub(r"([/.:_])", r"\1<wbr>", found[0]), html)
    return IMAGE.sub(lambda found: _inline(found[1], Path("docs/assets") / found[2], config.theme["language"]), html)


def _inline(words: str, file: Path, language: str) -> str:
    translated = file.with_suffix(f".{language}.svg")
    text = STYLE.sub("", (translated if translated.exists() else file).read_text("utf-8"))
    labelled = text.replace("role='img'", f"role='img' aria-label=\"{words}\"", 1)
    return f'<span class="picture">{labelled}</span>'


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Let Chinese pages search in the Chinese index, and no page ask for a map of the site, which it has not."""
    output = ALTERNATE.sub("", output)
    if config.theme["language"] != "zh":
        return output
    return re.sub(r'("base": ")([^"]*)(", "features")', r"\1\2/zh/\3", output, count=1)


@event_priority(-100)  # when both languages are built
def on_post_build(config: Any) -> None:
    """Divide the search index between the languages."""
    whole = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(whole.read_text("utf-8"))
    chinese = [entry for entry in index["docs"] if entry["location"].startswith("zh/")]
    if not chinese:
        return
    english = [entry for entry in index["docs"] if not entry["location"].startswith("zh/")]
    for entry in chinese:
        entry["location"] = entry["location"].removeprefix("zh/")
    for file, entries in ((whole, english), (whole.parents[1] / "zh" / "search" / whole.name, chinese)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**index, "docs": entries}, ensure_ascii=False), "utf-8")
