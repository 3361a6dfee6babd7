"""Several sequences packed one after another into one row of tokens.

Attention needs only the number of the sequence ("document") that each position belongs to. The
whole row is split over context-parallel ranks like one sequence, so any lengths are allowed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.foundation.device import check
from megatron.core.foundation.errors import DataError, refuse_given

FALLING = "seq_idx falls: a document is in two pieces"


@dataclass
class PackedSeqParams:
    """Megatron's descriptor of packed sequences for attention.

    Only the documents are read. `qkv_format`, `max_seqlen_*`, `total_tokens`, `tokens_per_sample`,
    `pad_between_seqs` and `cp_scatter_cache` prepare kernels of other libraries. Their values
    follow from the lengths, and they are ignored.

    `cu_seqlens_*`: int32 [number of sequences + 1], running sums of the lengths, from 0 to the
    length of the whole row, before it is split over ranks.
    """

    qkv_format: str | None = None
    """"sbhd", "bshd" or "thd" (t: tokens of all sequences)."""
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    """Running sums with the padding after each sequence counted in."""
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    local_cp_size: int | None = None
    cp_group: Any = None
    """Ignored: a micro batch is split over the model's own context-parallel ranks. Another number
    of ranks (`local_cp_size`) is refused; without it Megatron ignores `cp_group`, too."""
    total_tokens: int | None = None
    seq_idx: Tensor | None = None
    """int32 [1, t] or [b, s]: number of each token's sequence, never falling along a row. With it
    `cu_seqlens_*` are not needed."""
    tokens_per_sample: Any = None
    pad_between_seqs: bool | None = None
    cp_scatter_cache: Any = None

    def resolve(self, batch: int, total: int, device: torch.device) -> Documents:
        """Return the checked form that attention reads; the model calls it once for all layers.

        Args:
            batch, total: b and s of the micro batch, s before context parallelism.
            device: device of the model.
        Raises:
            DataError: the lengths do not add up to s, or do not describe this batch. All ranks that
                share the micro batch have the same lengths, so all of them raise.
        """
        return Documents(seq_idx=self._document_ids(batch, total, device))

    def _document_ids(self, batch: int, total: int, device: torch.device) -> Tensor:
        """Return the document of each position of the whole sequence: int32 [b, s]."""
        refuse_given(
            "PackedSeqParams",
            {"local_cp_size": self.local_cp_size},
            rule="every micro batch is split over the model's context-parallel ranks",
            fix="leave these out",
        )
        if self.seq_idx is not None:
            return self._given(batch, total, device)
        borders = self.cu_seqlens_q_padded
        if borders is None:
            borders = self.cu_seqlens_q
        if borders is None:
            raise _problem("neither lengths nor seq_idx are given")
        other = (
            self.cu_seqlens_kv if self.cu_seqlens_q_padded is None else self.cu_seqlens_kv_padded
        )
        if other is not None and not torch.equal(other, borders):
            raise _problem("the lengths of keys and of queries differ")
        if batch != 1:
            raise _problem(f"cu_seqlens describe one row of tokens, the micro batch has {batch}")
        steps = borders.diff()
        if len(borders) < 2 or int(borders[0]) != 0 or bool((steps < 0).any()):
            raise _problem("cu_seqlens do not rise from 0")
        if int(borders[-1]) != total:
            raise _problem(f"the lengths add up to {int(borders[-1])}, the row has {total} tokens")
        documents = torch.arange(len(steps), dtype=torch.int32, device=borders.device)
        return documents.repeat_interleave(steps.long()).view(1, total).to(device)

    def _given(self, batch: int, total: int, device: torch.device) -> Tensor:
        ids = self.seq_idx
        assert ids is not None
        if ids.dim() != 2 or ids.shape[1] != total or ids.shape[0] not in (1, batch):
            raise _problem(f"seq_idx has shape {tuple(ids.shape)}, the batch {(batch, total)}")
        ids = ids.expand(batch, total).to(device)
        if not check((ids.diff(dim=1) >= 0).all(), f"{FALLING} Give seq_idx in order."):
            raise _problem(FALLING)
        return ids


@dataclass
class Documents(PackedSeqParams):
    """Packing in the form that layers read: `seq_idx` is checked, [b, s] on the model's device."""

    padding_mask: Tensor | None = None
    """Bool [b, s/cp], True for padding; None without padding."""

    def resolve(self, batch: int, total: int, device: torch.device) -> Documents:
        """Return self, if it describes this micro batch.

        Raises:
            DataError: it describes another micro batch.
        """
        if self.ids.shape != (batch, total) or self.ids.device.type != device.type:
            raise _problem(
                f"documents of {tuple(self.ids.shape)} on {self.ids.device} reached an attention of"
                f" {(batch, total)} on {device}"
            )
        return self

    @property
    def ids(self) -> Tensor:
        """The document of each position of the whole sequence, [b, s], never falling along s."""
        assert self.seq_idx is not None
        return self.seq_idx

    @functools.cached_property
    def numbered(self) -> tuple[Tensor, int]:
        """(Number of each position's document in the micro batch, int64 [b, s]; their count.)

        The host reads the count from the device, once for all layers.
        """
        begins = torch.nn.functional.pad(self.ids.diff(dim=1) != 0, (1, 0), value=True)
        numbers = (begins.flatten().cumsum(0) - 1).view_as(self.ids)
        return numbers, int(numbers[-1, -1]) + 1

    @functools.cached_property
    def positions(self) -> Tensor:
        """The position of each token in its document, int64 [b, s]."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        begins = torch.nn.functional.pad(self.ids.diff(dim=1) != 0, (1, 0), value=True)
        return places - (places * begins).cummax(1).values

    @functools.cached_property
    def attention_mask(self) -> Tensor:
        """Bool [b, 1, s, s], True where a causal attention within documents hides a key.

        For libraries that accept no other form; made at the first use, once for all layers.
        """
        ids = self.ids
        positions = torch.arange(ids.shape[1], device=ids.device)
        ahead = positions[None, :] > positions[:, None]
        return ((ids[:, :, None] != ids[:, None, :]) | ahead).unsqueeze(1)


def _problem(found: str) -> DataError:
    return DataError(
        f"packed sequences: {found}.",
        rule="the documents follow each other and fill the whole sequence, before it is split"
        " over context-parallel ranks",
        flags=["--seq-length", "--context-parallel-size"],
        fix="give cu_seqlens from 0 to the number of tokens, or seq_idx [b, s], to every rank",
    )
