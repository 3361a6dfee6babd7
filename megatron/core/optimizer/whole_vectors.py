"""Updates whose bits do not depend on where a tensor is split, on a CPU.

torch's fused kernels compute whole vectors, and the elements that are left by other instructions,
which round differently. Here these elements are computed again as a whole vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron.core.foundation.device import is_host_memory

_BYTES = 64
"""The widest vector of a processor."""


@contextmanager
def whole_vectors(
    weights: list[Tensor], *others: list[Tensor], steps: list[Tensor]
) -> Iterator[list[Tensor]]:
    """Inside the returned context the lists also hold the last elements of tensors, padded.

    At the end the elements that a kernel has updated there are copied to the tensors. Yields the
    padded weights.

    Args:
        weights: [...] each; contiguous ones on a CPU are treated so.
        others: for each weight a gradient or a state of its shape, or None; or an empty list.
        steps: for each weight the step count []; or an empty list.
    """
    count = len(weights)
    all_left = {
        i: w.numel() % (_BYTES // w.element_size())
        for i, w in enumerate(weights)
        if is_host_memory(w.device) and w.is_contiguous()
    }
    left = {i: n for i, n in all_left.items() if n}
    lists: list[list[Any]] = [weights, *filter(None, others)]
    for tensors in lists:
        tensors += [_padded(tensors[i], n) for i, n in left.items()]
    steps += [steps[i].clone() for i in left if steps]
    yield weights[count:]
    for tensors in lists:
        for (i, n), padded in zip(left.items(), tensors[count:], strict=True):
            if padded is not None:
                tensors[i].view(-1)[-n:].copy_(padded[:n])
        del tensors[count:]
    del steps[count:]


def _padded(whole: Tensor | None, n: int) -> Tensor | None:
    """Return the last n elements and zeros, one vector."""
    if whole is None:
        return None
    padded = torch.zeros(_BYTES // whole.element_size(), dtype=whole.dtype, device=whole.device)
    padded[:n] = whole.reshape(-1)[-n:]
    return padded
