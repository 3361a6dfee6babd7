"""Floating point operations of a training step, counted in one way in the whole project.

A matrix element counts 6 operations per token: 2 for a product, and backward has two products.
Recomputation is not counted, so the count is a property of the model. Attention counts the scores
that the mask permits, as flash kernels compute them: half of the square under a causal mask, fewer
with a sliding window or sparse attention, all scores in an encoder. The log line names this
convention "causal". Some publications count the full square ("PaLM", appendix B, arXiv 2204.02311),
which gives up to twice the TFLOP/s for the same speed.

Norms, activations, softmax and the embedding lookup are not counted. Experts count by the number of
experts that a token is routed to, without capacity limits. Each packed sequence counts by its own
length; documents of a sample that the mask separates count as one sequence.
"""

from __future__ import annotations

from megatron.core.transformer.config.layer_kinds import LayerKind
from megatron.training.metrics.model_size import ModelSize


def mean_keys(seq_length: int, window: int | None = None) -> float:
    """Return the average number of keys per query under a causal mask.

    Args:
        window: keys to the left of a query that it attends to; None is all keys.
    """
    if window is None or window >= seq_length - 1:
        return seq_length / 2
    # Query i attends to min(i, window) earlier keys; the diagonal is omitted as in s/2 above.
    seen = window * (window + 1) / 2 + window * (seq_length - window - 1)
    return (seen + seq_length / 2) / seq_length


def forward_flops_per_token(size: ModelSize) -> float:
    """Return the operations of the forward pass of one token."""
    if size.decoder_seq_length:
        return _two_stacks(size)
    h, depths, kinds = size.config.hidden_size, size.prediction_depths, size.passed_kinds
    products, scores = 0, 0.0
    for number, kind in enumerate(kinds, 1):
        layer = min(number, len(size.sized_layers))  # a shared prediction layer repeats
        own = size.of_layer(layer)
        products += own.token_products(kind)
        if kind.is_sparse:
            scores += _sparse_scores(own, kind)
        elif kind.attends:
            scores += _keys(own, layer) * own.score_width + _entry_scores(own, kind)
    products += depths * 2 * h**2  # a depth joins two inputs
    products += (1 + depths) * (size.head_matrix + size.stream_projections)
    products += size.has_word_head * h**2
    return 2 * (products + scores)


def _keys(size: ModelSize, layer: int) -> float:
    """Return the average number of keys per query of a layer, by its 1-based number."""
    if size.is_bidirectional:
        return float(size.seq_length)
    left, _ = size.config.window_of(layer) or (-1, 0)
    window, total = None if left < 0 else left, size.seq_length
    chunk = min(size.config.chunk_of(layer) or total, total)
    whole, rest = divmod(total, chunk)
    of_rest = rest * mean_keys(rest, window) if rest else 0.0
    return (whole * chunk * mean_keys(chunk, window) + of_rest) / total


def _sparse_scores(size: ModelSize, kind: LayerKind) -> float:
    """Return the products of a query with the chosen keys, and of an indexer with all keys."""
    config = size.config
    indexer = (config.dsa_indexer_n_heads or 0) * (config.dsa_indexer_head_dim or 0)
    indexed = 0.0 if kind.shares_keys else mean_keys(size.seq_length, size.window) * indexer
    if config.multi_latent_attention:  # one key of the indexer for each block
        indexed /= config.dsa_indexer_block_size
    return mean_keys(size.seq_length, config.dsa_indexer_topk) * size.score_width + indexed


def _entry_scores(size: ModelSize, kind: LayerKind) -> float:
    """Return the products of a query with chosen entries, and of an indexer with all entries."""
    if not kind.compress_ratio:
        return 0.0
    config, count = size.config, size.seq_length // kind.compress_ratio
    if not kind.chooses_entries:
        return mean_keys(count) * size.score_width
    indexer = (config.dsa_indexer_n_heads or 0) * (config.dsa_indexer_head_dim or 0)
    chosen = mean_keys(count, config.dsa_indexer_topk)
    return chosen * size.score_width + mean_keys(count) * indexer


def _two_stacks(size: ModelSize) -> float:
    """Return the operations of an encoder and a decoder, per token of the encoder."""
    s, t, config = size.seq_length, size.decoder_seq_length, size.config
    keys_and_values = 2 * (config.num_query_groups or 0) * (config.kv_channels or 0)
    crossed = keys_and_values * config.hidden_size
    pairs = 0.0
    products = float(t * size.head_matrix)
    for kind in size.layer_kinds:
        if kind.has_cross_attention:
            products += t * (size.token_products(kind) - crossed) + s * crossed
            pairs += t * (mean_keys(t, None) + s)
        else:
            products += s * size.token_products(kind)
            pairs += s * s
    return 2 * (products + pairs * size.score_width) / s


def training_flops_per_token(size: ModelSize) -> float:
    """Return the operations of forward and backward of one token."""
    return 3 * forward_flops_per_token(size)


def training_flops(size: ModelSize, num_samples: int) -> float:
    """Return the operations of a step of `num_samples` samples."""
    return training_flops_per_token(size) * size.seq_length * num_samples
