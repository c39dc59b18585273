"""A page of results that needs no network: its look, and the pieces that every kind of results is shown with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from plotly.offline import get_plotlyjs

from benchmarks.page.language import language_tag, say
from benchmarks.page.plot import Key, Plot

__all__ = [
    "chapter",
    "contents",
    "page",
    "plot_section",
    "row",
    "section",
    "table",
    "verdict_box",
]

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --panel: #f6f7f9; --ink: #1c2128; --muted: #59636f; --line: #dfe3e8;
  --good: #116b3a; --bad: #b3261e; --focus: #0b63c5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171c; --panel: #1c2128; --ink: #e4e8ee; --muted: #9ba6b4; --line: #323a45;
    --good: #5fd08f; --bad: #ff8a80; --focus: #79b8ff;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1100px; padding: 3.5rem 1.5rem 5rem; background: var(--page); color: var(--ink);
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: break-word;
}
h1 { margin: 0; font-size: clamp(1.7rem, 5vw, 2.3rem); line-height: 1.2; letter-spacing: -0.02em; text-wrap: balance; }
h2 { margin: 3.5rem 0 0.5rem; font-size: 1.3rem; line-height: 1.3; letter-spacing: -0.01em; }
h2.chapter { margin-top: 5rem; padding-top: 1.5rem; border-top: 1px solid var(--line); font-size: 1.6rem; }
h3 { margin: 2.5rem 0 0.5rem; font-size: 1.15rem; line-height: 1.3; }
a { color: var(--focus); }
.contents { display: flex; flex-wrap: wrap; gap: 0.2rem 1.5rem; margin: 1.5rem 0 0; padding: 0; list-style: none; }
ul { padding-left: 1.2rem; }
p { margin: 0.5rem 0; max-width: 46rem; }
.muted, figcaption, caption, .legend { color: var(--muted); font-size: 0.9rem; }
.verdict { margin: 2rem 0 0; padding: 1.1rem 1.4rem; background: var(--panel); border-left: 4px solid var(--good); }
.verdict p { max-width: none; }
.verdict p:first-child { font-size: clamp(1.05rem, 3vw, 1.15rem); font-weight: 600; }
.verdict.failed { border-color: var(--bad); }
.good { color: var(--good); }
.bad { color: var(--bad); font-weight: 600; }
figure { margin: 0; }
figcaption { max-width: 46rem; }
.plot { width: 100%; margin-top: 0.5rem; }
.legend { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; margin: 0.9rem 0 0; padding: 0; list-style: none; }
.legend svg { margin-right: 0.45rem; vertical-align: -0.1em; }
.scroll { overflow-x: auto; margin-top: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.wide { width: 100%; }
caption { padding-bottom: 0.5rem; text-align: left; }
th, td { padding: 0.4rem 1.1rem 0.4rem 0; text-align: left; vertical-align: top; white-space: nowrap; }
.figures :is(th, td):not(:first-child) { padding-right: 0; padding-left: 1.1rem; text-align: right; }
thead th { border-bottom: 1px solid var(--muted); font-size: 0.85rem; line-height: 1.35; vertical-align: bottom; }
thead small { display: block; color: var(--muted); font-weight: 400; font-size: inherit; }
tbody th { font-weight: 400; }
tbody + tbody { border-top: 1px solid var(--line); }
.best :is(th, td) { font-weight: 600; background: var(--panel); }
.facts td { white-space: normal; }
code, pre { font: 0.88rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { padding: 0.9rem 1.1rem; background: var(--panel); white-space: pre-wrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.5rem 1.4rem; max-width: 52rem; margin: 1rem 0 0; }
dt { font-weight: 600; }
dd { margin: 0; }
:focus-visible { outline: 3px solid var(--focus); outline-offset: 3px; }
@media (max-width: 30rem) {
  body { padding: 2rem 1rem 3rem; }
  dl { display: block; }
  dd { margin-bottom: 0.7rem; }
}
"""

# The figures name the page's colours as var(--name); they are drawn anew when the theme changes.
SCRIPT = """
const source = document.getElementById('figures').textContent;
const dark = matchMedia('(prefers-color-scheme: dark)');
function draw() {
  const page = getComputedStyle(document.documentElement);
  const figures = JSON.parse(source.replace(/var\\((--\\w+)\\)/g, (_, name) => page.getPropertyValue(name).trim()));
  for (const [name, figure] of Object.entries(figures)) {
    Plotly.react(name, figure.data, figure.layout, {responsive: true, displayModeBar: false});
  }
}
draw();
dark.addEventListener('change', draw);
"""

