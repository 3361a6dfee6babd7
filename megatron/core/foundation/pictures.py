"""Figures of matplotlib as PNG, or in a page of HTML that opens without a network."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.optional_imports import require

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px sans-serif; max-width: 75em; margin: 2em auto }}
pre {{ background: #f4f4f4; padding: 1em; overflow-x: auto }} svg {{ max-width: 100% }}</style>
</head><body>
<h1>{title}</h1>
<pre>{text}</pre>
{pictures}
</body></html>
"""


def check_picture_name(path: str | Path, *, flag: str) -> None:
    """Check early that a file name ends in .html or .png, and that matplotlib is installed.

    Raises:
        ConfigError: another suffix.
        MissingExtraError: matplotlib is not installed.
    """
    if Path(path).suffix not in (".html", ".png"):
        raise ConfigError(
            f"{flag} {path}.",
            rule="a name that ends in .html or .png",
            flags=[flag],
            fix=f"{flag} {Path(path).with_suffix('.html')}",
        )
    require("matplotlib", purpose=flag)


def new_figure(width: float, height: float, *, purpose: str) -> Any:
    """Return an empty figure of this size in inches, which needs no screen.

    Args:
        purpose: the flag that requires it, for the error.
    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figures = require("matplotlib.figure", purpose=purpose)
    return figures.Figure(figsize=(width, height), layout="constrained")


def page(figures: Sequence[Any], *, title: str, text: str) -> str:
    """Return a page of HTML with a title, a text in fixed width, and the figures as SVG."""
    return _PAGE.format(
        title=html.escape(title),
        text=html.escape(text),
        pictures="\n".join(map(_svg, figures)),
    )


def save_figure(figure: Any, path: str | Path, *, title: str, text: str) -> None:
    """Write a figure as `.png`, or as `.html`: a page with `title` and `text` around it."""
    path = Path(path)
    if path.suffix == ".png":
        figure.savefig(path, dpi=120)
    else:
        path.write_text(page([figure], title=title, text=text), encoding="utf-8")


def _svg(figure: Any) -> str:
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    text = picture.getvalue()
    return text[text.index("<svg") :]
