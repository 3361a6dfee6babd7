"""The mixer and MLP of each layer of a model, and the string of letters that describes them.

A layer has a mixer, which moves information along the sequence, and an MLP. In a hybrid model one
letter is one layer, which has only one of the two; a group in brackets is one layer with both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import chain

from megatron.core.foundation.errors import ConfigError

ATTENTION, SPARSE_ATTENTION, COMPRESSED_ATTENTION = "attention", "dsa", "dsv4_hybrid"
GATED_DELTA_NET, KIMI, MAMBA = "gated_delta_net", "kda", "mamba2"
SHORT_CONV = "short_conv"
ATTENTION_AND_MAMBA = "attention_and_mamba2"
_ATTENTIONS = (ATTENTION, SPARSE_ATTENTION, COMPRESSED_ATTENTION, ATTENTION_AND_MAMBA)
DENSE, EXPERTS = "dense", "experts"
LINEAR = "linear"
"""A square matrix in place of a mixer or of an MLP."""
NOTHING = ""
"""The mixer of a layer without one, and likewise its MLP."""


@dataclass(frozen=True, order=True)
class LayerKind:
    """The parts of a layer."""

    mixer: str = ATTENTION
    """attention, sparse or compressed attention, attention beside Mamba-2, the name of a recurrent
    mixer, LINEAR or NOTHING."""
    mlp: str = DENSE
    """dense, experts, LINEAR or NOTHING."""
    has_cross_attention: bool = False
    """Cross attention to the encoder's output follows the mixer."""
    has_final_norm: bool = False
    """The layer is the last layer of the encoder: the encoder's final norm follows it."""
    shares_keys: bool = False
    """Its sparse attention attends to the keys that an earlier layer has chosen."""
    compress_ratio: int = 0
    """Tokens of an entry that its compressed attention attends to; 0 without entries."""
    chooses_entries: bool = False
    """An indexer chooses these entries, which overlap."""

    @property
    def attends(self) -> bool:
        """Whether its mixer is attention, of whatever kind."""
        return self.mixer in _ATTENTIONS

    @property
    def is_sparse(self) -> bool:
        """Whether its mixer is attention to the keys that an indexer chooses."""
        return self.mixer == SPARSE_ATTENTION

    @property
    def is_compressed(self) -> bool:
        """Whether its mixer is attention to a window and compressed entries."""
        return self.mixer == COMPRESSED_ATTENTION

    @property
    def has_indexer(self) -> bool:
        """Whether an indexer of its own chooses keys or compressed entries."""
        return self.chooses_entries or (self.is_sparse and not self.shares_keys)

    @property
    def is_recurrent(self) -> bool:
        """Whether its mixer is a recurrence, with a state of fixed size."""
        return self.mixer not in (*_ATTENTIONS, LINEAR, NOTHING)

    @property
    def recurrence(self) -> str:
        """The recurrent mixer of the layer, alone or beside attention; "" without one."""
        beside = MAMBA if self.mixer == ATTENTION_AND_MAMBA else ""
        return self.mixer if self.is_recurrent else beside

    @property
    def has_experts(self) -> bool:
        """Whether its MLP are experts."""
        return self.mlp == EXPERTS


ATTENTION_AND_MLP = LayerKind()

LETTERS = {
    "M": LayerKind(MAMBA, NOTHING),
    "G": LayerKind(GATED_DELTA_NET, NOTHING),
    "K": LayerKind(KIMI, NOTHING),
    "S": LayerKind(SHORT_CONV, NOTHING),
    "*": LayerKind(ATTENTION, NOTHING),
    "+": LayerKind(ATTENTION, NOTHING),
    "D": LayerKind(SPARSE_ATTENTION, NOTHING),
    "W": LayerKind(COMPRESSED_ATTENTION, NOTHING),
    "C": LayerKind(COMPRESSED_ATTENTION, NOTHING, compress_ratio=4, chooses_entries=True),
    "H": LayerKind(COMPRESSED_ATTENTION, NOTHING, compress_ratio=128),
    "-": LayerKind(NOTHING, DENSE),
    "E": LayerKind(NOTHING, EXPERTS),
}
"""Letters of --hybrid-layer-pattern; + is * in a model whose attention has latents."""
KINDS = LETTERS | {
    f"[{first}{second}]": replace(mixer, mlp=mlp.mlp)
    for first, mixer in LETTERS.items()
    for second, mlp in LETTERS.items()
    if mixer.mixer and mlp.mlp
}
"""Letters, and groups such as [*-], which are one layer with the mixer and the MLP."""
_FLAG = "--hybrid-layer-pattern"
_EXAMPLE = "use letters of M, G, K, S, D, W, C, H, *, +, - and E, for example M-M*-|M-[M-]"


@dataclass(frozen=True)
class HybridPattern:
    """A pattern of letters, taken apart.

    Attributes:
        stages: the layers that predict the next token, for each pipeline stage; one stage if the
            pattern has no |.
        later: the layers that predict each later token, for each depth.
    """

    stages: tuple[tuple[LayerKind, ...], ...]
    later: tuple[tuple[LayerKind, ...], ...]

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer of all stages."""
        return tuple(chain.from_iterable(self.stages))

    def kinds_of_depth(self, depth: int) -> tuple[LayerKind, ...]:
        """Return the kinds of the layers that predict the token `depth` positions after the next.

        A depth without letters copies the last depth that has letters; if no depth has letters, its
        layer copies the last layer of the model.
        """
        depths = self.later or (self.kinds[-1:],)
        return depths[min(depth, len(depths)) - 1]

    @property
    def layers_with_experts(self) -> list[int]:
        """1 for each layer with experts, 0 for others."""
        return [int(kind.has_experts) for kind in self.kinds]

    @property
    def pipeline_layout(self) -> str | None:
        """The layout string of its stages; None if the pattern has no |."""
        if len(self.stages) == 1:
            return None
        stages = ["t" * len(kinds) for kinds in self.stages]
        return "E" + "|".join(stages) + "m" * len(self.later) + "L"


def hybrid_pattern(text: str) -> HybridPattern:
    """Read `M-M*-|M-[M-]/*E/*E`: letters and groups, | between pipeline stages, / before each depth
    of multi-token prediction, which is one layer or several.

    Raises:
        ConfigError: a word is unknown, or there is no letter where a layer must be.
    """
    main, *later = (re.findall(r"(?s)\[..\]|.", part) for part in text.split("/"))
    unknown = sorted((set(main) - {"|"}).union(*later) - set(KINDS))
    has_layers = bool(set(main) - {"|"})
    if unknown or not has_layers or not all(later):
        raise ConfigError(
            f"hybrid_layer_pattern={text!r} has"
            f" {', '.join(unknown) or ('no layer after /' if has_layers else 'no layer')}.",
            rule="a letter is a layer: M Mamba-2, G Gated DeltaNet, K Kimi Delta Attention, S"
            " short convolution, D sparse attention, W, C and H attention to a window and to no, to"
            " chosen or to all compressed entries, * attention, + attention with latents, - MLP, E"
            " experts; [*-] is one layer with the mixer and the MLP; | separates pipeline stages,"
            " / precedes the layers that predict a later token",
            flags=[_FLAG],
            fix=_EXAMPLE,
        )
    stages: list[list[LayerKind]] = [[]]
    for word in main:
        if word == "|":
            stages.append([])
        else:
            stages[-1].append(KINDS[word])
    depths = (tuple(KINDS[word] for word in depth) for depth in later)
    return HybridPattern(tuple(map(tuple, stages)), tuple(depths))
