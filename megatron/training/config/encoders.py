"""Flags of encoders and of the words that are hidden from them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import flag


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What distinguishes the models of one script; the defaults are those of a GPT."""

    has_two_stacks: bool = False
    """A decoder follows an encoder, to whose output its layers attend."""
    is_bidirectional: bool = False
    """A query sees the keys of both sides, and padding is a document of its own."""
    is_padded: bool = False
    """Samples end with padding: every stage reads where."""
    num_tokentypes: int = 0
    has_images: bool = False
    """Tokens stand for images, which an encoder on the first stage reads."""
    has_word_head: bool = False
    """A dense layer and a norm come before the head, which has a bias."""


ARCHITECTURES = {
    "gpt": Architecture(),
    "bert": Architecture(
        is_bidirectional=True, is_padded=True, num_tokentypes=2, has_word_head=True
    ),
    "t5": Architecture(has_two_stacks=True, is_padded=True),
    "vlm": Architecture(has_images=True, is_padded=True),
}
"""What a run can train; the script says which."""


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """Encoders: the heads of BERT, the decoder of T5, and the words that are hidden in samples."""

    architecture: str = flag("gpt", choices=tuple(ARCHITECTURES))
    """What is trained. The script sets it: pretrain_bert.py trains a BERT, pretrain_t5.py a T5,
    pretrain_vlm.py a language model that reads images."""
    decoder_num_layers: int | None = flag(None, part_of="architecture")
    """Layers of T5's decoder. Default as many as the encoder has."""
    decoder_seq_length: int | None = flag(None, part_of="architecture")
    """Tokens that T5's decoder writes."""
    relative_attention_num_buckets: int = flag(32, part_of="architecture")
    """Buckets of distances between query and key, each with a bias of a head's scores (arXiv
    1910.10683, section 2.1)."""
    relative_attention_max_distance: int = flag(128, part_of="architecture")
    """Distance from which on all share the last bucket."""
    scale_t5_logits: bool = flag(False, part_of="architecture")
    """Divide what enters T5's head by the root of the hidden size, as the first T5 does."""
    bert_binary_head: bool = flag(True, "--bert-no-binary-head", part_of="architecture")
    """Leave out the head that tells whether two pieces of text are in order, and make samples of
    one piece."""
    mask_prob: float = flag(0.15, part_of="architecture")
    """Share of the tokens of a sample that is hidden."""
    short_seq_prob: float = flag(0.1, part_of="architecture")
    """Probability that a sample is shorter than --seq-length."""

    @property
    def traits(self) -> Architecture:
        """What distinguishes the model."""
        return ARCHITECTURES[self.architecture]
