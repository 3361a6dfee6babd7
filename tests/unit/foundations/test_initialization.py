"""Initial weights that do not depend on the layout."""

import torch
from torch import nn

from megatron.core.parameters.initialization import (
    canonical_names,
    full_weight,
    init_method_normal,
    initialize_parameters,
)
from megatron.core.parameters.param_meta import ParamMeta, set_param_meta, unshard


class Layer(nn.Module):
    def __init__(self, number, rows, meta):
        super().__init__()
        self.layer_number = number
        self.weight = nn.Parameter(torch.empty(rows, 6))
        self.norm = nn.LayerNorm(4)
        self.plain = nn.Linear(3, 3)
        set_param_meta(self.weight, meta)


def build(numbers, rows, meta, rank=0, size=1):
    model = nn.Module()
    model.layers = nn.ModuleList(Layer(n, rows, meta) for n in numbers)
    initialize_parameters(model, seed=3, axis_rank={"tp": rank}, axis_size={"tp": size})
    return model


def test_a_stage_names_its_layers_by_their_global_number():
    names = canonical_names(build([3, 4], 4, ParamMeta()))
    assert names["layers.0.weight"] == "layers.2.weight"
    assert names["layers.1.plain.bias"] == "layers.3.plain.bias"


def test_pipeline_stage_and_tensor_shards_hold_slices_of_the_same_model():
    for init in (init_method_normal(0.02), nn.init.xavier_normal_):
        for split_dim, stride in ((0, 1), (0, 2), (1, 1), (None, 1)):
            meta = ParamMeta(split_dim=split_dim, split_axis="tp", stride=stride, init_method=init)
            whole = build([1, 2, 3], 300, meta)
            if split_dim == 0:
                shards = [build([2], 150, meta, r, 2).layers[0].weight for r in range(2)]
            elif split_dim is None:
                shards = [build([2], 300, meta, 1, 2).layers[0].weight]
            else:
                continue
            assert torch.equal(unshard(shards, meta), whole.layers[1].weight)


def test_an_initialiser_that_reads_the_shape_draws_vectors_too():
    meta = ParamMeta(split_dim=0, split_axis="tp", init_method=nn.init.xavier_uniform_)
    drawn = full_weight((6,), meta, nn.init.xavier_uniform_, torch.device("cpu"))
    assert 0 < drawn.abs().max() <= (6 / 7) ** 0.5


def test_plain_torch_modules_are_reset_by_name():
    whole, stage = build([1, 2], 4, ParamMeta()), build([2], 4, ParamMeta())
    assert torch.equal(whole.layers[1].plain.weight, stage.layers[0].plain.weight)
    assert not torch.equal(whole.layers[0].plain.weight, stage.layers[0].plain.weight)


def test_a_padded_vocabulary_begins_with_the_same_rows():
    meta = ParamMeta(split_dim=0, split_axis="tp", init_method=init_method_normal(1.0))
    short, long = build([1], 200, meta), build([1], 384, meta)
    assert torch.equal(short.layers[0].weight, long.layers[0].weight[:200])


def test_the_default_generator_is_left_alone():
    model = build([1], 8, ParamMeta(init_method=init_method_normal(1.0)))
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    initialize_parameters(model, seed=3, axis_rank={}, axis_size={})
    assert torch.equal(torch.randn(3), expected)


def test_half_precision_weights_are_the_rounded_fp32_ones():
    meta = ParamMeta(init_method=init_method_normal(1.0))
    exact = build([1], 8, meta).layers[0].weight
    layer = nn.Module()
    layer.layers = nn.ModuleList([Layer(1, 8, meta)])
    layer.bfloat16()
    set_param_meta(layer.layers[0].weight, meta)
    initialize_parameters(layer, seed=3, axis_rank={}, axis_size={})
    assert torch.equal(layer.layers[0].weight, exact.bfloat16())
