"""Attention: positions, latents (MLA), sparse attention, bounded logits.

DeepSeek-V2, section 2.1, arXiv 2405.04434 (latents); Kimi Team, "Kimi K2: Open Agentic
Intelligence", section 2.1 (MuonClip), arXiv 2507.20534.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.settings.flag_expressions import layer_pattern
from megatron.core.settings.flags import flag
from megatron.core.transformer.config.field_values import NOT_NEGATIVE, POSITIVE, SHARE

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class PositionConfig:
    """Rotary settings that layers need (arXiv 2104.09864)."""

    rotary_interleaved: bool = False
    """Rotate neighbouring pairs (2i, 2i+1) instead of the halves (i, i + d/2). Latent attention
    does so without it."""
    rotary_proportional: bool = False
    """With --rotary-percent p, rotate the first p of the pairs (i, i + d/2) of a whole head by the
    frequencies that they have with p = 1 (Gemma 4)."""
    no_rope_freq: list[int] | None = flag(None, parse=layer_pattern, type_text="int or list expr")
    """Layers without rotary embedding: N for every N-th, or a 0/1 list such as ([0]*3+[1])*8."""
    query_scale_beta: float = 0.0
    """Multiply the query at position p of a document by 1 + b ln(1 + floor(p / c)) with this b
    (arXiv 2501.19399; Llama 4, Ministral 3). --query-scale-interval is c."""
    query_scale_interval: int | None = flag(None, part_of="query_scale_beta", within=POSITIVE)
    """Number c of positions in the factor of --query-scale-beta; None means
    --original-max-position-embeddings."""
    query_scale_without_rope: bool = flag(False, part_of="query_scale_beta")
    """Scale the queries of layers without rotary embedding alone, with positions from 1 (Llama 4).
    """
    scalable_softmax: bool = False
    """Multiply the query of a head at position p of a document, from 1, by s ln p + b with numbers
    s and b that each head learns, also the heads of an indexer (SSMax, arXiv 2501.19399)."""
    rotary_base_local: float | None = flag(None, kind=int)
    """Base of the rotary frequencies in layers with a window; None uses the base of all layers."""
    rotary_short_factors: list[float] | None = flag(None, nargs="+")
    """LongRoPE (arXiv 2402.13753): divisors of the rotary frequencies, one for each pair of
    channels, in sequences of at most --original-max-position-embeddings tokens."""
    rotary_long_factors: list[float] | None = flag(None, nargs="+")
    """LongRoPE: the same in longer sequences."""
    rotary_amplitude: float = flag(1.0, within=POSITIVE)
    """Factor on cosine and sine of the rotary embedding (LongRoPE)."""
    mrope_section: list[int] | None = flag(None, nargs="+")
    """Numbers of channel pairs of a head that rotate by a token's position in time, in height and
    in width (--position-embedding-type mrope, arXiv 2409.12191)."""
    mrope_interleaved: bool = False
    """Interleave the channel pairs of time, height and width instead of using one section after the
    other (arXiv 2511.21631)."""
    apply_rope_fusion: bool = flag(
        False,
        "--no-rope-fusion",
        cli_default=True,
        help="Compute the rotary embedding with unfused operations.",
    )
    """Use a fused rotary kernel where a backend offers one."""

    def rotates_in(self, layer_number: int) -> bool:
        """Return whether a layer, by its 1-based number in the whole model, applies the rotary
        embedding of a model that has one."""
        skips = self.no_rope_freq
        # Layers of multi-token prediction, numbered after the last layer, follow the last layer.
        return not (skips and skips[min(layer_number, len(skips)) - 1])

    def scales_queries(self, layer_number: int) -> bool:
        """Whether a layer, by its 1-based number in the whole model, scales queries by position."""
        rotates = self.rotates_in(layer_number)
        return self.query_scale_beta != 0.0 and not (self.query_scale_without_rope and rotates)


@dataclass
class LatentAttentionConfig:
    """Keys and values that are kept as one short vector per token, the latent."""

    multi_latent_attention: bool = False
    """Attention whose keys and values are made from one short vector per token."""
    q_lora_rank: int | None = flag(None, part_of="multi_latent_attention", within=POSITIVE)
    """Width of the queries' latent; None projects queries in one step."""
    kv_lora_rank: int = flag(512, cli_default=32, part_of="multi_latent_attention", within=POSITIVE)
    """Width of the latent of keys and values."""
    qk_head_dim: int = flag(128, part_of="multi_latent_attention", within=POSITIVE)
    """Width of a query/key head without its rotary part."""
    qk_pos_emb_head_dim: int = flag(64, part_of="multi_latent_attention", within=NOT_NEGATIVE)
    """Width of the rotary part, whose key all heads share; 0 without positions."""
    v_head_dim: int = flag(128, part_of="multi_latent_attention", within=POSITIVE)
    """Width of a value head."""
    kv_source_layers: list[int] | None = flag(
        None, parse=layer_pattern, type_text="list expr", part_of="multi_latent_attention"
    )
    """For each layer the number, from 0, of the layer whose latents its keys and values are made
    from: its own number, or an earlier one, such as [0,0,2,2] (W. Brandon et al., arXiv 2405.12981;
    Mistral Large 4)."""
    no_rope_latent_keys: bool = flag(False, part_of="multi_latent_attention")
    """In layers without rotary embedding make all channels of keys from the latents, without a part
    that heads share (Mistral Large 4)."""
    rotary_exponents: bool = flag(False, part_of="multi_latent_attention")
    """Multiply rotary frequencies by exponentials of numbers that are stored with the weights
    and not trained, 0 in a new model (Mistral Large 4)."""
    latent_norm_epsilon: float | None = flag(
        None, part_of="multi_latent_attention", within=POSITIVE
    )
    """Added to the variance in the norms of latents; None is --norm-epsilon."""
    rope_type: str = flag(
        "yarn", cli_default=None, choices=("rope", "yarn"), part_of="multi_latent_attention"
    )
    """Positions of latent attention: rope, or yarn, which extends the context by the factor
    --rotary-scaling-factor (with the factor 1 it equals rope)."""
    rope_interleave: bool = flag(
        True,
        part_of="multi_latent_attention",
        help="Latent attention: rotate the halves (i, i + d/2), not neighbouring pairs (2i, 2i+1).",
    )
    """Rotate neighbouring pairs (2i, 2i+1) of the rotary part, as Megatron's layer always does;
    otherwise its halves (i, i + d/2)."""
    rotary_base: float = flag(10000, kind=int)
    """Base of the rotary frequencies (arXiv 2104.09864, section 3.2.2)."""
    rotary_scaling_factor: float = flag(40, cli_default=1.0)
    """YaRN: new context length / original context length (arXiv 2309.00071). The flags of YaRN
    apply to multi-latent attention and to --position-embedding-type yarn."""
    original_max_position_embeddings: int = flag(
        4096, "--original-max-position-embeddings", "--yarn-original-max-position-embeddings"
    )
    """YaRN: context length of the original training, before the extension."""
    beta_fast: float = flag(32, "--beta-fast", "--yarn-beta-fast")
    """YaRN: channels with more rotations than this in the original context keep their frequency."""
    beta_slow: float = flag(1, "--beta-slow", "--yarn-beta-slow")
    """YaRN: the frequency of channels with fewer rotations is divided by the whole factor."""
    yarn_correction_range_round_to_int: bool = flag(
        True, help="YaRN: do not round the channel numbers of beta-fast and beta-slow."
    )
    """YaRN: round the channel numbers of beta-fast and beta-slow to whole numbers."""
    mscale: float = 1.0
    """YaRN attention temperature: how strongly scores grow with the factor."""
    mscale_all_dim: float = 0.0
    """YaRN: the same for the channels of a head without rotary embedding. If all channels rotate,
    scores grow by the ratio of the two temperatures."""

    def latent_source(self, layer_number: int) -> int:
        """Return the number of the layer whose latents a layer reads; both numbers are 1-based in
        the whole model."""
        # Layers of multi-token prediction, numbered after the last one, have latents of their own.
        sources = self.kv_source_layers or []
        return sources[layer_number - 1] + 1 if layer_number <= len(sources) else layer_number

    def latent_changes(self, *, rotates: bool) -> dict[str, int]:
        """Return the fields of a layer's config that differ because it rotates or not."""
        if rotates or not self.no_rope_latent_keys:
            return {}
        width = self.qk_head_dim + self.qk_pos_emb_head_dim
        return {"qk_head_dim": width, "qk_pos_emb_head_dim": 0}


