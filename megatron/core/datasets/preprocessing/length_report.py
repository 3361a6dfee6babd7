"""A page or a picture of how long the documents are. No torch import."""

from __future__ import annotations

from typing import Any

from megatron.core.datasets.preprocessing.stats import (
    BUCKETS_PER_DOUBLING,
    PERCENTILES,
    CorpusStats,
    CorpusTally,
)
from megatron.core.foundation.pictures import new_figure, save_figure


def write_report(
    path: str, tally: CorpusStats, percentiles: dict[str, list[int]], *, title: str, summary: str
) -> None:
    """Write histograms of document lengths, one for each corpus.

    Args:
        percentiles: name of a corpus -> `percentiles_of`.
        path: `.html` (a page with the summary) or `.png`.
    """
    save_figure(_draw(tally, percentiles), path, title=title, text=summary)


def _draw(tally: CorpusStats, percentiles: dict[str, list[int]]) -> Any:
    rows = max(1, len(tally.corpora))
    figure = new_figure(9, 3.2 * rows, purpose="--report")
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
