"""Parallel layers: shards, facts, main gradients and errors, on one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.foundation.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parameters.initialization import deferred_initialization, init_method_normal
from megatron.core.parameters.param_meta import ParamMeta, get_param_meta, unshard
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_with_grad_accumulation_and_async_allreduce,
    param_is_not_tensor_parallel_duplicate,
    set_tensor_model_parallel_attributes,
)
from tests.harness.groups import FakeGroup, fake_groups
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, assert_close

NORMAL = init_method_normal(0.5)


def config(**changes) -> ModelParallelConfig:
    return ModelParallelConfig(**changes)


def column(output_size=12, **arguments) -> ColumnParallelLinear:
    arguments = {"config": config(), "init_method": NORMAL, **arguments}
    return ColumnParallelLinear(8, output_size, **arguments)


def row(**arguments) -> RowParallelLinear:
    arguments = {
        "config": config(), "init_method": NORMAL, "bias": True, "input_is_parallel": True,
        "skip_bias_add": False, **arguments,
    }  # fmt: skip
    return RowParallelLinear(8, 12, **arguments)


def embedding(size=16, **arguments) -> VocabParallelEmbedding:
    arguments = {"config": config(), "init_method": NORMAL, **arguments}
    return VocabParallelEmbedding(size, 4, **arguments)


# Shards and facts ---------------------------------------------------------------------------


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(("make", "shape"), [
    (column, (12, 8)), (lambda **a: column(output_size=16, stride=2, **a), (16, 8)),
    (row, (12, 8)), (embedding, (16, 4)),
])  # fmt: skip
def test_shards_of_an_eager_initialisation_join_to_the_serial_weight(make, shape, tp_size):
    torch.manual_seed(5)
    serial = make().weight
    shards = []
    for rank in range(tp_size):
        torch.manual_seed(5)
        shards.append(make(tp_group=FakeGroup(rank, tp_size)).weight)
    assert_close(unshard(shards, get_param_meta(shards[0])), serial, EXACT, "weight")
    assert serial.shape == shape and serial.std() > 0.3


def test_layers_state_the_facts_of_their_parameters():
    group = FakeGroup(1, 2)
    a, b, e = column(tp_group=group, stride=2), row(tp_group=group), embedding(tp_group=group)
    facts = {
        "column": (get_param_meta(a.weight), (0, "tp", 2)),
        "column bias": (get_param_meta(a.bias), (0, "tp", 2)),
        "row": (get_param_meta(b.weight), (1, "tp", 1)),
        "row bias": (get_param_meta(b.bias), (None, None, 1)),
        "embedding": (get_param_meta(e.weight), (0, "tp", 1)),
    }
    for name, (meta, expected) in facts.items():
        assert (meta.split_dim, meta.split_axis, meta.stride) == expected, name
        assert meta.partial_grad_axes == (), name
    assert get_param_meta(e.weight).is_embedding_or_output
    assert (e.vocab_start_index, e.vocab_end_index) == (8, 16)
    assert a.weight.partition_stride == 2 and b.weight.partition_dim == 1


def test_expert_layers_split_over_the_expert_axis():
    groups = fake_groups(tp=(0, 4), expt_tp=(1, 2))
    layer = column(is_expert=True, pg_collection=groups)
    meta = get_param_meta(layer.weight)
    assert (meta.split_axis, meta.is_expert, layer.tp_size) == ("expt_tp", True, 2)
    assert not layer.allreduce_dgrad, "the dispatcher communicates for experts"


def test_deferred_or_switched_off_initialisation_draws_nothing():
    state = torch.get_rng_state()
    with deferred_initialization():
        column()
    column(config=config(perform_initialization=False))
    assert torch.equal(torch.get_rng_state(), state)


def test_groups_fall_back_to_the_current_collection():
    ProcessGroupCollection.set_current(fake_groups(tp=(1, 2)))
    try:
        assert column().tp_rank == 1
        assert column(pg_collection=ProcessGroupCollection.single()).tp_size == 1
    finally:
        ProcessGroupCollection.set_current(None)


def test_parameters_are_made_in_the_configured_dtype_from_the_same_numbers():
    torch.manual_seed(0)
    single = column().weight
    torch.manual_seed(0)
    half = column(config=config(params_dtype=torch.bfloat16)).weight
    assert torch.equal(half, single.bfloat16())


def test_state_dicts_have_an_empty_extra_state_and_do_without_it():
    layer = column()
    state = layer.state_dict()
    assert list(state) == ["weight", "bias", "_extra_state"] and state["_extra_state"] is None
    del state["_extra_state"]
    column().load_state_dict(state)


def test_megatron_attributes_of_third_party_tensors():
    tensor = nn.Parameter(torch.zeros(4, 2))
    set_tensor_model_parallel_attributes(tensor, True, 1, 1)
    assert get_param_meta(tensor) == ParamMeta(split_dim=1, split_axis="tp")
    plain = nn.Parameter(torch.zeros(3))
    assert param_is_not_tensor_parallel_duplicate(tensor, FakeGroup(1, 2))
    assert param_is_not_tensor_parallel_duplicate(plain, FakeGroup(0, 2))
    assert not param_is_not_tensor_parallel_duplicate(plain, FakeGroup(1, 2))


# Arithmetic on one rank ---------------------------------------------------------------------


@pytest.mark.parametrize("skip_bias_add", [False, True])
def test_one_rank_computes_exactly_torchs_linear(skip_bias_add):
    x = torch.randn(5, 2, 8)
    layer = column(skip_bias_add=skip_bias_add)
    nn.init.normal_(layer.bias)
    out, bias = layer(x)
    if skip_bias_add:
        assert bias is layer.bias
        assert torch.equal(out, F.linear(x, layer.weight))
    else:
        assert bias is None
        assert torch.equal(out, F.linear(x, layer.weight, layer.bias))


def test_a_tied_head_uses_the_weight_it_is_given():
    head = column(skip_weight_param_allocation=True, bias=False, output_dtype=torch.float64)
    weight = torch.randn(12, 8)
    x = torch.randn(3, 1, 8)
    out, _ = head(x, weight=weight)
    assert torch.equal(out, F.linear(x, weight).double())
    assert dict(head.named_parameters()) == {}
    with pytest.raises(ConfigError, match="without a weight was called without one"):
        head(x)
    with pytest.raises(ConfigError, match="a weight of shape"):
        head(x, weight=weight[:3])


def give_main_grads(module: nn.Module, value: float, is_fresh: bool, dtype=torch.float32) -> None:
    for parameter in module.parameters():
        parameter.main_grad = torch.full(parameter.shape, value, dtype=dtype)
        parameter.main_grad_is_fresh = is_fresh


def plain_gradients(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    out, _ = layer(x)
    grads = torch.autograd.grad((out.float() ** 2).sum(), list(layer.parameters()))
    return dict(zip(dict(layer.named_parameters()), grads, strict=True))


@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [column, row])
def test_gradients_go_straight_into_main_gradients(make, main_dtype, is_fresh):
    layer, x = make(), torch.randn(5, 2, 8, requires_grad=True)
    expected = plain_gradients(layer, x.detach())
    give_main_grads(layer, 3.0, is_fresh, main_dtype)
    (layer(x)[0] ** 2).sum().backward()
    for name, parameter in layer.named_parameters():
        wanted = expected[name] if is_fresh else expected[name] + 3.0
        assert parameter.grad is None and not parameter.main_grad_is_fresh
        assert_close(parameter.main_grad, wanted, FP32_REORDERED_SUM, name)
    assert x.grad is not None


def test_a_layer_used_twice_adds_both_gradients_and_notifies_once():
    layer, x = column(output_size=8), torch.randn(5, 2, 8)
    out = layer(layer(x)[0])[0]
    expected = torch.autograd.grad((out**2).sum(), list(layer.parameters()))
    give_main_grads(layer, 9.0, True)
    node = layer.weight.view_as(layer.weight).grad_fn.next_functions[0][0]
    calls = []
    node.register_hook(lambda *_: calls.append(1))
    (layer(layer(x)[0])[0] ** 2).sum().backward()
    assert calls == [1]
    for parameter, wanted in zip(layer.parameters(), expected, strict=True):
        assert_close(parameter.main_grad, wanted, FP32_REORDERED_SUM, "twice used")


def test_bf16_weights_accumulate_in_fp32():
    layer = column(config=config(params_dtype=torch.bfloat16))
    x = torch.randn(64, 2, 8).bfloat16()
    once = plain_gradients(layer, x)
    give_main_grads(layer, 0.0, True)
    for _ in range(3):
        (layer(x)[0].float() ** 2).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.main_grad.dtype == torch.float32
        assert_close(parameter.main_grad, once[name].float() * 3, FP32_REORDERED_SUM, name)


def test_large_mixed_sums_go_in_pieces(monkeypatch):
    monkeypatch.setattr("megatron.core.parameters.param_meta.MIXED_SUM_ELEMENTS", 7)
    test_bf16_weights_accumulate_in_fp32()


def test_frozen_parameters_get_no_gradient():
    layer, x = column(), torch.randn(3, 1, 8, requires_grad=True)
    give_main_grads(layer, 1.0, True)
    layer.weight.requires_grad_(False)
    layer(x)[0].sum().backward()
    assert layer.weight.main_grad_is_fresh and not layer.bias.main_grad_is_fresh
    assert x.grad is not None


def test_fusion_switched_off_leaves_gradients_to_autograd():
    layer = column(config=config(gradient_accumulation_fusion=False))
    give_main_grads(layer, 1.0, True)
    layer(torch.randn(3, 1, 8))[0].sum().backward()
    assert layer.weight.grad is not None and layer.weight.main_grad_is_fresh


def test_autocast_reaches_a_layer_with_main_gradients():
    layer, x = column(), torch.randn(3, 1, 8)
    give_main_grads(layer, 0.0, True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)[0]
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_the_functional_form_equals_torchs_linear():
    x, weight, bias = torch.randn(4, 2, 8), torch.randn(6, 8), torch.randn(6)
    out = linear_with_grad_accumulation_and_async_allreduce(x, weight, bias, True, True, False)
    assert torch.equal(out, F.linear(x, weight, bias))


@pytest.mark.parametrize("arguments", [
    {"grad_output_buffer": []}, {"embedding_activation_buffer": []},
])  # fmt: skip
def test_deferred_weight_gradients_are_refused(arguments):
    with pytest.raises(ConfigError, match="defer-embedding-wgrad-compute"):
        column(**arguments)


def test_gathering_or_cutting_under_sequence_parallelism_is_refused():
    sequence_parallel = config(tensor_model_parallel_size=2, sequence_parallel=True)
    with pytest.raises(ConfigError, match="gathers its output"):
        column(gather_output=True, config=sequence_parallel, tp_group=FakeGroup(0, 2))
    with pytest.raises(ConfigError, match="cut its input"):
        row(input_is_parallel=False, config=sequence_parallel, tp_group=FakeGroup(0, 2))


# Embedding ----------------------------------------------------------------------------------


def test_one_rank_looks_up_exactly_torchs_embedding():
    layer, ids = embedding(), torch.randint(0, 16, (3, 5))
    assert torch.equal(layer(ids), F.embedding(ids, layer.weight))


@pytest.mark.parametrize("is_fresh", [True, False])
def test_the_embedding_adds_touched_rows_to_the_main_gradient(is_fresh):
    layer, ids = embedding(), torch.randint(0, 5, (3, 5))
    upstream = torch.randn(3, 5, 4)
    (expected,) = torch.autograd.grad(layer(ids), layer.weight, upstream)
    give_main_grads(layer, 2.0, is_fresh)
    layer(ids).backward(upstream)
    wanted = expected if is_fresh else expected + 2.0
    assert layer.weight.grad is None
    assert_close(layer.weight.main_grad, wanted, FP32_REORDERED_SUM, "embedding")


def test_an_empty_batch_of_ids_is_no_error():
    assert embedding()(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 4)
