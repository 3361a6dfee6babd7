"""Write figures into a directory: each as PNG, and all of them in one page of HTML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.foundation.optional_imports import require
from megatron.core.foundation.pictures import page, save_figure

FLAG = "--pictures"


def prepare_pictures(directory: Path | None) -> None:
    """Make the directory, if there is one, before anything is computed.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if directory is not None:
        require("matplotlib", purpose=FLAG)
        directory.mkdir(parents=True, exist_ok=True)


def write_pictures(
    directory: Path, name: str, figures: Mapping[str, Any], *, title: str, text: str
) -> None:
    """Write `FIGURE.png` for each figure, and `name.html` with `text`, which opens offline.

    Args:
        figures: of matplotlib, by name.
    """
    for each, figure in figures.items():
        save_figure(figure, directory / f"{each}.png", title=title, text=text)
    html = page(list(figures.values()), title=title, text=text)
    (directory / f"{name}.html").write_text(html, encoding="utf-8")
