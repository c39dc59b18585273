"""Check that the built site loads nothing from another host: python -m docs.tools.offline [FOLDER]."""

from __future__ import annotations

import re
import sys
from pathlib import Path

__all__ = ["loads", "main"]

REMOTE = r"(?:https?:)?//(?!www\.w3\.org/)"
LOADED = [
    re.compile(rf"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?({REMOTE}[^\"'\s>]+)", re.IGNORECASE),
    re.compile(
        rf"<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|icon|manifest))"
        rf"[^>]*\bhref=[\"']?({REMOTE}[^\"'\s>]+)",
        re.IGNORECASE,
    ),
    re.compile(rf"(?:@import\s+|url\()[\"']?({REMOTE}[^\"')\s]+)", re.IGNORECASE),
]


def loads(text: str) -> list[str]:
    """The addresses on other hosts that a page or style sheet makes a browser load; links are none."""
    return [address for pattern in LOADED for address in pattern.findall(text)]


def main(arguments: list[str]) -> int:
    site = Path(arguments[0] if arguments else "out/site")
    pages = [page for kind in ("html", "css") for page in sorted(site.rglob(f"*.{kind}"))]
    found = [f"{page}: loads {address}" for page in pages for address in loads(page.read_text("utf-8"))]
    print(*found, sep="\n") if found else print(
        f"offline: {len(pages)} pages and style sheets load nothing from outside"
    )
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
