"""Number of parameters of a model and its parts. Pure arithmetic on settings.

Legend: h hidden, n query heads, g key/value heads, d width of a head, f width of the MLP,
v rows of the vocabulary, s sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from megatron.core.ssm.mixer_sizes import MixerSizes
from megatron.core.ssm.mixers import RECURRENT_MIXERS
from megatron.core.transformer.config.layer_kinds import DENSE, EXPERTS, LayerKind
from megatron.core.transformer.norm import NORMS
from megatron.training.metrics.latent_sizes import IndexerSizes, LatentSizes

if TYPE_CHECKING:
    from megatron.training.config.resolved import ResolvedRun


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Mixture-of-experts layers; see `megatron.core.transformer.moe`."""

    num_experts: int
    topk: int
    width: int
    latent: int = 0
    """Width of the experts' inputs and outputs; 0 is the hidden size."""
    shared_width: int = 0
    """Width of the shared expert; 0 without a shared expert."""
    has_shared_gate: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes that determine parameters and FLOPs."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int
    seq_length: int
    max_position_embeddings: int = 0
    """Rows of a learned position table; 0 without a table."""
    is_gated: bool = False
    is_tied: bool = True
    normalization: str = "LayerNorm"
    has_linear_bias: bool = True
    has_qkv_bias: bool = True
    has_qk_norm: bool = False
    has_output_gate: bool = False
    num_layer_norms: int = 2
    window: int | None = None
    """Keys to the left of a query that it attends to; None is all keys."""
    windowed_share: float = 1.0
    """Share of the attention layers with the window."""
    has_sinks: bool = False
    """Each head learns the score of a key without value."""
    mtp_num_layers: int = 0
    """Number of predicted tokens after the next one; layers of one depth predict each."""
    mtp_kinds: tuple[tuple[LayerKind, ...], ...] = ()
    """Layers of each depth, or of a single depth that all predicted tokens share."""
    latent: LatentSizes | None = None
    indexer: IndexerSizes | None = None
    experts: ExpertSizes | None = None
    mixers: Mapping[str, MixerSizes] = field(default_factory=dict)
    """Recurrent mixer of some layer -> sizes."""
    kinds: tuple[LayerKind, ...] = ()
    """Kind of each layer; if empty, all layers have attention and a dense MLP."""
    is_bidirectional: bool = False
    """A query attends to the keys on both sides."""
    decoder_seq_length: int = 0
    """Decoder tokens per sample of an encoder and decoder; 0 for models of one stack."""
    num_position_buckets: int = 0
    """Rows of each stack's table of relative positions."""
    vision_parameters: int = 0
    """Parameters of the image encoder on the first stage; its operations are not counted."""
    num_tokentypes: int = 0
    has_word_head: bool = False
    """A dense layer and a norm precede the head, and the head has a bias."""
    has_binary_head: bool = False
    """A dense layer on the first token, and a head of two classes."""

    @staticmethod
    def from_settings(run: ResolvedRun, vocab_size: int | None = None) -> ModelSize:
        """Return the sizes of a run; `vocab_size` overrides the padded size of the settings."""
        learned = run.model.position_embedding_type == "learned_absolute"
        window = run.model.window_size
        traits = run.encoders.traits
        kinds = run.model.kinds_of_layers(run.experts.layers_with_experts(run.model.num_layers))
        if traits.has_two_stacks:
            kinds = _kinds_of_stacks(kinds, run.model.encoder_num_layers or 0)
        mtp_kinds = run.transformer_config.prediction_kinds()
        every_kind = (*kinds, *chain.from_iterable(mtp_kinds))
        has_buckets = run.model.position_embedding_type == "relative"
        return ModelSize(
            num_layers=run.model.num_layers,
            hidden_size=run.model.hidden_size,
            num_attention_heads=run.model.num_attention_heads,
            num_query_groups=run.model.num_query_groups or 0,
            kv_channels=run.model.kv_channels or 0,
            ffn_hidden_size=run.model.ffn_hidden_size or 0,
            vocab_size=vocab_size or run.tokenizer.padded_vocab_size or 0,
            seq_length=run.model.seq_length,
            max_position_embeddings=run.model.max_position_embeddings if learned else 0,
            is_gated=run.model.swiglu or run.model.geglu or run.model.quick_geglu,
            is_tied=not run.model.untie_embeddings_and_output_weights,
            normalization=run.model.normalization,
            has_linear_bias=run.model.add_bias_linear,
            has_qkv_bias=run.model.add_bias_linear or run.model.add_qkv_bias,
            has_qk_norm=run.model.qk_layernorm,
            has_output_gate=run.model.attention_output_gate,
            num_layer_norms=4 if run.model.sandwich_norm else 2,
            windowed_share=_windowed_share(run, kinds),
            has_sinks=run.model.softmax_type == "learnable",
            mtp_num_layers=run.latent_attention.mtp_num_layers or 0,
            mtp_kinds=mtp_kinds,
            latent=LatentSizes.of(run.latent_attention),
            indexer=IndexerSizes.of(run.model, every_kind),
            experts=_expert_sizes(run),
            mixers={
                mixer: RECURRENT_MIXERS[mixer].sizes_of(run.transformer_config)
                for mixer in sorted({kind.mixer for kind in every_kind if kind.is_recurrent})
            },
            kinds=kinds,
            window=window[0] if window is not None and window[0] >= 0 else None,
            is_bidirectional=traits.is_bidirectional,
            decoder_seq_length=(run.encoders.decoder_seq_length or 0) * traits.has_two_stacks,
            num_position_buckets=run.encoders.relative_attention_num_buckets * has_buckets,
            vision_parameters=run.vision.num_parameters(run.model.hidden_size)
            if traits.has_images
            else 0,
            num_tokentypes=traits.num_tokentypes,
            has_word_head=traits.has_word_head,
            has_binary_head=traits.has_word_head and run.encoders.bert_binary_head,
        )

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer."""
        return self.kinds or (LayerKind(),) * self.num_layers

    @property
    def passed_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of all layers that process a token, including multi-token prediction."""
        repeats = self.mtp_num_layers // max(1, len(self.mtp_kinds))
        return self.layer_kinds + self._built_mtp_kinds * repeats

    @property
    def _built_mtp_kinds(self) -> tuple[LayerKind, ...]:
        return tuple(chain.from_iterable(self.mtp_kinds))

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with experts, without multi-token prediction."""
        return sum(kind.has_experts for kind in self.layer_kinds)

    @property
    def qkv_width(self) -> int:
        """Width of a token's queries, keys and values: (n + 2g) d, (2n + 2g) d with an output gate,
        or the widths of multi-latent attention."""
        if self.latent is not None:
            return self.num_attention_heads * self.latent.per_head
        heads = self.num_attention_heads * (1 + self.has_output_gate) + 2 * self.num_query_groups
        return heads * self.kv_channels

    @property
    def attention_width(self) -> int:
        """Width of the attention's output, n d, or n times the width of a value head."""
        if self.latent is not None:
            return self.num_attention_heads * self.latent.value
        return self.num_attention_heads * self.kv_channels

    def token_matrices(self, kind: LayerKind) -> int:
        """Elements of the matrices that multiply one token in a layer, with `topk` experts."""
        count = 0
        if kind.attends:
            count += self._attention_matrices + self._indexer_matrices(kind)
        elif kind.is_recurrent:
            count += self.mixers[kind.mixer].matrices(self.hidden_size)
        count += kind.has_cross_attention * self._attention_matrices
        if kind.mlp == DENSE:
            count += self._mlp_matrices(self.ffn_hidden_size)
        elif kind.mlp == EXPERTS:
            sizes = self._experts
            count += self._shared_matrices + sizes.topk * self._mlp_matrices(
                sizes.width, sizes.latent
            )
        return count

    def _indexer_matrices(self, kind: LayerKind) -> int:
        if not kind.is_sparse:
            return 0
        assert self.indexer is not None and self.latent is not None
        return self.indexer.matrices(self.hidden_size, self.latent.query_latent)

    @property
    def _experts(self) -> ExpertSizes:
        assert self.experts is not None, "a layer with experts in a model without experts"
        return self.experts

    @property
    def _shared_matrices(self) -> int:
        """Elements of the router, the shared expert, its gate, and the latent projections."""
        sizes = self._experts
        shared = self._mlp_matrices(sizes.shared_width) + sizes.has_shared_gate * self.hidden_size
        return (sizes.num_experts + 2 * sizes.latent) * self.hidden_size + shared

    def _mlp_matrices(self, width: int, latent: int = 0) -> int:
        return (3 if self.is_gated else 2) * (latent or self.hidden_size) * width

    def _mlp_biases(self, width: int, latent: int = 0) -> int:
        if not (self.has_linear_bias and width):
            return 0
        return width * (2 if self.is_gated else 1) + (latent or self.hidden_size)

    @property
    def _attention_matrices(self) -> int:
        h = self.hidden_size
        projections = h * self.qkv_width
        if self.latent is not None:
            projections = self.latent.matrices(h, self.num_attention_heads)
        return projections + self.attention_width * h

    @property
    def score_width(self) -> int:
        """Multiplications for one pair of query and key, with its value, over all heads."""
        if self.latent is not None:
            return self.num_attention_heads * (self.latent.query + self.latent.value)
        return 2 * self.attention_width

    @property
    def head_matrix(self) -> int:
        """Elements of the output head, even if it is tied to the embedding."""
        return self.hidden_size * self.vocab_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden size."""
        return self._norm_parameters(self.hidden_size)

    def _norm_parameters(self, width: int) -> int:
        return sum(NORMS[self.normalization].sizes(width).values())

    def layer_parameters(self, kind: LayerKind) -> int:
        """Parameters of one layer without routed experts."""
        norms = self.num_layer_norms // 2 * self.norm_parameters
        count = 0
        if kind.mixer:
            count += norms
            count += (
                self._attention_parameters
                if kind.attends
                else self.mixers[kind.mixer].parameters(self.hidden_size)
            )
        if kind.is_sparse and self.indexer is not None:
            norm = sum(NORMS["LayerNorm"].sizes(self.indexer.width).values())
            count += self._indexer_matrices(kind) + norm
        if kind.has_cross_attention:
            count += self._attention_parameters + self.norm_parameters
        count += kind.has_final_norm * self.norm_parameters
        if kind.mlp == DENSE:
            width = self.ffn_hidden_size
            count += norms + self._mlp_matrices(width) + self._mlp_biases(width)
        elif kind.mlp == EXPERTS:
            sizes = self._experts
            biases = sizes.num_experts  # of the router
            if sizes.latent:
                biases += sizes.latent + self.hidden_size
            biases *= self.has_linear_bias
            count += norms + self._shared_matrices + self._mlp_biases(sizes.shared_width) + biases
        return count

    @property
    def routed_parameters(self) -> int:
        """Parameters of the routed experts of one layer."""
        if self.experts is None:
            return 0
        sizes = self.experts.width, self.experts.latent
        one = self._mlp_matrices(*sizes) + self._mlp_biases(*sizes)
        return self.experts.num_experts * one

    @property
    def _attention_parameters(self) -> int:
        h = self.hidden_size
        count = self._attention_matrices
        count += self.num_attention_heads * self.has_sinks
        if self.has_linear_bias:
            count += h
        if self.latent is not None:
            widths = [self.latent.latent, self.latent.query_latent]
            return count + self.has_qk_norm * sum(map(self._norm_parameters, filter(None, widths)))
        if self.has_qkv_bias:
            count += self.qkv_width
        if self.has_qk_norm:
            count += 2 * self._norm_parameters(self.kv_channels)
        return count

    @property
    def mtp_parameters(self) -> int:
        """Parameters of multi-token prediction: layers, joining matrices and norms."""
        joining = 2 * self.hidden_size**2 + 3 * self.norm_parameters
        return len(self.mtp_kinds) * joining + self._layers(self._built_mtp_kinds)

    def _layers(self, kinds: Iterable[LayerKind]) -> int:
        """Parameters of layers of these kinds."""
        return sum(
            self.layer_parameters(kind) + kind.has_experts * self.routed_parameters
            for kind in kinds
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that process one token: all but the experts that it is not routed to."""
        if self.experts is None:
            return self.total_parameters
        layers = sum(k.has_experts for k in self.layer_kinds + self._built_mtp_kinds)
        met = self.routed_parameters * self.experts.topk // self.experts.num_experts
        return self.total_parameters - layers * (self.routed_parameters - met)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the word, position and token type tables and of the image encoder."""
        rows = self.max_position_embeddings + self.num_tokentypes
        return self.head_matrix + rows * self.hidden_size + self.vision_parameters

    @property
    def further_head_parameters(self) -> int:
        """Parameters of the heads without the matrix of the vocabulary."""
        dense = self.hidden_size * (self.hidden_size + 1)
        count = self.has_word_head * (dense + self.norm_parameters + self.vocab_size)
        return count + self.has_binary_head * (dense + 2 * (self.hidden_size + 1))

    @property
    def total_parameters(self) -> int:
        """All parameters of the model; a tied head counts once."""
        head = self.further_head_parameters + (0 if self.is_tied else self.head_matrix)
        layers = self._layers(self.layer_kinds) + self.mtp_parameters
        ends = self.embedding_parameters + self.norm_parameters + head
        return layers + ends + self.position_tables

    @property
    def position_tables(self) -> int:
        """Elements of the tables of relative positions of both stacks."""
        return 2 * self.num_position_buckets * self.num_attention_heads

    def stage_routed_parameters(self, kinds: Iterable[LayerKind], *, predicts: bool) -> int:
        """Parameters of one pipeline stage's routed experts, before any split."""
        held = [*kinds, *(self._built_mtp_kinds if predicts else ())]
        return sum(kind.has_experts for kind in held) * self.routed_parameters

    def stage_parameters(
        self,
        kinds: Iterable[LayerKind],
        *,
        has_embedding: bool,
        has_loss: bool,
        predicts: bool | None = None,
    ) -> int:
        """Parameters of one pipeline stage, before any tensor-parallel split.

        The last stage has its own copy of a tied embedding.

        Args:
            kinds: kinds of the stage's layers.
            predicts: whether the stage has the final norm and multi-token prediction. Default:
                `has_loss`.
        """
        predicts = has_loss if predicts is None else predicts
        count = self._layers(kinds) + self.position_tables
        if has_embedding:
            count += self.embedding_parameters
        if predicts:
            count += self.norm_parameters + self.mtp_parameters
            if self.mtp_num_layers and not has_embedding and not (self.is_tied and has_loss):
                count += self.head_matrix  # a copy of the embedding
        if has_loss:
            count += self.further_head_parameters
            count += 0 if self.is_tied and has_embedding else self.head_matrix
        return count


