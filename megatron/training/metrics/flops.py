"""Floating point operations of a training step, in two named conventions.

Both count 6 operations per matrix element and token (a product is 2, backward has two products)
and no recomputation, so they are properties of the model. They differ in the attention scores:

- `FULL_SQUARE`: every query with every key, 12 s n d per layer and token. What Megatron-LM's
  log line counts, hence the figure beside "throughput per GPU (TFLOP/s/GPU)".
- `CAUSAL`: only the keys that the mask leaves, half of them (fewer with a sliding window; all of
  them in an encoder). What
  flash kernels compute, hence the one for the share of the peak (MFU; the notion is from "PaLM",
  appendix B, arXiv 2204.02311, which counts the full square).

The same speed prints up to twice the TFLOP/s in one as in the other: never compare figures of
unnamed conventions. Norms, activations, softmax and the embedding lookup are not counted. Of the
routed experts those count that a token is routed to, as if none were ever full.
"""

from __future__ import annotations

from enum import Enum

from megatron.training.metrics.model_size import ModelSize


class FlopConvention(Enum):
    """How attention scores are counted."""

    FULL_SQUARE = "full square"
    CAUSAL = "causal"


def mean_keys(seq_length: int, window: int | None, convention: FlopConvention) -> float:
    """Return how many keys one query counts on average."""
    if convention is FlopConvention.FULL_SQUARE:
        return float(seq_length)
    if window is None or window >= seq_length - 1:
        return seq_length / 2
    # Query i sees min(i, window) earlier keys; the diagonal is left out as in the half above.
    seen = window * (window + 1) / 2 + window * (seq_length - window - 1)
    return (seen + seq_length / 2) / seq_length


def forward_flops_per_token(size: ModelSize, convention: FlopConvention) -> float:
    """Return the operations of the forward pass of one token."""
    if size.decoder_seq_length:
        return _two_stacks(size, convention)
    if size.is_bidirectional:
        convention = FlopConvention.FULL_SQUARE
    windowed, full = (mean_keys(size.seq_length, w, convention) for w in (size.window, None))
    keys = size.windowed_share * windowed + (1 - size.windowed_share) * full
    attention = 2 * keys * size.score_width  # queries with keys, weights with values
    kinds = size.passed_kinds
    matrices = sum(size.token_matrices(kind) for kind in kinds)
    matrices += size.mtp_num_layers * 2 * size.hidden_size**2  # that join two inputs
    matrices += (1 + size.mtp_num_layers) * size.head_matrix
    matrices += size.has_word_head * size.hidden_size**2
    matrices += sum(size.mixers[k.mixer].token_products for k in kinds if k.is_recurrent)
    dense = sum(kind.attends and not kind.is_sparse for kind in kinds)
    sparse = sum(kind.is_sparse for kind in kinds)
    return 2 * matrices + dense * attention + sparse * _sparse_attention(size, convention)


def _sparse_attention(size: ModelSize, convention: FlopConvention) -> float:
    """Return the operations of one token with the chosen keys, and of the indexer with all."""
    if size.indexer is None:
        return 0.0
    chosen = mean_keys(size.seq_length, size.indexer.topk, convention)
    seen = mean_keys(size.seq_length, size.window, convention)
    return 2 * (chosen * size.score_width + seen * size.indexer.heads * size.indexer.width)


def _two_stacks(size: ModelSize, convention: FlopConvention) -> float:
    """Return the operations of an encoder and a decoder, over the tokens of the encoder."""
    s, t = size.seq_length, size.decoder_seq_length
    crossed = 2 * size.num_query_groups * size.kv_channels * size.hidden_size  # keys and values
    pairs = 0.0
    matrices = float(t * size.head_matrix)
    for kind in size.layer_kinds:
        if kind.has_cross_attention:
            matrices += t * (size.token_matrices(kind) - crossed) + s * crossed
            pairs += t * (mean_keys(t, None, convention) + s)
        else:
            matrices += s * size.token_matrices(kind)
            pairs += s * s
    return 2 * (matrices + pairs * size.score_width) / s


def training_flops_per_token(size: ModelSize, convention: FlopConvention) -> float:
    """Return the operations of forward and backward of one token."""
    return 3 * forward_flops_per_token(size, convention)


def training_flops(size: ModelSize, num_samples: int, convention: FlopConvention) -> float:
    """Return the operations of a step of `num_samples` samples."""
    return training_flops_per_token(size, convention) * size.seq_length * num_samples
