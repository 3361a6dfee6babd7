"""The numbers of `megatron.core.parameters.counter_random`, in registers.

One call of Philox gives the words of four adjacent columns; Triton's `philox` is the same 4x32-10.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keeps_in_row(seed, sample, head, row, first_column, threshold, COLUMNS: tl.constexpr):
    """Return bool [COLUMNS], whether the elements of one row are kept.

    first_column, COLUMNS: multiples of 4. threshold: `keep_threshold`.
    """
    calls = first_column // 4 + tl.arange(0, COLUMNS // 4)
    zeros = calls * 0
    w0, w1, w2, w3 = tl.philox(seed, calls, zeros + row, zeros + head, zeros + sample)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(words, (COLUMNS,)) < tl.cast(threshold, tl.uint32)


@triton.jit
def keeps_in_tile(seed, sample, head, first_row, first_column, threshold,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Return bool [ROWS, COLUMNS], whether the elements of consecutive rows are kept."""
    calls = first_column // 4 + tl.arange(0, COLUMNS // 4)
    rows = first_row + tl.arange(0, ROWS)
    zeros = tl.zeros((ROWS, COLUMNS // 4), tl.int32)
    w0, w1, w2, w3 = tl.philox(
        seed, zeros + calls[None, :], zeros + rows[:, None], zeros + head, zeros + sample
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(words, (ROWS, COLUMNS)) < tl.cast(threshold, tl.uint32)
