"""Permutation of tokens by Triton's interpreter against torch's selection and sums of rows."""

import pytest
import torch

from megatron.core.kernels.permutation import IndexPermutation
from megatron.core.kernels.triton_kernels.permutation import SortedPermutation
from megatron.core.transformer.moe.token_dispatcher import expert_assignments
from tests.gpu_without_gpu.triton_kernels.comparing import TOLERANCE_OF, compare

ROUTINGS = {
    "each token at two experts": dict(t=9, e=4, h=40, k=2),
    "one expert": dict(t=5, e=1, h=7, k=1),
    "wide rows": dict(t=3, e=4, h=2052, k=3),
    "tokens without an expert": dict(t=20, e=6, h=33, k=0),
    "no token": dict(t=0, e=4, h=8, k=2),
}


@pytest.mark.parametrize("dtype", TOLERANCE_OF)
@pytest.mark.parametrize("name", ROUTINGS)
def test_permutation(name, dtype):
    check_permutation(dtype, **ROUTINGS[name])


def check_permutation(dtype, t, e, h, k):
    probs = torch.rand(t, e + 2)  # of two experts on another rank before those here
    if k:
        routing_map = torch.zeros(t, e, dtype=torch.bool)
        routing_map.scatter_(1, probs[:, :e].topk(k, 1).indices, True)
    else:
        routing_map = torch.rand(t, e) < 0.2
    expert, token = expert_assignments(routing_map)

    def there_and_back(kind):
        def run(tokens, probs, rows):
            order = kind(expert, token, t)
            return order.permute(tokens), order.weights(probs, 2), order.unpermute(rows)

        return run

    inputs = [torch.randn(t, h).to(dtype), probs, torch.randn(len(token), h).to(dtype)]
    compare(there_and_back(SortedPermutation), there_and_back(IndexPermutation), inputs,
            TOLERANCE_OF[dtype])  # fmt: skip


def test_a_sum_of_rows_does_not_round_in_between():
    """A running sum in bf16 would lose each of the eight small rows."""
    rows = torch.full((9, 4), 2.0**-6, dtype=torch.bfloat16)
    rows[0] = 8.0
    permutation = SortedPermutation(torch.arange(9), torch.zeros(9, dtype=torch.int64), 1)
    assert torch.equal(permutation.unpermute(rows), torch.full((1, 4), 8.125).bfloat16())
