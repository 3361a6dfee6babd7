"""Sequences of several lengths, padded or packed into one sample, against a loop over sequences."""

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.load_balancing import finish_router_step
from megatron.core.transformer.moe.routing import sinkhorn
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.unit.transformer.moe.small_layer import E, H, K, layer

LENGTHS = (5, 2, 9, 1)
LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.3, 0.2],
    "moe_z_loss_coeff": 0.05,
}
ROUTERS = [
    {},
    {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    {"moe_expert_capacity_factor": 0.6},
    {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"},
    {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    {"moe_latent_size": 10},
    {"moe_layer_recompute": True},
    {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
]


def sequences():
    source = torch.Generator().manual_seed(8)
    return [torch.randn(n, H, generator=source) for n in LENGTHS]


def padded(length, options):
    """Run the sequences as samples of `length`; return the layer and its outputs."""
    mask = torch.arange(length) >= torch.tensor(LENGTHS)[:, None]
    x = torch.full((length, len(LENGTHS), H), 3.0)  # a value that would be seen
    for column, sequence in enumerate(sequences()):
        x[: len(sequence), column] = sequence
    moe = layer(add_bias_linear=False, **options)
    out = moe(x.requires_grad_(), padding_mask=mask)[0]
    return moe, torch.cat([out[:n, column] for column, n in enumerate(LENGTHS)])


def packed(num_padding, options):
    """Run the sequences back to back in one sample."""
    total = sum(LENGTHS) + num_padding
    documents = torch.repeat_interleave(
        torch.arange(len(LENGTHS) + 1), torch.tensor([*LENGTHS, num_padding])
    )
    x = torch.cat([*sequences(), torch.full((num_padding, H), 3.0)])[:, None]
    moe = layer(add_bias_linear=False, **options)
    out = moe(
        x.requires_grad_(),
        padding_mask=(torch.arange(total) >= sum(LENGTHS))[None],
        packed_seq_params=PackedSeqParams(seq_idx=documents[None].int()),
    )[0]
    return moe, out[: sum(LENGTHS), 0]


def losses_by_hand(weight):
    """The balance losses as loops over sequences, from their definitions."""
    per_sequence = []
    for x in sequences():
        logits = x @ weight.t()
        scores, choices = logits.softmax(-1), torch.zeros(len(x), E)
        choices.scatter_(1, logits.topk(K).indices, 1.0)
        per_sequence.append((scores, choices, logits.logsumexp(-1).square()))

    def balance(scores, choices):
        return E * (choices.sum(0) / choices.sum() * scores.mean(0)).sum()

    scores, choices, squares = (torch.cat(parts) for parts in zip(*per_sequence, strict=True))
    of_sequences = torch.stack([balance(s, c) for s, c, _ in per_sequence])
    return {
        "aux_loss": balance(scores, choices),
        "seq_aux_loss": of_sequences.mean(),
        "global_aux_loss": E * (torch.full((E,), 1 / E) * scores.mean(0)).sum(),
        "z_loss": squares.mean(),
    }


FORMS = {
    "padded to 9": lambda options: padded(9, options),
    "padded to 23": lambda options: padded(23, options),
    "packed": lambda options: packed(0, options),
    "packed and padded": lambda options: packed(6, options),
}


@pytest.mark.parametrize("form", FORMS)
def test_balance_losses_are_means_over_tokens_and_sequences_however_they_are_stored(form):
    moe, out = FORMS[form](LOSSES)
    (out * 0).sum().backward()
    finish_router_step([moe], ProcessGroupCollection.single())
    weight = moe.router.weight.detach().clone().requires_grad_()
    expected = losses_by_hand(weight)
    for name, value in moe.router.load.step_losses.items():
        assert value == pytest.approx(expected[name].item(), rel=1e-5), name
    factors = dict(
        zip(LOSSES["moe_router_load_balancing_type"], LOSSES["moe_aux_loss_coeff"], strict=True)
    )
    factors["z_loss"] = LOSSES["moe_z_loss_coeff"]
    sum(factor * expected[name] for name, factor in factors.items()).backward()
    assert_close(moe.router.weight.grad, weight.grad, FP32_REORDERED_SUM, "router")


@pytest.mark.parametrize("options", ROUTERS)
def test_packed_sequences_are_routed_and_counted_as_padded_ones_whatever_the_padding(options):
    found = []
    for form in FORMS.values():
        moe, out = form({**LOSSES, **options})
        out.square().sum().backward()
        finish_router_step([moe], ProcessGroupCollection.single())
        load = moe.router.load
        found.append((moe, out, load.step_assignments, load.step_dropped, load.step_losses))
    reference, expected, assignments, dropped, losses = found[0]
    assert int(assignments.sum()) == sum(LENGTHS) * K
    for moe, out, counts, num_dropped, found_losses in found[1:]:
        assert counts.equal(assignments) and num_dropped == dropped
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert_close(out, expected, FP32_REORDERED_SUM, "output")
        for p, q in zip(moe.parameters(), reference.parameters(), strict=True):
            assert_close(p.grad, q.grad, FP32_REORDERED_SUM, "gradient")
        if reference.router.expert_bias is not None:
            assert moe.router.expert_bias.equal(reference.router.expert_bias)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_an_expert_takes_the_even_share_of_each_sequence_times_its_factor(policy):
    options = {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": policy}
    moe = layer(add_bias_linear=False, **options)
    kept = []
    for x in sequences():
        logits = x @ moe.router.weight.t()
        best = logits.topk(K)
        weights = torch.zeros(len(x), E).scatter(1, best.indices, best.values.softmax(-1))
        capacity = max(1, -int(-len(x) * K / E * 0.6 // 1))
        for expert in range(E):
            tokens = weights[:, expert].nonzero().flatten()
            if policy == "probs":
                tokens = tokens[weights[tokens, expert].argsort(descending=True, stable=True)]
            weights[tokens[capacity:], expert] = 0.0
        kept.append(weights > 0)
    routing_maps = []
    moe.router.register_forward_hook(lambda *call: routing_maps.append(call[2][1]))
    x = torch.cat(sequences())[:, None]
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    moe(x, packed_seq_params=PackedSeqParams(seq_idx=documents.int()))
    assert routing_maps[0].equal(torch.cat(kept))


def test_padding_takes_no_part_in_a_balanced_assignment():
    logits = torch.randn(40, E, generator=torch.Generator().manual_seed(1))
    is_token = torch.arange(40) % 3 != 0
    balanced = sinkhorn(logits, lambda x: x, is_token)
    assert_close(balanced[is_token], sinkhorn(logits[is_token], lambda x: x), FP32_REORDERED_SUM,
                 "assignment")  # fmt: skip
    assert balanced[~is_token].eq(0).all()