def latent_attention_problems(config: LatentAttentionConfig) -> Iterator[MegatronError]:
    """Yield the problems of these sizes."""
    if not config.multi_latent_attention:
        return
    if config.qk_pos_emb_head_dim % 2:
        yield ConfigError(
            f"qk_pos_emb_head_dim={config.qk_pos_emb_head_dim}.",
            rule="channels rotate in pairs",
            flags=["--qk-pos-emb-head-dim"],
            fix=f"use --qk-pos-emb-head-dim {config.qk_pos_emb_head_dim + 1}",
        )


_MIXER = "experimental_attention_variant", "hybrid_layer_pattern"
_NO_KERNELS = "use none, which computes blocks of queries in PyTorch on every device"


@dataclass
class CompressedAttentionConfig:
    """Attention to a window and to compressed entries (DeepSeek-V4, section 2.3)."""

    csa_compress_ratios: int | list[int] | None = flag(
        None, parse=layer_pattern, type_text="int or list expr", part_of=_MIXER
    )
    """Tokens of a compressed entry in the layers of the variant dsv4_hybrid: one number, or a
    number for each layer, such as [0]*2+[4,128]*20. A layer of ratio 0 attends to its window alone
    (--window-size). With --hybrid-layer-pattern: the number of the layers H; 128 by default."""
    csa_indexed_ratio: int = flag(4, part_of=_MIXER, within=POSITIVE)
    """Ratio of the layers whose entries overlap and whose queries attend to the
    --dsa-indexer-topk entries that an indexer chooses (CSA). In layers of other ratios queries
    attend to all entries (HCA)."""
    csa_compress_rotary_base: float = flag(160000, kind=int, part_of=_MIXER)
    """Base of the rotary frequencies in layers with compressed entries, where alone YaRN acts."""
    o_groups: int = flag(8, part_of=_MIXER, within=POSITIVE)
    """Groups of heads whose outputs are projected separately to --o-lora-rank channels."""
    o_lora_rank: int = flag(1024, part_of=_MIXER, within=POSITIVE)
    """Channels of a group of heads before the output projection."""

    def compress_ratio(self, layer_number: int) -> int:
        """Return the tokens of a compressed entry of a layer without a letter, by its 1-based
        number in the whole model; 0 without entries."""
        ratios = self.csa_compress_ratios or 0
        if isinstance(ratios, int):
            return ratios
        # Layers of multi-token prediction, numbered after the last layer, follow the last layer.
        return ratios[min(layer_number, len(ratios)) - 1]


