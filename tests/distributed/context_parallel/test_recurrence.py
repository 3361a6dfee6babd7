"""A recurrence over ranks that share a sequence is that of one process, in output and gradients."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.core.context_parallel.partition import shard_sequence
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import sequence_pieces
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP64_REORDERED_SUM, assert_close

BATCH, HIDDEN = 2, 32


def outputs_and_gradients(groups, variant, length, documents, taps):
    """Return this rank's output rows, its part of the input's gradient, and the weights' sums."""
    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, init_method_std=0.3,
        context_parallel_size=groups.cp.size(), experimental_attention_variant=variant,
        mamba_num_groups=2, mamba_num_heads=4, mamba_head_dim=6, mamba_state_dim=5,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
        linear_value_head_dim=5, linear_conv_kernel_dim=taps, use_cpu_initialization=True,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(kind=config.layer_kind(1)).submodules.self_attention
    mixer = build_module(spec, config=config, layer_number=1, pg_collection=groups).double()
    made = torch.Generator().manual_seed(1)
    size, rank = groups.cp.size(), groups.cp.rank()
    x, weight = (torch.randn(length, BATCH, HIDDEN, generator=made).double() for _ in range(2))
    if size > 1:
        x, weight = (shard_sequence(t, 0, rank, size) for t in (x, weight))
    packed = None
    if documents is not None:
        rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents]
        packed = PackedSeqParams(seq_idx=torch.stack(rows).int())
    out, _ = mixer(x.requires_grad_(), packed_seq_params=packed)
    (out * weight).sum().backward()
    gradients = {name: parameter.grad for name, parameter in mixer.named_parameters()}
    if size > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=groups.cp)
    return out.detach(), x.grad, gradients


CASES = [
    (2, 20, None, 4),
    (2, 12, ([5, 7], [1, 2, 9]), 4),
    (4, 16, ([3, 6, 7], [9, 7]), 4),  # pieces shorter than what the convolution sees
    (4, 24, ([24], [6, 6, 6, 6]), 1),
]


@pytest.mark.distributed
@pytest.mark.parametrize("variant", ["gated_delta_net", "kda", "mamba2", "short_conv"])
@pytest.mark.parametrize(("cp", "length", "documents", "taps"), CASES)
def test_outputs_and_gradients_are_those_of_one_process(variant, cp, length, documents, taps):
    case = (variant, length, documents, taps)
    out, of_input, gradients = outputs_and_gradients(ProcessGroupCollection.single(), *case)
    for rank, found in enumerate(run_distributed(outputs_and_gradients, cp, *case, cp=cp)):
        mine = shard_sequence(out, 0, rank, cp)
        assert_close(found[0], mine, FP64_REORDERED_SUM, "output")
        mine = shard_sequence(of_input, 0, rank, cp)
        assert_close(found[1], mine, FP64_REORDERED_SUM, "gradient of the input")
        for name, gradient in found[2].items():
            assert_close(gradient, gradients[name], FP64_REORDERED_SUM, f"gradient of {name}")


def gathered_bytes(groups, variant, length):
    """Return the bytes that this rank gives to each gather of a forward pass."""
    found, gather = [], sequence_pieces.gather_from_sequence_parallel_region

    def counting(x, **options):
        found.append(x.nbytes)
        return gather(x, **options)

    with patch.object(sequence_pieces, "gather_from_sequence_parallel_region", counting):
        outputs_and_gradients(groups, variant, length, None, 4)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("variant", ["gated_delta_net", "kda", "mamba2"])
def test_bytes_of_the_exchange_do_not_depend_on_the_length(variant):
    short, long = (run_distributed(gathered_bytes, 2, variant, n, cp=2) for n in (16, 512))
    assert short == long
    pieces, item = 2 * BATCH, 8
    # Of each head a matrix or a number, and a state: 2 groups of 2 heads.
    delta = (2 * 2 * 6 * (6 + 5), 2 * 2 * 6 + 4 * 5)
    state, channels = delta if variant != "mamba2" else (2 * 2 * (1 + 5) * 6, 4 * 6 + 2 * 2 * 5)
    assert short == [[pieces * 3 * channels * item, pieces * state * item]] * 2
