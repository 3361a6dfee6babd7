"""What a blend gives to a run: samples and share of each corpus, and how often it is repeated."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.datasets.blended_dataset import BlendedDataset

_MAX_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Share:
    """One corpus of a blend."""

    path: str
    asked: float
    """Weight as a part of all weights; without weights, the corpus's part of all samples."""
    num_samples: int
    """That the blend takes of it."""
    realised: float
    """Part of all samples of the blend."""
    num_epochs: float | None
    """How often its documents are read; None where the dataset does not tell."""


def shares_of(dataset: Sized) -> list[Share]:
    """Return what each corpus gives to a dataset; empty if it is made of none (mock data)."""
    if isinstance(dataset, BlendedDataset):
        return [
            _share(member, asked, taken, len(dataset))
            for member, asked, taken in zip(
                dataset.datasets, dataset.weights, dataset.samples_of_datasets(), strict=True
            )
        ]
    if getattr(dataset, "dataset_path", None) is None:
        return []
    return [_share(dataset, 1.0, len(dataset), len(dataset))]


def _share(member: Any, asked: float, taken: int, size: int) -> Share:
    epoch = getattr(member, "samples_per_epoch", None)
    return Share(
        path=member.dataset_path or "",
        asked=float(asked),
        num_samples=int(taken),
        realised=taken / max(size, 1),
        num_epochs=taken / epoch if epoch else None,
    )


def lines_of(shares: Sequence[Share], *, max_lines: int = _MAX_LINES) -> Iterator[str]:
    """Yield a table: a heading, and a line for each corpus up to `max_lines`."""
    width = max([6, *(len(os.path.basename(share.path)) for share in shares[:max_lines])])
    yield f"{'corpus':<{width}} {'samples':>14} {'share':>9} {'asked':>9} {'epochs':>9}"
    for share in shares[:max_lines]:
        epochs = "-" if share.num_epochs is None else f"{share.num_epochs:.3f}"
        yield (
            f"{os.path.basename(share.path):<{width}} {share.num_samples:>14,} "
            f"{share.realised:>9.4%} {share.asked:>9.4%} {epochs:>9}"
        )
    if len(shares) > max_lines:
        known = [share.num_epochs for share in shares if share.num_epochs is not None]
        spread = f", {min(known):.3f} to {max(known):.3f} epochs" if known else ""
        off = float(np.max([abs(share.realised - share.asked) for share in shares]))
        yield f"... {len(shares)} corpora{spread}; no share is off by more than {off:.4%}"
