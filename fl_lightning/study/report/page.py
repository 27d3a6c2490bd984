"""``report.html``: the report in one file, with tables that can be sorted and figures that can be
enlarged.

It is made of the text of ``report.md``. Figures are in it as SVG, and nothing is fetched: a browser
may load no other file, and run no script but the one of this page.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from hashlib import sha256
from html import escape, unescape
from pathlib import Path

EXTENSIONS = ["tables", "fenced_code", "toc", "sane_lists"]
"""What of Markdown beyond its core a report uses; the headings get ids for the contents."""
FRAME = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<nav aria-label="Contents">{contents}</nav>
<main>
{body}
</main>
<dialog aria-label="Figure"><img alt=""></dialog>
<script>{script}</script>
</body>
</html>
"""


def page(text: str, figures: Mapping[str, bytes]) -> str:
    """Return the page.

    Args:
        text: the report in Markdown. HTML in it, such as in the name of a method, is shown as text.
        figures: the figures as SVG, by name.
    """
    from markdown import Markdown

    converter = Markdown(extensions=EXTENSIONS, output_format="html")
    converter.preprocessors.deregister("html_block")
    converter.inlinePatterns.deregister("html")
    body = converter.convert(text)
    body = re.sub(r"<table>.*?</table>", _scrolling, body, flags=re.DOTALL)
    body = re.sub(
        r'<img alt="([^"]*)" src="figures/[^"]*">', lambda found: _figure(found[1], figures), body
    )
    style, script = (
        Path(__file__).with_name(f"report.{kind}").read_text("utf-8") for kind in ("css", "js")
    )
    allowed = base64.b64encode(sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    title = next(
        (line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), "report"
    )
    contents = converter.toc  # type: ignore[attr-defined]
    return FRAME.format(
        policy=policy, title=escape(title), style=style, contents=contents, body=body, script=script
    )


def _scrolling(found: re.Match[str]) -> str:
    return f'<div class="wide" tabindex="0">{found[0]}</div>'


def _figure(name: str, figures: Mapping[str, bytes]) -> str:
    """Return a figure in the page."""
    data = base64.b64encode(figures[unescape(name)]).decode()
    image = f'<img alt="{name}" src="data:image/svg+xml;base64,{data}">'
    return f'<figure><button type="button" title="Enlarge">{image}</button></figure>'
