"""Number of parameters and sizes of the matrices of a model. Pure arithmetic on its config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from megatron.core.ssm.mixer_sizes import MixerSizes
from megatron.core.ssm.mixers import RECURRENT_MIXERS
from megatron.core.transformer.config.layer_kinds import DENSE, EXPERTS, LINEAR, LayerKind
from megatron.core.transformer.norm import NORMS
from megatron.core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from megatron.training.config.resolved import ResolvedRun


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Parameters and products of the model that a config describes.

    Letters in comments: h hidden size, n query heads, g key/value heads, d width of a head.
    """

    config: TransformerConfig
    vocab_size: int
    """Rows of the embedding, with padding."""
    seq_length: int
    is_tied: bool = True
    """The output head uses the embedding's weight."""
    shares_key_value: bool = False
    """Of one layer: it reads the keys and values of an earlier layer."""
    learned_positions: int = 0
    """Rows of a learned position table; 0: no table."""
    position_buckets: int = 0
    """Rows of the table of relative positions in each stack; 0: no tables."""
    is_bidirectional: bool = False
    """A query attends to keys on both sides."""
    decoder_seq_length: int = 0
    """Tokens of the decoder behind an encoder that reads `seq_length` tokens; 0: one stack."""
    vision_parameters: int = 0
    """Parameters of an image encoder. Its operations are not counted."""
    num_tokentypes: int = 0
    has_word_head: bool = False
    """A dense layer and a norm precede the head, and the head has a bias."""
    has_binary_head: bool = False
    """A dense layer on the first token, and a head of two classes."""

    @staticmethod
    def from_settings(run: ResolvedRun, vocab_size: int | None = None) -> ModelSize:
        """Read the sizes of a run; `vocab_size` replaces its padded vocabulary."""
        model, encoders, traits = run.model, run.encoders, run.encoders.traits
        positions = model.position_embedding_type
        return ModelSize(
            config=run.transformer_config,
            vocab_size=vocab_size or run.tokenizer.padded_vocab_size or 0,
            seq_length=model.seq_length,
            is_tied=not model.untie_embeddings_and_output_weights,
            learned_positions=model.max_position_embeddings * (positions == "learned_absolute"),
            position_buckets=encoders.relative_attention_num_buckets * (positions == "relative"),
            is_bidirectional=traits.is_bidirectional,
            decoder_seq_length=(encoders.decoder_seq_length or 0) * traits.has_two_stacks,
            vision_parameters=run.vision.num_parameters(model.hidden_size) * traits.has_images,
            num_tokentypes=traits.num_tokentypes,
            has_word_head=traits.has_word_head,
            has_binary_head=traits.has_word_head and encoders.bert_binary_head,
        )

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer. The last layer of an encoder has a final norm; layers of a decoder
        behind it have cross-attention."""
        kinds = self.config.layer_kinds()
        num_encoder = self.config.encoder_num_layers
        if not num_encoder:
            return kinds
        encoder = [*kinds[: num_encoder - 1], replace(kinds[num_encoder - 1], has_final_norm=True)]
        decoder = [replace(kind, has_cross_attention=True) for kind in kinds[num_encoder:]]
        return (*encoder, *decoder)

    @property
    def prediction_layers(self) -> tuple[LayerKind, ...]:
        """Kinds of the layers of multi-token prediction that have parameters of their own."""
        return tuple(chain.from_iterable(self.config.prediction_kinds()))

    @property
    def prediction_depths(self) -> int:
        """Tokens after the next one that are predicted."""
        return self.config.mtp_num_layers or 0

    @cached_property
    def passed_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of all layers that a token passes; a shared prediction layer repeats."""
        repeats = self.prediction_depths // max(1, len(self.config.prediction_kinds()))
        return self.layer_kinds + self.prediction_layers * repeats

    def of_layer(self, layer_number: int) -> ModelSize:
        """Return the sizes of one layer, by its 1-based number in the whole model."""
        config, shares = (
            self.config.of_layer(layer_number),
            self.config.shares_key_value(layer_number)
            or self.config.latent_source(layer_number) != layer_number,
        )
        if config is self.config and not shares:
            return self
        return replace(self, config=config, shares_key_value=shares)

    @cached_property
    def sized_layers(self) -> tuple[tuple[LayerKind, ModelSize], ...]:
        """Kind and sizes of each layer that has parameters of its own."""
        kinds = (*self.layer_kinds, *self.prediction_layers)
        return tuple((kind, self.of_layer(layer)) for layer, kind in enumerate(kinds, 1))

    @property
    def window(self) -> int | None:
        """Keys to the left that a query attends to besides its own; None: all."""
        window = self.config.window_size
        return window[0] if window is not None and window[0] >= 0 else None

    @property
    def qk_head(self) -> int:
        """Width of a query head and of a key head."""
        config = self.config
        if config.multi_latent_attention:
            return config.qk_head_dim + config.qk_pos_emb_head_dim
        return config.kv_channels or 0

    @property
    def value_head(self) -> int:
        """Width of a value head."""
        config = self.config
        if config.multi_latent_attention:
            return config.v_head_dim
        return config.v_channels or config.kv_channels or 0

    @property
    def attention_width(self) -> int:
        """Width of the attention's output: n times the width of a value head."""
        return self.config.num_attention_heads * self.value_head

    @property
    def score_width(self) -> int:
        """Products of a query with one key and of its weight with one value, over all heads."""
        return self.config.num_attention_heads * (self.qk_head + self.value_head)

    @property
    def _qkv_width(self) -> int:
        # Queries, gates of channels or of heads, keys, values.
        config, groups = self.config, self.config.num_query_groups or 0
        width, heads = config.kv_channels or 0, config.num_attention_heads
        gates = config.attention_output_gate * (1 if config.attention_gate_by_head else width)
        keys = width + (0 if config.attention_k_eq_v else self.value_head)
        return heads * (width + gates) + groups * keys * (not self.shares_key_value)

    @property
    def _attention_matrices(self) -> int:
        """Elements of the projections of one attention: to queries, keys, values, and back."""
        config, h = self.config, self.config.hidden_size
        back = self.attention_width * h
        if not config.multi_latent_attention:
            return h * self._qkv_width + back
        heads, rank = config.num_attention_heads, config.q_lora_rank
        queries = heads * self.qk_head
        queries = h * rank + rank * queries if rank else h * queries
        if config.has_compressed_attention:
            back = config.o_lora_rank * (self.attention_width + config.o_groups * h)
            return queries + h * config.kv_lora_rank + back
        keys = h * (config.kv_lora_rank + config.qk_pos_emb_head_dim) * (not self.shares_key_value)
        values = config.kv_lora_rank * heads * (config.qk_head_dim + config.v_head_dim)
        gates = self.attention_width if config.mla_gate_by_channel else heads
        gates *= h * config.attention_output_gate
        return queries + keys + values + gates + back

    def _compressor_width(self, kind: LayerKind) -> int:
        """Channels that compressors weigh and sum, also the compressor of an indexer."""
        indexed = kind.chooses_entries * (self.config.dsa_indexer_head_dim or 0)
        return (kind.compress_ratio > 0) * (1 + kind.chooses_entries) * (self.qk_head + indexed)

    def _indexer_matrices(self, kind: LayerKind) -> int:
        """Elements of the projections of compressors, and of an indexer to queries, a key and
        weights."""
        config, h = self.config, self.config.hidden_size
        compressors = 2 * h * self._compressor_width(kind)
        if not kind.has_indexer:
            return compressors
        heads, width = config.dsa_indexer_n_heads or 0, config.dsa_indexer_head_dim or 0
        keys, weights = kind.is_sparse * (1 + self._has_pools) * width, heads
        latent = config.q_lora_rank or h
        if not config.multi_latent_attention:
            latent, weights = h, 0
        return compressors + latent * heads * width + h * (keys + weights)

    @property
    def _has_pools(self) -> bool:
        """Whether an indexer joins the keys of windows to one."""
        config = self.config
        return config.multi_latent_attention and config.dsa_indexer_block_size > 1

    @property
    def expert_width(self) -> int:
        """Width of a routed expert's MLP."""
        return self.config.moe_ffn_hidden_size or self.config.ffn_hidden_size or 0

    @property
    def _shared_matrices(self) -> int:
        """Elements of router, shared expert and its gate, projections to and from latents."""
        config = self.config
        shared = self._mlp_matrices(config.moe_shared_expert_intermediate_size or 0)
        columns = (config.num_moe_experts or 0) + 2 * (config.moe_latent_size or 0)
        columns += config.moe_shared_expert_gate
        return columns * config.hidden_size + shared

    def _mlp_matrices(self, width: int, outside: int | None = None) -> int:
        return (2 + self.config.gated_linear_unit) * (outside or self.config.hidden_size) * width

    def _mlp_biases(self, width: int, outside: int | None = None) -> int:
        if not (self.config.add_bias_linear and width):
            return 0
        outside = outside or self.config.hidden_size
        return (1 + self.config.gated_linear_unit) * width + outside

    def _stream_parameters(self, num_weights: int, num_kinds: int) -> int:
        """Parameters of stream weights: a matrix, a bias, and a factor for each kind of weights."""
        config = self.config
        width = config.num_residual_streams * config.hidden_size
        return num_weights * (width + 1) + num_kinds

    def _connections(self, kind: LayerKind) -> tuple[int, int]:
        """Parameters and products of a token in the hyper-connections of a layer's branches, or in
        its alternating updates."""
        config, n, h = self.config, self.config.num_residual_streams, self.config.hidden_size
        if config.altup_num_inputs > 1:
            # Two products with the router, the mixing matrix and its product, the correction.
            products = 2 * n * h + n**3 + n**2 * h + n**2
            own = bool(config.per_layer_embed_dim) * h
            return n * h + n**3 + n**2 + self._norm() + own, products
        if not config.enable_mhc_connections:
            return 0, 0
        mixes = config.mhc_sinkhorn_iterations > 0
        branches, weights = bool(kind.mixer) + bool(kind.mlp), 2 * n + mixes * n * n
        products = weights * (n + 1) * h
        return branches * self._stream_parameters(weights, 2 + mixes), branches * products

    @property
    def stream_projections(self) -> int:
        """Elements of the matrices that make the streams of AltUp and join them."""
        return 2 * (self.config.altup_num_inputs - 1) * self.config.hidden_size**2

    @property
    def _contraction_parameters(self) -> int:
        config = self.config
        learned = config.enable_mhc_connections and config.mhc_learned_contraction
        return learned * self._stream_parameters(config.mhc_num_residual_streams, 1)

    def _mixer(self, kind: LayerKind) -> MixerSizes:
        return RECURRENT_MIXERS[kind.recurrence].sizes_of(self.config)

    def token_products(self, kind: LayerKind) -> int:
        """Multiplications of one token in a layer, scores of attention apart.

        Each matrix counts once; of the routed experts the `moe_router_topk` chosen ones count.
        """
        config = self.config
        count = kind.has_cross_attention * self._attention_matrices + self._connections(kind)[1]
        if kind.attends:
            count += self._attention_matrices + self._indexer_matrices(kind)
        if kind.recurrence:
            mixer = self._mixer(kind)
            count += mixer.matrices(config.hidden_size) + mixer.token_products
        count += (kind.mixer, kind.mlp).count(LINEAR) * config.hidden_size**2
        count += 3 * config.hidden_size * config.per_layer_embed_dim  # with the model's projection
        count += 2 * bool(kind.mixer) * config.hidden_size * config.laurel_rank
        if kind.mlp == DENSE:
            count += self._mlp_matrices(config.ffn_hidden_size or 0)
        elif kind.mlp == EXPERTS:
            one = self._mlp_matrices(self.expert_width, config.moe_latent_size)
            count += self._shared_matrices + config.moe_router_topk * one
        return count

    @property
    def head_matrix(self) -> int:
        """Elements of the output head, also of a head that is tied to the embedding."""
        return self.config.hidden_size * self.vocab_size

    def _norm(self, width: int | None = None) -> int:
        sizes = NORMS[self.config.normalization].sizes(width or self.config.hidden_size)
        return sum(sizes.values())

    def _layer_parameters(self, kind: LayerKind) -> int:
        """Parameters of one layer without its routed experts."""
        config = self.config
        norms = (1 + config.sandwich_norm) * self._norm()
        count = kind.has_final_norm * self._norm() + self._connections(kind)[0]
        if config.share_parallel_norm and kind.mixer and kind.mlp:
            count -= self._norm()
        if config.laurel_rank and kind.mixer:
            count += 2 * config.hidden_size * config.laurel_rank + self._norm()
        if config.per_layer_embed_dim:
            count += 2 * config.hidden_size * config.per_layer_embed_dim + self._norm()
        square = config.hidden_size * (config.hidden_size + config.add_bias_linear)
        count += (kind.mixer, kind.mlp).count(LINEAR) * square
        count += norms * (bool(kind.mixer) + bool(kind.mlp))
        if kind.attends:
            count += self._attention_parameters
        if kind.recurrence:
            count += self._mixer(kind).parameters(config.hidden_size)
        indexed = config.dsa_indexer_head_dim or 0
        if kind.is_sparse and kind.has_indexer:
            of_indexer = ["LayerNorm"] if config.multi_latent_attention else ["RMSNorm"] * 2
            count += sum(sum(NORMS[name].sizes(indexed).values()) for name in of_indexer)
            if config.multi_latent_attention and config.q_lora_rank is None:
                count += sum(NORMS["LayerNorm"].sizes(config.hidden_size).values())
            count += 2 * config.scalable_softmax * (config.dsa_indexer_n_heads or 0)
            count += self._has_pools * config.dsa_indexer_block_size * indexed
        if kind.compress_ratio:
            count += kind.compress_ratio * self._compressor_width(kind) + self._norm(self.qk_head)
            count += self._norm(indexed) if kind.chooses_entries else 0
        if kind.attends:
            count += self._indexer_matrices(kind)
        if kind.has_cross_attention:
            count += self._attention_parameters + self._norm()
        if kind.mlp == DENSE:
            width = config.ffn_hidden_size or 0
            count += self._mlp_matrices(width) + self._mlp_biases(width)
            count += 2 * isinstance(config.activation_func, type)  # the scalars of xIELU
        elif kind.mlp == EXPERTS:
            biases = config.num_moe_experts or 0  # of the router
            if config.moe_latent_size:
                biases += config.moe_latent_size + config.hidden_size
            count += self._shared_matrices + config.add_bias_linear * biases
            count += (3 * config.moe_branch_norms + config.moe_output_norm) * self._norm()
            scales = config.hidden_size + (config.num_moe_experts or 0)
            count += config.moe_router_scales * scales
            count += self._mlp_biases(config.moe_shared_expert_intermediate_size or 0)
        return count

    @property
    def routed_parameters(self) -> int:
        """Parameters of the routed experts of one layer."""
        width, latent = self.expert_width, self.config.moe_latent_size
        one = self._mlp_matrices(width, latent) + self._mlp_biases(width, latent)
        return (self.config.num_moe_experts or 0) * one

    @property
    def _attention_parameters(self) -> int:
        config = self.config
        count = self._attention_matrices + config.add_bias_linear * config.hidden_size
        count += config.num_attention_heads * (config.softmax_type == "learnable")
        count += 2 * config.num_attention_heads * config.scalable_softmax
        if config.multi_latent_attention:
            normed = [config.kv_lora_rank * (not self.shares_key_value), config.q_lora_rank]
            return count + config.qk_layernorm * sum(map(self._norm, filter(None, normed)))
        if config.add_bias_linear or config.add_qkv_bias:
            count += self._qkv_width
        heads: tuple[int, ...] = (1,) if self.shares_key_value else (1, 1)
        if config.qk_layernorm_across_heads:
            heads = (config.num_attention_heads, config.num_query_groups or 1)
        width = config.kv_channels or 0
        return count + config.qk_layernorm * sum(self._norm(width * number) for number in heads)

    @property
    def total_parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        h = self.config.hidden_size
        layers = sum(
            size._layer_parameters(kind) + kind.has_experts * size.routed_parameters
            for kind, size in self.sized_layers
        )
        # A depth of prediction joins two inputs with a matrix [2h, h] and has three norms.
        depths, own = len(self.config.prediction_kinds()), self.config.per_layer_embed_dim
        by_layer = self.config.num_layers * own * (self.vocab_size + h) + bool(own) * self._norm(
            own
        )
        joins = depths * (2 * h**2 + 3 * self._norm())
        contractions = (1 + depths) * (self._contraction_parameters + self.stream_projections)
        rows = self.learned_positions + self.num_tokentypes
        embedding = self.head_matrix + rows * h + self.vision_parameters
        embedding += self.config.embed_layernorm * self._norm()
        dense = h * (h + 1)
        head = 0 if self.is_tied else self.head_matrix
        head += self.has_word_head * (dense + self._norm() + self.vocab_size)
        head += self.has_binary_head * (dense + 2 * (h + 1))
        tables = 2 * self.position_buckets * self.config.num_attention_heads
        return layers + by_layer + joins + contractions + embedding + self._norm() + head + tables

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all but the routed experts that it is not sent to."""
        of_experts = [
            (s.routed_parameters, s.config) for k, s in self.sized_layers if k.has_experts
        ]
        return self.total_parameters - sum(
            count - count * config.moe_router_topk // (config.num_moe_experts or 1)
            for count, config in of_experts
        )
