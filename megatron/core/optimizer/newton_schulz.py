"""Orthogonalisation of matrices by matrix products alone.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), section
"Newton-Schulz"; N. Higham, "Functions of Matrices", section 8.3. The iteration

    X <- a X + b (X X^T) X + c (X X^T)^2 X

drives every singular value of X towards 1 and leaves the singular vectors alone. With these
coefficients five steps bring singular values of 0.01 and more into about [0.7, 1.2], which is as
good as 1 for an update.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.foundation.device import computes_fast_in_bf16
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c: steepest at 0 among those that stay near 1 once there."""


def orthogonalize(
    matrix: Tensor, num_steps: int = 5, *, split_dim: int | None = None, group: Group
) -> Tensor:
    """Return the matrix with its singular values moved to about 1.

    Args:
        matrix: [m, n], fp32; or this rank's rows (split_dim 0) or columns (split_dim 1) of it.
        group: the ranks that hold the other parts; of size 1: the matrix is unsharded.
    Returns:
        of the shape of `matrix`, fp32.
    Communication:
        for a split matrix, an all-reduce of one number and, in each step, of the Gram matrix over
        the dimension that is not split.
    """
    is_split = split_dim is not None and group.size() > 1
    transposes = split_dim == 0 if is_split else matrix.shape[0] > matrix.shape[1]
    # Work on [k, l] with the Gram matrix [k, k] over k: the shorter side, or the unsplit one.
    x = (matrix.T if transposes else matrix).contiguous()
    square = x.square().sum()
    if is_split:
        torch_collectives.all_reduce(square, group)
    x = x / square.sqrt().clamp_min(1e-7)
    # bf16 is accurate enough for an iteration that corrects itself, and fast on accelerators.
    x = x.bfloat16() if computes_fast_in_bf16(x.device) else x
    a, b, c = QUINTIC
    for _ in range(num_steps):
        gram = x @ x.T
        if is_split:
            torch_collectives.all_reduce(gram, group)
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if transposes else x).float().contiguous()


def update_scale(num_rows: int, num_columns: int, mode: str) -> float:
    """Return the factor on an orthogonal update of a weight [num_rows, num_columns].

    Args:
        mode: "spectral": sqrt(max(rows, columns)); the root mean square of an update is then 1, and
            0.2 of it moves weights as Adam does (J. Liu et al., "Muon is Scalable for LLM
            Training", section 2.2, arXiv 2502.16982). "unit_rms_norm": sqrt(rows / columns), which
            changes outputs of unit size by outputs of unit size (J. Bernstein, "Deriving Muon").
            "shape_scaling": sqrt(max(1, rows / columns)), as Muon was published.
    """
    if mode == "spectral":
        return math.sqrt(max(num_rows, num_columns))
    if mode == "unit_rms_norm":
        return math.sqrt(num_rows / num_columns)
    return math.sqrt(max(1.0, num_rows / num_columns))
