"""Log-probabilities, entropy and divergence over a split vocabulary equal those of torch."""

import pytest
import torch

from megatron.core.tensor_parallel.log_probs import (
    vocab_parallel_kl_divergence,
    vocab_parallel_log_probs,
)
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP64_REORDERED_SUM, assert_close

NUM_IDS, PADDED, TEMPERATURE = 17, 24, 0.7


def numbers():
    draw = torch.Generator().manual_seed(3)
    logits, other = torch.randn(2, 3, 5, PADDED, dtype=torch.float64, generator=draw) * 3
    target = torch.randint(NUM_IDS, (3, 5), generator=draw)
    target[0, 0] = -100
    return logits, other, target, torch.randn(2, 3, 5, dtype=torch.float64, generator=draw)


def computed(groups):
    logits, other, target, (first, second) = numbers()
    width = PADDED // groups.tp.size()
    logits, other = (
        x[..., groups.tp.rank() * width :][..., :width].contiguous().requires_grad_()
        for x in (logits, other)
    )
    found = vocab_parallel_log_probs(
        logits, target, temperature=TEMPERATURE, tp_group=groups.tp, num_valid=NUM_IDS
    )
    torch.autograd.backward((found.log_probs, found.entropy), (first, second))
    gradient, logits.grad = logits.grad, None
    divergence = vocab_parallel_kl_divergence(
        logits, other, temperature=TEMPERATURE, tp_group=groups.tp, num_valid=NUM_IDS
    )
    divergence.backward(first)
    assert other.grad is None
    return [x.detach() for x in (*found, divergence)], gradient, logits.grad


def expected():
    logits, other, target, (first, second) = numbers()
    logits.requires_grad_()
    logs = (logits[..., :NUM_IDS] / TEMPERATURE).log_softmax(-1)
    is_asked = target != -100
    own = logs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1) * is_asked
    entropy = -(logs.exp() * logs).sum(-1) * is_asked
    torch.autograd.backward((own, entropy), (first, second), retain_graph=True)
    gradient, logits.grad = logits.grad, None
    others = (other[..., :NUM_IDS] / TEMPERATURE).log_softmax(-1)
    divergence = (others.exp() * (others - logs)).sum(-1)
    divergence.backward(first)
    values = [own, entropy, (logs.argmax(-1) == target), divergence]
    return [x.detach() for x in values], gradient, logits.grad


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_values_and_gradients_are_those_of_the_whole_vocabulary(tp):
    values, of_tokens, of_divergence = expected()
    ranks = run_distributed(computed, tp, tp=tp)
    names = ("log_probs", "entropy", "is_greedy", "divergence")
    for found, _, _ in ranks:
        assert all(torch.equal(a, b) for a, b in zip(found, ranks[0][0], strict=True))
        for name, a, b in zip(names, found, values, strict=True):
            assert_close(a, b, FP64_REORDERED_SUM, name)
    for index, whole in ((1, of_tokens), (2, of_divergence)):
        joined = torch.cat([rank[index] for rank in ranks], -1)
        assert_close(joined, whole, FP64_REORDERED_SUM, f"gradient {index}")
