"""The expert weights of a layer are adjacent in memory wherever they are stored.

One kernel then reads all of them without a copy, and one launch adds all of their gradients.
"""

from contextlib import ExitStack, nullcontext
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import nn

from megatron.core.kernels import grouped_products
from megatron.core.kernels.grouped_products import GROUPED_PRODUCTS, torch_grouped_mm
from megatron.core.kernels.registry import Kernel
from megatron.core.parameters import param_meta
from megatron.core.parameters.initialization import parameters_without_memory
from megatron.core.parameters.param_meta import accumulate_main_grads, as_one_tensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.step_context.deferred_wgrad import capture_wgrads, enable_wgrad_deferral
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.grouped_linear import GroupedLinear
from tests.distributed.distributed.replicas import whole_gradients, wrap
from tests.harness.distributed import distributed
from tests.harness.tolerances import EXACT, assert_close
from tests.unit.transformer.moe.small_layer import E, layer, tokens

SINGLE = ProcessGroupCollection.single()
LATENT = 8
"""Second products have weights of 192 elements: a buffer has padding after each of them."""
STAGES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


class Layers(nn.Module):
    """Two layers of experts, the second one with padding between its weights in a buffer."""

    def __init__(self, groups=SINGLE, dtype=torch.float32):
        super().__init__()
        options = {
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
            "gradient_accumulation_fusion": True,
        }
        self.layers = nn.ModuleList(
            [layer(groups, **options), layer(groups, moe_latent_size=LATENT, **options)]
        )
        self.layers[1].set_layer_number(2)
        self.to(dtype)

    def forward(self, x):
        for part in self.layers:
            x = x + part(x)[0]
        return x


def grouped(model):
    return [part for part in model.modules() if isinstance(part, GroupedLinear)]


def assert_adjacent(model):
    for part in grouped(model):
        for parameters in (part.weights(), part.biases()):
            joined = as_one_tensor(parameters)
            assert joined is not None
            assert torch.equal(joined, torch.stack(parameters))


class Views:
    """As on a GPU: one kernel multiplies, and reads counts on the device.

    Attributes:
        weights, gradients: whether a product found its weights, and a sum its gradients, adjacent.
    """

    def __enter__(self):
        self.weights, self.gradients = [], []
        kernels = {"cpu": (Kernel("torch-grouped-mm", torch_grouped_mm),)}
        self._patches = ExitStack()
        for patch in (
            mock.patch.object(token_dispatcher, "is_host_memory", return_value=False),
            mock.patch.dict(GROUPED_PRODUCTS.kernels, kernels),
            mock.patch.dict(GROUPED_PRODUCTS.chosen, clear=True),
            mock.patch.object(grouped_products, "as_one_tensor", self._noting(self.weights)),
            mock.patch.object(param_meta, "as_one_tensor", self._noting(self.gradients)),
        ):
            self._patches.enter_context(patch)
        return self

    def __exit__(self, *_):
        self._patches.close()

    @staticmethod
    def _noting(found):
        def noted(tensors):
            joined = as_one_tensor(tensors)
            found.append(joined is not None)
            return joined

        return noted


