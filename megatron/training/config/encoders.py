"""Flags of encoders and of the words that are hidden from them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import flag

ARCHITECTURES = ("gpt", "bert")
"""What a run can train; the script says which."""


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """Encoders: the heads of BERT, and the words that are hidden in samples."""

    architecture: str = flag("gpt", choices=ARCHITECTURES)
    """What is trained. The script sets it: pretrain_bert.py trains a BERT."""
    bert_binary_head: bool = flag(True, "--bert-no-binary-head", part_of="architecture")
    """Leave out the head that tells whether two pieces of text are in order, and make samples of
    one piece."""
    mask_prob: float = flag(0.15, part_of="architecture")
    """Share of the tokens of a sample that is hidden."""
    short_seq_prob: float = flag(0.1, part_of="architecture")
    """Probability that a sample is shorter than --seq-length."""