@dataclass
class SparseAttentionConfig(CompressedAttentionConfig):
    """Attention to the keys that an indexer scores highest (DeepSeek-V3.2, arXiv 2512.02556)."""

    dsa_indexer_head_dim: int | None = flag(None, part_of=_MIXER)
    """Width of a head of the indexer; its first channels rotate, as many as in a head of attention.
    """
    dsa_indexer_n_heads: int | None = flag(None, part_of=_MIXER, within=POSITIVE)
    """Query heads of the indexer; they share one key."""
    dsa_indexer_topk: int | None = flag(None, part_of=_MIXER, within=POSITIVE)
    """Number of keys that a query attends to: the keys with the highest scores; of equal scores the
    earliest key."""
    dsa_indexer_topk_freq: int = flag(1, part_of=_MIXER, within=POSITIVE)
    """Layers that share the keys of one indexer: with N a layer has an indexer of its own if its
    number, minus --dsa-indexer-skip-topk-offset, is a multiple of N. The layers after it attend to
    the same keys (arXiv 2603.12201)."""
    dsa_indexer_skip_topk_offset: int = flag(0, part_of=_MIXER, within=NOT_NEGATIVE)
    """Number of first layers that all have an indexer of their own."""
    dsa_indexer_block_size: int = flag(1, part_of=_MIXER, within=POSITIVE)
    """Consecutive tokens of a document that a query chooses together, --dsa-indexer-topk divided by
    this number of times. With latent attention the indexer joins their keys to one, with learned
    weights, and a query also attends to the tokens after the last whole block that it sees
    (GLM-5.3). Without it each group of query heads has a head of the indexer, whose best score in
    a block counts (MiniMax M3)."""
    dsa_indexer_local_blocks: int = flag(0, part_of=_MIXER, within=NOT_NEGATIVE)
    """Without latent attention: blocks that a query always chooses, its own block and the blocks
    before it."""
    dsa_indexer_loss_coeff: float | None = flag(
        None,
        part_of=_MIXER,
        per_micro_batch="the loss is a mean over the tokens of a micro batch",
        within=NOT_NEGATIVE,
    )
    """Factor on the loss that trains the indexer to match the distribution of attention. With None
    or 0 the indexer is not trained."""
    dsa_indexer_use_sparse_loss: bool = flag(False, part_of=_MIXER)
    """Compare the two distributions over the chosen keys alone, instead of all keys."""
    dsa_indexer_k_norm_epsilon: float | None = flag(None, part_of=_MIXER)
    """Added to the variance in the norm of the indexer's key; None uses --norm-epsilon."""
    dsa_indexer_k_norm_fp32: bool = flag(False, part_of=_MIXER)
    """Compute the norm of the indexer's key in fp32, with an fp32 result."""
    dsa_indexer_rope_interleaved: bool = flag(False, part_of=_MIXER)
    """Rotate neighbouring channels (2i, 2i+1) in the indexer, instead of (i, i + d/2)."""
    dsa_indexer_scoring_relu: bool = flag(
        True, part_of=_MIXER, help="Indexer: use the negative scores of a head instead of zero."
    )
    """Indexer: replace the negative scores of a head by zero."""
    dsa_kernel_backend: str = flag(
        "none",
        choices=("none", "tilelang", "cudnn"),
        refuse_values={"tilelang": _NO_KERNELS, "cudnn": _NO_KERNELS},
        part_of=_MIXER,
    )
    """Library of the kernels of sparse attention; none is PyTorch."""

    @property
    def trains_indexer(self) -> bool:
        """Whether a loss trains the indexer."""
        return bool(self.dsa_indexer_loss_coeff)

    def shares_keys(self, layer_number: int) -> bool:
        """Return whether a layer of sparse attention, by its 1-based number in the whole model,
        attends to the keys that an earlier layer has chosen."""
        number = max(layer_number - self.dsa_indexer_skip_topk_offset, 0)
        return number % self.dsa_indexer_topk_freq != 0


