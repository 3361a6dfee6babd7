"""Formats, scales, recipes. A million values: `python -m tests.parity.low_precision_formats`."""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.low_precision.products import LinearProducts
from megatron.core.low_precision.recipes import fp8_recipe
from megatron.core.low_precision.scaling import Cut
from megatron.core.low_precision.spreading import rotate
from megatron.core.step_context.context import AuxLossScale, within_step
from megatron.core.step_context.random_scope import SequenceShard
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.low_precision_layers import multiplies_in_low_precision
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.parity.low_precision_formats import by_definition, digest, own

# Of what torchao 0.18 makes of the same values.
TORCHAO = {
    "MX e4m3 scales, RCEIL": "8dca9a05d086e9c3",
    "MX e4m3 elements, RCEIL": "01c91b3c4e508033",
    "MX e4m3 scales, FLOOR": "d4781ee260952cb0",
    "MX e4m3 elements, FLOOR": "bda816c22bc455b0",
    "MX e5m2 scales, RCEIL": "6801ca42f46e100c",
    "MX e5m2 elements, RCEIL": "e0f2f730ae3db015",
    "MX e5m2 scales, FLOOR": "eaef3aa7f9864173",
    "MX e5m2 elements, FLOOR": "d89cc513137afc1e",
    "MX e2m1 scales, RCEIL": "56b60b20c16d4ceb",
    "MX e2m1 elements, RCEIL": "edce2c20a42300cb",
    "MX e2m1 scales, FLOOR": "15c42d611a2dfe9e",
    "MX e2m1 elements, FLOOR": "3b8ba46196bd5367",
    "NVFP4 scales": "ce19644c6c787a92",
    "NVFP4 elements": "d95182ec65a6b84c",
}


def test_elements_and_scales_are_those_of_the_definitions():
    different = [name for name, same in by_definition(2**15) if not same]
    assert not different


def test_codes_are_those_of_torchao():
    assert {name: digest(codes) for name, codes in own(2**15)} == TORCHAO


def test_a_rotation_of_both_operands_leaves_their_product():
    torch.manual_seed(0)
    x, y = torch.randn(3, 40).double(), torch.randn(5, 40).double()
    torch.testing.assert_close(rotate(x) @ rotate(y).t(), x @ y.t())


def test_a_step_that_overflows_leaves_the_scale_as_it_was():
    history = AmaxHistory(torch.nn.Module(), "amax_history", 2, uses_largest=True)
    assert history.amax(2) == 0
    for amax in (8.0, float("inf"), 2.0):
        history.record(2, torch.tensor(amax))
        history.move(history.take_step())
    assert history.steps[:, 2].tolist() == [2.0, 8.0]
    assert history.amax(2) == 8.0


@pytest.mark.parametrize("kind", ["delayed", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("unit", [1 / 8, 1 / 6, 3 / 2, 3.0])
def test_gradients_are_rounded_at_the_same_steps_whatever_the_layout_multiplies_the_loss_with(
    kind, unit
):
    torch.manual_seed(0)
    weight, x, grad = torch.randn(8, 16), torch.randn(4, 1, 16), torch.randn(4, 1, 8) / 400
    recipe = fp8_recipe(kind, "e4m3")

    def gradients(unit: float) -> tuple[torch.Tensor, torch.Tensor]:
        history = AmaxHistory(torch.nn.Module(), "amax_history", 1, uses_largest=False)
        products = LinearProducts(
            recipe=recipe, tp=SINGLE_RANK, cp=SINGLE_RANK, split_dim=None,
            history=history if recipe.uses_history else None,
        )  # fmt: skip
        with within_step(aux_loss_scale=AuxLossScale(unit)):
            call = products.call(x, None, records=True)
        own = grad.double() * unit
        return (
            products.input_gradient(own, weight.double(), call) / unit,
            products.weight_gradient(own, x.double(), call) / unit,
        )

    for found, expected in zip(gradients(unit), gradients(1.0), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("total", [96, 120, 192, 240])
def test_ranks_agree_on_which_blocks_they_share(ranks, total):
    """A rank that saw none shared would not come to the all-reduce of the others."""

    def cut(rank: int) -> Cut:
        positions = SequenceShard.zigzag(total, rank, ranks).positions()
        return Cut(positions, total, total // (2 * ranks), largest=lambda x: x)

    for block in (16, 32, 128):
        owners = [set((cut(rank).positions // block).tolist()) for rank in range(ranks)]
        shared = sum(len(blocks) for blocks in owners) > len(set().union(*owners))
        answers = {cut(rank).keeps_whole(block) for rank in range(ranks)}
        assert len(answers) == 1
        assert not (shared and answers.pop())


def config(**settings) -> TransformerConfig:
    return TransformerConfig(num_layers=6, hidden_size=16, num_attention_heads=2, **settings)


def test_first_and_last_layers_keep_the_dtype_of_the_model():
    some = config(fp8="e4m3", first_last_layers_bf16=True, num_layers_at_start_in_bf16=2)
    assert [n for n in range(1, 8) if multiplies_in_low_precision(some, n)] == [3, 4, 5]
    every = config(fp8="e4m3")
    assert all(multiplies_in_low_precision(every, n) for n in range(1, 7))


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"fp8": "e4m3", "fp4": "e2m1"}, "--fp4-format"),
        ({"fp8": "e4m3", "mlp_chunks_for_training": 2}, "--mlp-chunks-for-training"),
        ({"fp8": "e4m3", "fp8_amax_history_len": 0}, "--fp8-amax-history-len"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings, flag):
    with pytest.raises(ConfigError, match=flag):
        config(**settings)
