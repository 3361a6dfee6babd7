"""The first positions of the documents in a sample, and the masks that follow from them.

Legend: s sequence, b micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(positions: Tensor) -> Tensor:
    """Return the mask that forbids looking ahead: bool [1, s, s], True = forbidden."""
    return (positions[None, :] > positions[:, None]).unsqueeze(0)


def document_starts(tokens: Tensor, eod: int) -> Tensor:
    """Return, for each token, where its document begins: int64 [s].

    An end-of-document token belongs to the document it ends.
    """
    starts = torch.zeros_like(tokens)
    ends = torch.nonzero(tokens[:-1].eq(eod)).flatten()
    starts[ends + 1] = ends + 1
    return torch.cummax(starts, 0).values


def across_documents(starts: Tensor) -> Tensor:
    """Return the mask that keeps documents apart: bool [1, s, s], True = forbidden."""
    return (starts[:, None] != starts[None, :]).unsqueeze(0)


def attention_mask(starts: Tensor) -> Tensor:
    """Return the whole mask of samples with several documents: bool [b, 1, s, s], True = forbidden.

    Only this function makes [s, s] masks, on the device that uses them: the loader, its worker
    processes and the copy to the device handle [b, s].

    Args:
        starts: [b, s], from `document_starts`.
    """
    positions = torch.arange(starts.shape[-1], device=starts.device)
    ahead = positions[None, :] > positions[:, None]
    return ((starts[:, :, None] != starts[:, None, :]) | ahead).unsqueeze(1)
