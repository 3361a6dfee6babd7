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
    windowed, full = (mean_keys(size.seq_length, w) for w in (size.window, None))
    keys = size.windowed_share * windowed + (1 - size.windowed_share) * full
    if size.is_bidirectional:
        keys = float(size.seq_length)
    attention = 2 * keys * size.score_width  # queries with keys, weights with values
    kinds = size.passed_kinds
    matrices = sum(size.token_matrices(kind) for kind in kinds)
    matrices += size.mtp_num_layers * 2 * size.hidden_size**2  # matrices that join two inputs
    matrices += (1 + size.mtp_num_layers) * size.head_matrix
    matrices += size.has_word_head * size.hidden_size**2
    matrices += sum(size.mixers[k.mixer].token_products for k in kinds if k.is_recurrent)
    dense = sum(kind.attends and not kind.is_sparse for kind in kinds)
    sparse = sum(kind.is_sparse for kind in kinds)
    return 2 * matrices + dense * attention + sparse * _sparse_attention(size)


def _sparse_attention(size: ModelSize) -> float:
    """Return one token's operations: attention to chosen keys, and the indexer's for all keys."""
    if size.indexer is None:
        return 0.0
    chosen = mean_keys(size.seq_length, size.indexer.topk)
    seen = mean_keys(size.seq_length, size.window)
    return 2 * (chosen * size.score_width + seen * size.indexer.heads * size.indexer.width)


def _two_stacks(size: ModelSize) -> float:
    """Return the operations of encoder and decoder per token of the encoder."""
    s, t = size.seq_length, size.decoder_seq_length
    crossed = 2 * size.num_query_groups * size.kv_channels * size.hidden_size  # keys and values
    pairs = 0.0
    matrices = float(t * size.head_matrix)
    for kind in size.layer_kinds:
        if kind.has_cross_attention:
            matrices += t * (size.token_matrices(kind) - crossed) + s * crossed
            pairs += t * (mean_keys(t, None) + s)
        else:
            matrices += s * size.token_matrices(kind)
            pairs += s * s
    return 2 * (matrices + pairs * size.score_width) / s


def training_flops_per_token(size: ModelSize) -> float:
    """Return the operations of forward and backward of one token."""
    return 3 * forward_flops_per_token(size)


def training_flops(size: ModelSize, num_samples: int) -> float:
    """Return the operations of a step of `num_samples` samples."""
    return training_flops_per_token(size) * size.seq_length * num_samples
