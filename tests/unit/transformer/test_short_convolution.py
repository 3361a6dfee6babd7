"""The gated short convolution equals its formula, and a document begins without a past."""

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import FP64_REORDERED_SUM, assert_close

WIDTH, HEADS, TAPS = 24, 4, 3


def make():
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=HEADS, init_method_std=0.3,
        experimental_attention_variant="short_conv", linear_conv_kernel_dim=TAPS,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(kind=config.layer_kind(1)).submodules.self_attention
    groups = ProcessGroupCollection.single()
    return build_module(spec, config=config, layer_number=1, pg_collection=groups).double()


def formula(mixer, x):
    """Return W_out (C * conv(B * x)) of x [s, b, h], with one loop over tokens and taps."""
    of_blocks = mixer.in_proj.weight.view(HEADS, 3, WIDTH // HEADS, WIDTH)
    before, after, value = (x @ part.flatten(0, 1).t() for part in of_blocks.unbind(1))
    gated, taps = before * value, mixer.conv1d.weight[:, 0]
    rows = []
    for token in range(len(x)):
        seen = [(tap, token - TAPS + 1 + tap) for tap in range(TAPS)]
        rows.append(sum(gated[place] * taps[:, tap] for tap, place in seen if place >= 0))
    return (after * torch.stack(rows)) @ mixer.out_proj.weight.t()


@pytest.mark.parametrize("documents", [None, [5, 6]])
def test_outputs_and_gradients_are_those_of_the_formula(documents):
    torch.manual_seed(2)
    mixer = make()
    x = torch.randn(11, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    packed = None
    if documents is not None:
        ids = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
        packed = PackedSeqParams(seq_idx=ids.expand(2, -1).int())
    ours, _ = mixer(x, packed_seq_params=packed)
    theirs = torch.cat([formula(mixer, part) for part in x.split(documents or [11])])
    assert_close(ours, theirs, FP64_REORDERED_SUM, "output")
    weight, parameters = torch.randn_like(ours), [x, *mixer.parameters()]
    pairs = zip(
        torch.autograd.grad((ours * weight).sum(), parameters),
        torch.autograd.grad((theirs * weight).sum(), parameters),
        strict=True,
    )
    for mine, other in pairs:
        assert_close(mine, other, FP64_REORDERED_SUM, "gradient")
