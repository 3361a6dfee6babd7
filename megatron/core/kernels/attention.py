"""The table of attention kernels, with the features that each supports.

To add a kernel, write a function of type `AttentionKernel` and an entry in `ATTENTION`. The lists
are in order of preference. The entries `flash-attn` and `transformer-engine` **have never run**.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from megatron.core.foundation.optional_imports import why_missing
from megatron.core.kernels import library_attention
from megatron.core.kernels.attention_options import AttentionKernel, AttentionOptions
from megatron.core.kernels.blockwise_attention import blockwise_attention
from megatron.core.kernels.registry import OTHER_DEVICES, Choice, Kernel, KernelTable, Request
from megatron.core.kernels.torch_attention import cpu_block_attention, sdpa, sdpa_with_mask, unfused

WIDEST_FLASH = 256
"""Largest head width of the kernels of flash-attention and Transformer Engine."""

# Needs beyond plain causal or full attention of a sequence to itself.
MASK = "an attention_mask"
BIAS = "an attention_bias"
LENGTHS = "fewer queries than keys"
WINDOW = "windows"
DOCUMENTS = "documents"
WIDTHS = "two head widths"
SOFTCAP = "soft-capping"
SINK = "a sink"
DROPOUT = "dropout independent of the layout"
MAX_LOGITS = "the largest scores"
OWN_DROPOUT = "dropout"  # the mask may depend on the layout
WIDE_HEADS = f"heads wider than {WIDEST_FLASH}"
HEAD_EXCHANGE = "context parallelism by all-to-all"
PARTIAL_KEYS = "context parallelism by a ring or gathered keys"

_MATRICES = frozenset({MASK, BIAS, LENGTHS, WINDOW})
_POSITIONS = frozenset({WINDOW, DOCUMENTS, WIDTHS})
_SCORES = frozenset({SOFTCAP, SINK})
_DROPOUTS = frozenset({DROPOUT, OWN_DROPOUT})
_BLOCKWISE = Kernel(
    "blockwise",
    blockwise_attention,
    _POSITIONS | _SCORES | _DROPOUTS | {HEAD_EXCHANGE, PARTIAL_KEYS, WIDE_HEADS, MAX_LOGITS},
)
_LIBRARY_DTYPES = frozenset({"bfloat16", "float16"})

ATTENTION: KernelTable[AttentionKernel] = KernelTable(
    "attention",
    {
        "cpu": (
            Kernel("cpu-blocks", cpu_block_attention, _DROPOUTS | {WINDOW, WIDE_HEADS, MAX_LOGITS}),
            _BLOCKWISE,
            # torch computes two head widths on the CPU from the full matrix of scores.
            Kernel("sdpa", sdpa, frozenset({WIDE_HEADS})),
            Kernel("sdpa-mask", sdpa_with_mask, _MATRICES | {WIDE_HEADS}),
            Kernel("unfused", unfused, _MATRICES | _DROPOUTS | {WIDE_HEADS, MAX_LOGITS}),
        ),
        OTHER_DEVICES: (
            Kernel("sdpa", sdpa, frozenset({WIDTHS, OWN_DROPOUT, HEAD_EXCHANGE, WIDE_HEADS})),
            Kernel(
                "flash-attn",
                library_attention.flash_attn,
                _POSITIONS | {SOFTCAP, OWN_DROPOUT, HEAD_EXCHANGE},
                dtypes=_LIBRARY_DTYPES,
                missing=partial(why_missing, "flash_attn"),
                library=True,
                excludes=(frozenset({SOFTCAP, OWN_DROPOUT}),),
            ),
            Kernel(
                "transformer-engine",
                library_attention.transformer_engine,
                _POSITIONS | {OWN_DROPOUT, HEAD_EXCHANGE},
                dtypes=_LIBRARY_DTYPES,
                missing=partial(why_missing, "transformer_engine.pytorch"),
                library=True,
            ),
            Kernel(
                "flex",
                library_attention.flex,
                _POSITIONS | _SCORES | {HEAD_EXCHANGE, WIDE_HEADS},
                dtypes=frozenset({"bfloat16", "float16", "float32"}),
                missing=library_attention.why_no_flex,
            ),
            Kernel(
                "sdpa-mask",
                sdpa_with_mask,
                _MATRICES | _POSITIONS | {OWN_DROPOUT, HEAD_EXCHANGE, WIDE_HEADS},
            ),
            Kernel(
                "unfused",
                unfused,
                _MATRICES
                | _POSITIONS
                | _SCORES
                | _DROPOUTS
                | {HEAD_EXCHANGE, WIDE_HEADS, MAX_LOGITS},
            ),
            _BLOCKWISE,
        ),
    },
    flags=(
        "--context-parallel-size",
        "--reset-attention-mask",
        "--softmax-type",
        "--attn-logit-softcapping",
        "--qk-clip",
    ),
    fix="pass the documents as packed_seq_params (PackedSeqParams(seq_idx=...))",
)

ASKED: dict[str, tuple[str, ...]] = {
    "flash": ("flash-attn", "sdpa", "flex", "sdpa-mask", "unfused"),
    "fused": ("transformer-engine", "sdpa", "flex", "sdpa-mask", "unfused"),
    "unfused": ("unfused",),
    "local": ("unfused",),
    "auto": (),
}
"""Value of `--attention-backend` -> kernels that are preferred, in this order."""

DRAWS_DROPOUT = ("flash", "fused")
"""Values of `--attention-backend` that permit kernels whose dropout masks depend on the layout."""


def dropout_need(backend: str) -> str:
    """Return the need that dropout adds with a value of `--attention-backend`."""
    return OWN_DROPOUT if backend in DRAWS_DROPOUT else DROPOUT


def attention_needs(options: AttentionOptions, backend: str) -> set[str]:
    """Return the needs that follow from the options and `--attention-backend` alone."""
    given = {
        MASK: options.attention_mask is not None,
        BIAS: options.attention_bias is not None,
        WINDOW: options.mask.window not in ((-1, 0), (-1, -1)),
        DOCUMENTS: options.mask.document_ids is not None,
        SOFTCAP: options.softcap is not None,
        SINK: options.sink is not None,
        MAX_LOGITS: options.max_logits is not None,
        dropout_need(backend): options.dropout > 0.0,
    }
    return {need for need, is_given in given.items() if is_given}


def context_parallel_need(comm_type: str | None) -> set[str]:
    """Return the needs of context parallelism; `comm_type` None is one rank per sequence."""
    if comm_type is None:
        return set()
    return {HEAD_EXCHANGE if comm_type == "a2a" else PARTIAL_KEYS}


def choose_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    backend: str = "auto",
    comm_type: str | None = None,
) -> Choice[AttentionKernel]:
    """Choose the kernel for one call.

    Args:
        query: [sq, b, n, d]; key: [sk, b, g, d]; value: [sk, b, g, e].
        backend: a value of `--attention-backend`.
        comm_type: how ranks that share the sequence exchange keys; None is one rank.
    Raises:
        ConfigError: no kernel supports this attention.
    """
    needs = attention_needs(options, backend) | context_parallel_need(comm_type)
    if query.shape[0] != key.shape[0]:
        needs.add(LENGTHS)
    if query.shape[-1] != value.shape[-1]:
        needs.add(WIDTHS)
    if max(query.shape[-1], value.shape[-1]) > WIDEST_FLASH:
        needs.add(WIDE_HEADS)
    return ATTENTION.choose(Request.of(query, needs), ASKED[backend])