def step(ddp, num_microbatches=2):
    """Accumulate micro batches and return the owned part of each gradient."""
    ddp.zero_grad_buffer()
    dtype = next(ddp.parameters()).dtype
    with ddp.no_sync():
        for number in range(num_microbatches):
            x = (tokens() + number).to(dtype)
            ddp(x).float().square().mean().backward()
    ddp.finish_grad_sync()
    return {name: value.clone() for name, value in whole_gradients(ddp).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert_close(gradient.nan_to_num(7.0), expected[name].nan_to_num(7.0), EXACT, name)


def built(groups, stage, dtype=torch.float32, without_memory=False):
    with parameters_without_memory() if without_memory else nullcontext():
        model = Layers(groups, dtype)
    return wrap(
        groups,
        model=model,
        data_parallel_sharding_strategy=stage,
        use_distributed_optimizer=stage != "no_shard",
        grad_reduce_in_fp32=True,
    )


def check_stages(groups, stages):
    """Check views, and that results are equal to the bit to products one by one."""
    is_split = groups.dp_cp.size() > 1
    for stage in stages:
        # Products one by one add fp32 products to fp32 gradients without rounding them before.
        for dtype, num_microbatches in ((torch.float32, 1), (torch.bfloat16, 2)):
            expected = step(built(groups, stage, dtype), num_microbatches)
            ddp = built(groups, stage, dtype)
            with Views() as views:
                assert_same(step(ddp, num_microbatches), expected)
                # Two products of each of two layers, in both passes of a micro batch; gradients
                # of weights and biases.
                assert views.weights == [True] * 8 * num_microbatches
                # ZeRO-2 leaves gradients in `.grad`, and copies them to buckets one by one.
                has_main = not (is_split and stage == "optim_grads")
                assert views.gradients == [True] * 8 * num_microbatches * has_main
                ddp.load_state_dict(ddp.state_dict())
                views.weights.clear()
                step(ddp, 1)
                assert views.weights == [True] * 8


def test_weights_and_gradients_of_one_replica_are_adjacent_in_every_stage():
    check_stages(SINGLE, STAGES)


@distributed(world_size=2)
def test_weights_and_gradients_of_replicas_are_adjacent_in_every_stage(groups):
    check_stages(groups, STAGES)


def test_weights_are_adjacent_when_they_are_built_and_when_they_are_converted():
    model = Layers()
    assert_adjacent(model)
    assert_adjacent(model.to(torch.bfloat16))
    assert_adjacent(model.float())
    model.load_state_dict(Layers().state_dict())
    assert_adjacent(model)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_without_memory_get_adjacent_memory_and_the_same_values(stage):
    late, early = (built(SINGLE, stage, without_memory=late) for late in (True, False))
    with Views() as views:
        assert_same(step(late), step(early))
    assert all(views.weights)


def test_deferred_weight_gradients_are_equal_to_the_bit():
    expected = step(built(SINGLE, "no_shard"), 1)
    ddp = built(SINGLE, "no_shard")
    ddp.zero_grad_buffer()
    calls = []
    with Views() as views:
        with enable_wgrad_deferral():
            loss = ddp(tokens()).square().mean()
            with capture_wgrads(calls):
                loss.backward()
        assert views.gradients == [True] * 4  # biases are not deferred
        for call in calls:
            call()
        assert views.gradients == [True] * 8
    assert_same(whole_gradients(ddp), expected)


def test_some_frozen_experts_have_no_gradient_and_the_others_theirs():
    def frozen():
        model = Layers()
        for part in grouped(model):
            part.weights()[0].requires_grad_(False)
        return model

    found = []
    for context in (nullcontext(), Views()):
        with context:
            found.append(step(wrap(SINGLE, model=frozen()), 1))
    assert_same(*found)
    assert sum("experts" in name and "weight" in name for name in found[0]) == 4 * (E - 1)


@pytest.mark.parametrize("transposed", [False, True])
def test_one_tensor_is_a_view_of_matrices_at_equal_distances(transposed):
    matrices = list(torch.randn(5, 3, 4).unbind())
    if transposed:
        matrices = [matrix.t() for matrix in matrices]
    for chosen in (matrices, matrices[1::2], matrices[2:3]):
        joined = as_one_tensor(chosen)
        assert torch.equal(joined, torch.stack(chosen))
        joined.add_(1.0)
        assert torch.equal(joined, torch.stack(chosen))
    copy = matrices[2].clone()
    for other in (matrices[::-1], matrices[:2] + matrices[3:], [*matrices[:2], copy],
                  [copy, copy], [matrices[0], matrices[1].t()]):  # fmt: skip
        assert as_one_tensor(other) is None


@pytest.mark.parametrize("is_adjacent", [True, False])
def test_gradients_are_added_or_overwrite_as_each_weight_asks(is_adjacent):
    for are_fresh in ([True] * 3, [False] * 3, [True, False, True]):
        main_grads = torch.randn(3, 2, 4)
        weights = [nn.Parameter(torch.zeros(2, 4, dtype=torch.bfloat16)) for _ in range(3)]
        for weight, main_grad, fresh in zip(weights, main_grads, are_fresh, strict=True):
            weight.main_grad = main_grad if is_adjacent else main_grad.clone()
            weight.main_grad_is_fresh = fresh
        grads = torch.randn(3, 2, 4).bfloat16()
        before = main_grads.clone()
        accumulate_main_grads(weights, grads)
        for weight, old, grad, fresh in zip(weights, before, grads, are_fresh, strict=True):
            assert torch.equal(weight.main_grad, grad.float() if fresh else old + grad)
            assert not weight.main_grad_is_fresh


def test_a_buffer_holds_the_layers_in_reverse_and_the_experts_in_order():
    ddp = built(SINGLE, "optim")
    (buffer,) = (b for b in ddp.gradient_buffers if "expert" in b.flat.names[0])
    names = [buffer.flat.names[slot.index] for slot in buffer.flat.plan.slots]
    weights = [name for name in names if name.endswith("weight")]
    experts = [int(name.split("local_experts.")[1].split(".")[0]) for name in weights]
    assert experts == [*range(E)] * 4
    kinds = [(name.split(".")[1], name.split(".")[-2]) for name in weights[::E]]
    assert kinds == [("1", "linear_fc2"), ("1", "linear_fc1"),
                     ("0", "linear_fc2"), ("0", "linear_fc1")]  # fmt: skip
    begins = [slot.begin for slot in buffer.flat.plan.slots]
    assert all(first < second for first, second in pairwise(begins))
