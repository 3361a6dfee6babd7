"""Replicas reduce to the gradient of one process, in every way of reducing."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.foundation.errors import NumericsError, ScheduleError
from tests.distributed.distributed.replicas import (
    Model,
    accumulate,
    serial_gradients,
    whole_gradients,
    wrap,
)
from tests.harness.distributed import distributed
from tests.harness.tolerances import (
    BF16_WHOLE_MODEL,
    EXACT,
    FP32_REORDERED_SUM,
    assert_close,
)

WAYS = [
    {},
    {"overlap_grad_reduce": True},
    {"overlap_grad_reduce": True, "bucket_size": 1},
    {"overlap_grad_reduce": True, "bucket_size": 3000},
    {"bucket_size": 3000, "average_in_collective": True},
    {"num_buckets": 3, "check_for_nan_in_grad": True},
    {"use_distributed_optimizer": True},
    {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 700},
]


@distributed(world_size=(2, 4))
def test_replicas_get_the_serial_gradient_to_the_bit_in_every_way(groups):
    serial = serial_gradients(step=0)
    seen = {}
    for way in WAYS:
        for num_microbatches in (1, 2):
            ddp = wrap(groups, **way)
            accumulate(ddp, groups, 0, num_microbatches)
            for name, gradient in whole_gradients(ddp).items():
                owned = ~gradient.isnan()
                what = f"gradient of {name} with {way}, {num_microbatches} micro batches"
                assert_close(gradient[owned], serial[name][owned], FP32_REORDERED_SUM, what)
                first = seen.setdefault((name, num_microbatches), gradient)
                # Every way adds in rank order: the same bits.
                assert_close(gradient[owned], first[owned], EXACT, what)


@distributed(world_size=4, num_distributed_optimizer_instances=2)
def test_state_sharded_inside_and_replicated_across_gets_the_serial_gradient(groups):
    serial = serial_gradients(step=0)
    ddp = wrap(
        groups, use_distributed_optimizer=True, num_distributed_optimizer_instances=2,
        bucket_size=2000,
    )  # fmt: skip
    accumulate(ddp, groups, 0, 2)
    gathered = [None] * 4
    dist.all_gather_object(gathered, whole_gradients(ddp))
    assert any(gradient.isnan().any() for gradient in gathered[0].values())
    for name, expected in serial.items():
        halves = [
            gathered[rank][name] for rank in groups.ranks["intra_dp_cp"] if name in gathered[rank]
        ]
        joined = torch.stack(halves).nan_to_num(-torch.inf).amax(0)
        assert_close(joined, expected, FP32_REORDERED_SUM, f"gradient of {name}")


@distributed(world_size=2)
def test_a_parameter_without_gradient_on_one_rank_does_not_confuse_the_others(groups):
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used = torch.nn.Parameter(torch.ones(500))
            self.branch = torch.nn.Parameter(torch.ones(300))
            self.also_used = torch.nn.Parameter(torch.ones(400))

        def forward(self, takes_branch):
            total = self.used.sum() + 2 * self.also_used.sum()
            return total + 3 * self.branch.sum() if takes_branch else total

    zero_2 = {"data_parallel_sharding_strategy": "optim_grads", "bucket_size": 300}
    for way in [*WAYS, zero_2]:
        ddp = wrap(groups, model=Branches(), **way)
        ddp.zero_grad_buffer()
        ddp(takes_branch=dist.get_rank() == 0).backward()
        ddp.finish_grad_sync()
        expected = {"used": 1.0, "branch": 1.5, "also_used": 2.0}
        for name, gradient in whole_gradients(ddp).items():
            owned = gradient[~gradient.isnan()]
            assert_close(owned, torch.full_like(owned, expected[name]), EXACT, f"{name} {way}")


@distributed(world_size=2)
def test_bf16_replicas_accumulate_and_reduce_in_fp32(groups):
    serial = serial_gradients(step=0, dtype=torch.bfloat16)
    for way in WAYS:
        ddp = wrap(groups, dtype=torch.bfloat16, grad_reduce_in_fp32=True, **way)
        accumulate(ddp, groups, 0, 2)
        for buffer in ddp.gradient_buffers:
            assert buffer.gradients.dtype == torch.float32
        for name, gradient in whole_gradients(ddp).items():
            owned = ~gradient.isnan()
            assert_close(gradient[owned], serial[name][owned], BF16_WHOLE_MODEL, f"{name} {way}")


@distributed(world_size=2)
def test_half_precision_sums_are_rounded_once(groups):
    parameter = torch.nn.Parameter(torch.zeros(256, dtype=torch.bfloat16))
    module = torch.nn.Module()
    module.weight = parameter
    ddp = wrap(groups, model=module, average_in_collective=False)
    ddp.zero_grad_buffer()
    parts = torch.randn(2, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    parameter.main_grad.copy_(parts[dist.get_rank()])
    parameter.main_grad_is_fresh = False
    ddp.finish_grad_sync()
    expected = parts.float().mean(0).bfloat16()
    assert_close(parameter.main_grad, expected, EXACT, "sum of two bf16 gradients")


@distributed(world_size=2)
def test_replicas_start_from_the_first_one(groups):
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())
    ddp = wrap(groups, model=model)
    ddp.broadcast_params()
    for name, parameter in Model().named_parameters():
        assert_close(dict(model.named_parameters())[name].detach(), parameter.detach(), EXACT, name)


@distributed(world_size=4, tp=2)
def test_a_nonfinite_gradient_of_one_replica_is_named_on_all_ranks(groups):
    ddp = wrap(groups, check_for_nan_in_grad=True, overlap_grad_reduce=True, bucket_size=700)
    bad = dict(ddp.module.named_parameters())["norm.weight"]
    hook = bad.register_hook(lambda g: g.index_fill(0, torch.tensor([7]), torch.inf)
                             if dist.get_rank() == 2 else g)  # fmt: skip
    with pytest.raises(NumericsError, match="rank 2: .*norm.weight"):
        accumulate(ddp, groups, 0, 1)
    hook.remove()
    accumulate(ddp, groups, 0, 1)


@distributed(world_size=2)
def test_a_second_backward_after_the_reduction_is_refused(groups):
    ddp = wrap(groups, overlap_grad_reduce=True)
    ddp.zero_grad_buffer()
    ids = torch.ones(2, 6, dtype=torch.long)
    ddp(ids).sum().backward()
    with pytest.raises(ScheduleError, match="no_sync"):
        ddp(ids).sum().backward()
    ddp.finish_grad_sync()