# Nothing may be loaded from anywhere, not even by a script that plotly.js might bring.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def page(title: str, verdict: str, sections: Iterable[str], drawn: Sequence[Plot]) -> str:
    """The whole page, in the report's language.

    Args:
        title: plain text.
        verdict: what stands on top, as `verdict_box` makes it, with what may stand above it.
        sections: as `section` and `plot_section` make them.
        drawn: the plots for which a `plot_section` is among the sections; their names are unique.
    """
    return f"""<!DOCTYPE html>
<html lang="{language_tag()}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<header><h1>{escape(title)}</h1>{verdict}</header>
<main>
{"".join(sections)}
</main>
{_scripts(drawn) if drawn else ""}
</body>
</html>
"""


def verdict_box(sentences: Iterable[str], *, failed: bool = False, label: str = "") -> str:
    """The sentences of plain text on top of a page."""
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in sentences)
    look = "verdict failed" if failed else "verdict"
    return f'<section class="{look}" aria-label="{escape(label or say("Verdict"))}">{paragraphs}</section>'


def plot_section(plot: Plot) -> str:
    legend = "".join(f"<li>{_swatch(key)}{escape(key.label)}</li>" for key in plot.legend)
    return section(
        plot.title,
        f'<figure><figcaption>{escape(plot.caption)}</figcaption><ul class="legend">{legend}</ul>'
        f'<div class="plot" id="{plot.name}" role="img" aria-label="{escape(plot.alt)}" tabindex="0" '
        f'style="height: {plot.height}px"></div></figure>',
    )


def _swatch(key: Key) -> str:
    """A filled box, or a piece of the line."""
    width, height = (12, 12) if key.dash is None else (26, 3)
    gaps = {"dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}.get(key.dash or "", "none")
    return (
        f'<svg width="{26 if key.dash else 12}" height="12" aria-hidden="true"><line x2="{width}" y1="6" y2="6" '
        f'stroke-width="{height}" stroke-dasharray="{gaps}" style="stroke: {key.colour}"/></svg>'
    )


def _scripts(drawn: Iterable[Plot]) -> str:
    # Escaped so that no name in the results can end the script element.
    figures = json.dumps({plot.name: plot.figure for plot in drawn}).replace("<", "\\u003c")
    return (
        f"<script>{get_plotlyjs()}</script>"
        f'<script type="application/json" id="figures">{figures}</script><script>{SCRIPT}</script>'
    )


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>\n"


def row(values: Iterable[str], *, look: str = "") -> str:
    name, *others = values
    return f'<tr class="{look}"><th scope="row">{name}</th>{"".join(f"<td>{value}</td>" for value in others)}</tr>'


def table(caption: str, heads: Sequence[str], bodies: Iterable[Sequence[str]], *, look: str = "") -> str:
    """A table in a box of its own that scrolls where the page is too narrow, by keyboard as well."""
    columns = "".join(f'<th scope="col">{head}</th>' for head in heads)
    rows = "".join(f"<tbody>{''.join(body)}</tbody>" for body in bodies)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{caption}"><table class="{look}">'
        f"<caption>{caption}</caption><thead><tr>{columns}</tr></thead>{rows}</table></div>"
    )


def chapter(name: str, title: str, verdict: str, sections: Iterable[str]) -> str:
    """One part of a larger page: its headings are a level lower.

    Args:
        name: its address on the page.
        title: plain text.
        verdict: as `verdict_box` makes it.
    """
    lower = "".join(sections).replace("<h2>", "<h3>").replace("</h2>", "</h3>")
    return f'<article id="{escape(name)}"><h2 class="chapter">{escape(title)}</h2>{verdict}{lower}</article>\n'


def contents(chapters: Iterable[tuple[str, str]]) -> str:
    """Links to chapters, given by name and title."""
    links = "".join(f'<li><a href="#{escape(name)}">{escape(title)}</a></li>' for name, title in chapters)
    return f'<nav aria-label="{say("Contents")}"><ul class="contents">{links}</ul></nav>'