def _of_size(name: str, value: float | None, rule: str, example: float) -> ConfigError:
    spelling = "--" + name.replace("_", "-")
    return ConfigError(
        f"{name}={value}.", rule=rule, flags=[spelling], fix=f"use {spelling} {example}"
    )


def _compressed_attention_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of layers that attend to compressed entries."""
    given, has_letters = config.csa_compress_ratios, config.hybrid_layer_pattern is not None
    ratios = [given] * config.num_layers if isinstance(given, int) else given or []
    if has_letters and given is not None and (given == 1 or not isinstance(given, int)):
        yield ConfigError(
            f"csa_compress_ratios={given} with hybrid_layer_pattern.",
            rule="the layers H of the pattern have one ratio, 2 or more",
            flags=["--csa-compress-ratios", "--hybrid-layer-pattern"],
            fix="use --csa-compress-ratios 128",
        )
    elif not has_letters and (len(ratios) != config.num_layers or min(ratios) < 0 or 1 in ratios):
        yield ConfigError(
            f"csa_compress_ratios={given} for {config.num_layers} layers.",
            rule="each layer has a ratio: 0, or 2 and more",
            flags=["--csa-compress-ratios", "--num-layers"],
            fix=f'use --csa-compress-ratios "[0]*{config.num_layers}"',
        )
    head = config.qk_head_dim + config.qk_pos_emb_head_dim
    if {config.v_head_dim, config.kv_lora_rank} != {head}:
        yield ConfigError(
            f"v_head_dim={config.v_head_dim} and kv_lora_rank={config.kv_lora_rank} with heads of"
            f" {head} channels.",
            rule="one latent is the key and the value of all heads",
            flags=["--v-head-dim", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim"],
            fix=f"use --v-head-dim {head} --kv-lora-rank {head}",
        )
    groups, tp = config.o_groups, config.tensor_model_parallel_size
    if config.num_attention_heads % groups or groups % tp:
        yield ConfigError(
            f"o_groups={groups} for {config.num_attention_heads} heads and tensor-parallel size"
            f" {tp}.",
            rule="groups are equal, and each tensor-parallel rank owns whole groups",
            flags=["--o-groups", "--num-attention-heads", "--tensor-model-parallel-size"],
            fix=f"use --o-groups {tp}",
        )
    wrong = {
        "--qk-clip": config.qk_clip,
        "--attention-output-gate": config.attention_output_gate,
        "--attention-chunk-size": config.attention_chunk_size is not None,
        "--no-rope-freq": config.no_rope_freq is not None,
        "--scalable-softmax": config.scalable_softmax,
        "--rotary-exponents": config.rotary_exponents,
        "--linear-attention-freq": config.linear_attention_freq is not None,
        "--dsa-indexer-topk-freq": config.dsa_indexer_topk_freq > 1,
    }
    if found := [name for name, is_wrong in wrong.items() if is_wrong]:
        yield ConfigError(
            f"experimental_attention_variant=dsv4_hybrid with {', '.join(found)}.",
            rule="all layers are of this kind, have an indexer of their own and rotate; heads have"
            " no gates, and one key that cannot be scaled for each of them",
            flags=["--experimental-attention-variant", *found],
            fix=f"drop {', '.join(found)}",
        )


def _block_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of an indexer that chooses blocks of keys."""
    size, heads, groups = (
        config.dsa_indexer_block_size, config.dsa_indexer_n_heads, config.num_query_groups
    )  # fmt: skip
    if size > 1 and (config.dsa_indexer_topk or size) % size:
        rule = "a query chooses whole blocks of --dsa-indexer-block-size keys"
        yield _of_size("dsa_indexer_topk", config.dsa_indexer_topk, rule, 16 * size)
    by_group = size > 1 and not config.multi_latent_attention
    if by_group and heads != groups:
        rule = f"each of the {groups} groups of query heads has a head of the indexer"
        yield _of_size("dsa_indexer_n_heads", heads, rule, groups or 1)
    wrong = {
        "--dsa-indexer-loss-coeff": size > 1 and config.trains_indexer,
        "--dsa-indexer-topk-freq": by_group and config.dsa_indexer_topk_freq > 1,
        "--dsa-indexer-local-blocks": not by_group and config.dsa_indexer_local_blocks > 0,
        "--dsa-indexer-block-size": size > 1 and config.has_compressed_attention,
    }
    if found := [name for name, is_wrong in wrong.items() if is_wrong]:
        yield ConfigError(
            f"dsa_indexer_block_size={size} with {', '.join(found)}.",
            rule="the loss compares keys, not blocks; groups of query heads do not share their"
            " choice with other layers, and they alone have local blocks; entries are no blocks",
            flags=["--dsa-indexer-block-size", *found],
            fix=f"drop {', '.join(found)}",
        )


