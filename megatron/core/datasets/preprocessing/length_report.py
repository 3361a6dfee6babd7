"""A page or a picture of how long the documents are. No torch import."""

from __future__ import annotations

import html
import io
import os
from typing import Any

from megatron.core.datasets.preprocessing.stats import (
    BUCKETS_PER_DOUBLING,
    PERCENTILES,
    CorpusStats,
    CorpusTally,
)
from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.optional_imports import require

_PAGE = """<!doctype html>
<meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px sans-serif; max-width: 60em; margin: 2em auto }}
pre {{ background: #f4f4f4; padding: 1em; overflow-x: auto }} svg {{ max-width: 100% }}</style>
<h1>{title}</h1>
<pre>{summary}</pre>
{picture}
"""


def check_report_name(path: str) -> None:
    """Refuse a name that is neither a page nor a picture, and the lack of matplotlib, early.

    Raises:
        ConfigError: another suffix.
        MissingExtraError: matplotlib is not installed.
    """
    if not path.endswith((".html", ".png")):
        raise ConfigError(
            f"--report {path}.",
            rule="a name that ends in .html or .png",
            flags=["--report"],
            fix=f"--report {os.path.splitext(path)[0]}.html",
        )
    require("matplotlib", purpose="--report")


def write_report(
    path: str, tally: CorpusStats, percentiles: dict[str, list[int]], *, title: str, summary: str
) -> None:
    """Write histograms of document lengths, one for each corpus.

    Args:
        percentiles: name of a corpus -> `percentiles_of`.
        path: `.html` (a page with the summary) or `.png`.
    """
    figure = _draw(tally, percentiles)
    if path.endswith(".png"):
        figure.savefig(path, dpi=120)
        return
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    svg = picture.getvalue()
    with open(path, "w", encoding="utf-8") as file:
        file.write(
            _PAGE.format(
                title=html.escape(title),
                summary=html.escape(summary),
                picture=svg[svg.index("<svg") :],
            )
        )


def _draw(tally: CorpusStats, percentiles: dict[str, list[int]]) -> Any:
    matplotlib = require("matplotlib.figure", purpose="--report")
    rows = max(1, len(tally.corpora))
    figure = matplotlib.Figure(figsize=(9, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
    for axis, (name, corpus) in zip(axes, tally.corpora.items(), strict=False):
        edges = [2 ** (i / BUCKETS_PER_DOUBLING) for i in range(len(corpus.buckets) + 1)]
        if corpus.buckets:
            first = next(i for i, count in enumerate(corpus.buckets) if count)
            axis.stairs(corpus.buckets[first:], edges[first:], fill=True, alpha=0.7)
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda length, _: f"{length:,.0f}")
        _label(axis, name, corpus, percentiles[name])
    return figure


def _label(axis: Any, name: str, corpus: CorpusTally, percentiles: list[int]) -> None:
    axis.set_title(f"{name}: {corpus.documents:,} documents, {corpus.tokens:,} tokens")
    axis.set_xlabel("tokens of a document")
    axis.set_ylabel("documents")
    for percent, at, style in zip(PERCENTILES, percentiles, ("-", "--", ":"), strict=True):
        if corpus.documents:
            label = f"{percent} %: {at:,}"
            axis.axvline(at, linestyle=style, color="black", linewidth=1, label=label)
    if corpus.documents:
        axis.legend()