def _kinds_of_stacks(kinds: tuple[LayerKind, ...], num_encoder: int) -> tuple[LayerKind, ...]:
    """Add the final norm of the encoder and the cross attention of the decoder to the kinds."""
    encoder = list(kinds[:num_encoder])
    encoder[-1:] = [replace(kind, has_final_norm=True) for kind in encoder[-1:]]
    decoder = [replace(kind, has_cross_attention=True) for kind in kinds[num_encoder:]]
    return (*encoder, *decoder)


def _windowed_share(run: ResolvedRun, kinds: Iterable[LayerKind]) -> float:
    attending = [number for number, kind in enumerate(kinds, 1) if kind.attends]
    windowed = [run.model.window_of(number) is not None for number in attending]
    return sum(windowed) / max(1, len(windowed))


def _expert_sizes(run: ResolvedRun) -> ExpertSizes | None:
    if not run.experts.num_moe_experts:
        return None
    return ExpertSizes(
        num_experts=run.experts.num_moe_experts,
        topk=run.experts.moe_router_topk,
        width=run.experts.moe_ffn_hidden_size or run.model.ffn_hidden_size or 0,
        latent=run.experts.moe_latent_size or 0,
        shared_width=run.experts.moe_shared_expert_intermediate_size or 0,
        has_shared_gate=run.experts.moe_shared_expert_gate,
    )