def sparse_attention_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of layers with sparse attention."""
    kinds, layout = config.layer_kinds(), pipeline_layout(config)
    if any(kind.is_compressed for kind in kinds):
        yield from _compressed_attention_problems(config)
    has_latents, size = config.multi_latent_attention, config.dsa_indexer_block_size
    q_lora_rank = config.q_lora_rank
    rotated = config.qk_pos_emb_head_dim
    if not has_latents and size > 1:
        rotated = 1  # a rule of the model checks it
    elif not has_latents or (q_lora_rank is None and any(kind.is_compressed for kind in kinds)):
        yield ConfigError(
            f"sparse attention with multi_latent_attention={has_latents} and"
            f" q_lora_rank={q_lora_rank}.",
            rule="sparse attention has latents of keys unless its indexer chooses blocks of keys,"
            " and compressed attention has latents of queries",
            flags=["--multi-latent-attention", "--q-lora-rank", "--dsa-indexer-block-size"],
            fix="add --multi-latent-attention --q-lora-rank 1536",
        )
    if not any(kind.is_sparse or kind.chooses_entries for kind in kinds):
        return
    for name, example in (("dsa_indexer_n_heads", 64), ("dsa_indexer_topk", 2048)):
        value = getattr(config, name)
        if value is None:
            yield _of_size(name, value, "it is a positive number", example)
    width = config.dsa_indexer_head_dim
    if width is None or width < rotated:
        rule = f"a head has at least the {rotated} channels that rotate"
        yield _of_size("dsa_indexer_head_dim", width, rule, max(128, rotated))
    yield from _block_problems(config)
    for stage in range(len(layout.stages)):
        layers = layout.layers(*layout.placement.location(stage))
        first = next((layer for layer in layers if kinds[layer].is_sparse), None)
        if first is not None and kinds[first].shares_keys:
            own = [str(n) for n, kind in enumerate(kinds, 1)
                   if kind.has_indexer]  # fmt: skip
            yield ConfigError(
                f"layer {first + 1}, the first with sparse attention on pipeline stage {stage + 1},"
                " has no indexer.",
                rule="layers share the keys that an earlier layer of their stage has chosen;"
                f" layers with an indexer: {', '.join(own) or 'none'}",
                flags=["--dsa-indexer-topk-freq", "--dsa-indexer-skip-topk-offset",
                       "--pipeline-model-parallel-layout"],
                fix="use --dsa-indexer-skip-topk-offset 1 or more, and a"
                " --pipeline-model-parallel-layout whose stages begin with such layers",
            )  # fmt: skip


@dataclass
class QueryKeyClipConfig:
    """Bounds on the largest attention logit of each head."""

    qk_clip: bool = False
    """After each update scale down the query and key weights of heads whose largest attention logit
    in the global batch exceeds --qk-clip-threshold (MuonClip, arXiv 2507.20534, section 2.1)."""
    qk_clip_threshold: float = flag(100.0, part_of="qk_clip", within=POSITIVE)
    """Largest attention logit that causes no scaling."""
    qk_clip_alpha: float = flag(0.5, part_of="qk_clip", within=SHARE)
    """Share of the scaling that is applied to the query weights; key weights get the rest."""
    log_max_attention_logit: bool = False
    """Log the largest attention logit of each global batch."""

    @property
    def records_max_logits(self) -> bool:
        """Whether attention records the largest logit of each head."""
        return self.qk_clip or self.log_max_attention_logit
