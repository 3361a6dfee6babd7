"""A page of HTML that needs nothing but itself: style, script and pictures are inside."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib import resources

from megatron.training.reports.line_chart import BOTTOM, LEFT, RIGHT, TOP

_NO_NETWORK = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The browser loads nothing from elsewhere, whatever names and messages of a run contain."""


def page_html(*, title: str, header: str, sections: Iterable[str], footer: str) -> str:
    """Return a whole page.

    Args:
        title: plain text, for the window.
        header, sections, footer: HTML.
    """
    folder = resources.files(__package__)
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    script = folder.joinpath("page.js").read_text(encoding="utf-8")
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_NO_NETWORK}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{style}</style></head>",
            # The part of every chart in which curves are drawn.
            '<body><svg width="0" height="0" style="position:absolute"><clipPath id="plot">',
            f'<rect x="{LEFT}" y="{TOP - 4}" width="{RIGHT - LEFT + 4}" '
            f'height="{BOTTOM - TOP + 6}"/></clipPath></svg>',
            f"<main><header>{header}</header>",
            *sections,
            f"<footer>{footer}</footer></main>",
            f"<script>{script}</script></body></html>",
            "",
        )
    )


def section_html(title: str, *parts: str) -> str:
    """Return a part of the page under its title; nothing if there are no parts."""
    inside = "\n".join(part for part in parts if part)
    return f"<section><h2>{html.escape(title)}</h2>\n{inside}</section>" if inside else ""


def figure_list_html(figures: Sequence[tuple[str, str, str]]) -> str:
    """Return key figures: (what, value, remark)."""
    items = (
        f"<li><span>{html.escape(what)}</span><strong>{html.escape(value)}</strong>"
        f"<em>{html.escape(remark)}</em></li>"
        for what, value, remark in figures
    )
    return f'<ul class="figures">{"".join(items)}</ul>'


def table_html(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()
) -> str:
    """Return a table; nothing if it has no rows.

    Args:
        rows: plain text.
        numbers: columns of numbers, which are aligned at the right.
    """
    body = [
        "<tr>" + "".join(_cell("td", cell, column, numbers) for column, cell in enumerate(row))
        for row in rows
    ]
    if not body:
        return ""
    titles = "".join(_cell("th", cell, column, numbers) for column, cell in enumerate(head))
    return (
        f'<div class="scroll"><table><thead><tr>{titles}</thead><tbody>{"".join(body)}'
        "</tbody></table></div>"
    )


def _cell(tag: str, text: str, column: int, numbers: Sequence[int]) -> str:
    kind = ' class="number"' if column in numbers else ""
    return f"<{tag}{kind}>{html.escape(text)}</{tag}>"


def card_html(*parts: str) -> str:
    """Return parts of HTML on a common background; nothing if all are empty."""
    inside = "".join(parts)
    return f'<div class="card">{inside}</div>' if inside else ""


def details_html(summary: str, inside: str) -> str:
    """Return what is shown when the reader opens it; nothing if there is nothing inside."""
    if not inside:
        return ""
    return f"<details><summary>{html.escape(summary)}</summary>{inside}</details>"
