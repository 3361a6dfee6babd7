"""Shards of a parameter and the main-gradient protocol."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.kernels.weight_gradient import main_grad_addmm
from megatron.core.parameters.param_meta import (
    ParamMeta,
    accumulate_main_grad,
    full_shape,
    get_param_meta,
    set_param_meta,
    shard_of,
    unshard,
)


@given(
    dim=st.integers(0, 1), stride=st.integers(1, 3), size=st.integers(1, 5), piece=st.integers(1, 4)
)
def test_unshard_inverts_shard(dim, stride, size, piece):
    shape = [3, 3]
    shape[dim] = stride * size * piece
    full = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    meta = ParamMeta(split_dim=dim, split_axis="tp", stride=stride)
    shards = [shard_of(full, meta, rank, size) for rank in range(size)]
    assert all(full_shape(s.shape, meta, size) == full.shape for s in shards)
    assert torch.equal(unshard(shards, meta), full)


def test_a_gated_projection_keeps_gate_and_up_on_every_rank():
    full = torch.arange(8.0).view(8, 1)  # rows 0-3 gate, 4-7 up
    meta = ParamMeta(split_dim=0, split_axis="tp", stride=2)
    assert shard_of(full, meta, 1, 2).flatten().tolist() == [2, 3, 6, 7]


def test_a_plain_parameter_is_replicated():
    assert get_param_meta(torch.nn.Parameter(torch.ones(2))).split_dim is None


def test_attributes_of_third_parties_are_read():
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.tensor_model_parallel, parameter.partition_dim = True, 1
    parameter.sequence_parallel = True
    meta = get_param_meta(parameter)
    assert (meta.split_dim, meta.split_axis, meta.partial_grad_axes) == (1, "tp", ("tp",))


def test_sequence_parallel_set_later_is_seen():
    parameter = torch.nn.Parameter(torch.ones(2))
    set_param_meta(parameter, ParamMeta())
    parameter.sequence_parallel = True
    assert get_param_meta(parameter).partial_grad_axes == ("tp",)


def test_first_writer_of_a_step_overwrites_and_later_ones_add():
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    parameter.main_grad = torch.full((2, 3), 9.0)
    parameter.main_grad_is_fresh = True
    left, right = torch.randn(2, 4), torch.randn(4, 3)
    main_grad_addmm(parameter, left, right)
    accumulate_main_grad(parameter, torch.ones(2, 3))
    main_grad_addmm(parameter, left, right)
    torch.testing.assert_close(parameter.main_grad, 2 * (left @ right) + 1)


def test_a_factor_beyond_half_precision_overflows_what_is_not_zero():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    parameter.main_grad = torch.zeros(2, dtype=torch.float16)
    for parameter.main_grad_is_fresh in (True, False):
        accumulate_main_grad(parameter, parameter.new_tensor([0.0, 1.0]).detach(), scale=2.0**32)
        assert parameter.main_grad.tolist() == [0.0, float("inf")]


def test_half_precision_products_accumulate_in_fp32():
    parameter = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    parameter.main_grad = torch.empty(2, 2)
    parameter.main_grad_is_fresh = True
    one = torch.eye(2, dtype=torch.bfloat16)
    for _ in range(512):
        main_grad_addmm(parameter, one, one)
    # A bf16 accumulator would stop at 256, where adding 1 no longer changes it.
    assert parameter.main_grad[0, 0].item() == 512.0


def test_the_gradient_hook_fires_once_when_backward_returns_none():
    """Data-parallel buckets rely on this behaviour of autograd."""

    class WritesMainGrad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            (weight,) = ctx.saved_tensors
            return grad @ weight, None

    weight = torch.nn.Parameter(torch.randn(3, 3))
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    calls = []
    node.register_hook(lambda *_: calls.append(1))
    x = torch.randn(2, 3, requires_grad=True)
    WritesMainGrad.apply(WritesMainGrad.apply(x, weight), weight).sum().backward()
    assert len(calls) == 1 and weight.grad is None
