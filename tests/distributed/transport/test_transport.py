"""Every transport keeps the one protocol: the same sums and values, with and without `out`."""

import pytest
import torch

from megatron.core.distributed.communication import Mesh
from megatron.core.distributed.zero import stage
from megatron.core.distributed.zero.stage import ReductionPolicy, reduce_bucket
from megatron.core.transport import transport as selection
from megatron.core.transport.transport import (
    GlooTransport,
    MessageTransport,
    NativeTransport,
)
from tests.harness.distributed import distributed
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, assert_close

ROWS, COLUMNS, SCALE = 12, 64, 0.5
TRANSPORTS = ("native", "blocking", "gloo", "messages", "unordered")


def transport(name, group):
    match name:
        case "native" | "blocking":
            return NativeTransport(group, blocks=name == "blocking")
        case "gloo":
            return GlooTransport(group)
    return MessageTransport(group, 3, is_in_order=name == "messages")


@pytest.mark.parametrize("name", TRANSPORTS)
@distributed(world_size=(2, 3))
def test_ranks_exchange_by_the_protocol(groups, name):
    group = groups.dp
    size, rank = group.size(), group.rank()
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(size, ROWS, COLUMNS, generator=generator)
    total = inputs.sum(0) * SCALE
    for is_in_place in (False, True):
        x = inputs[rank].clone()
        out = x[own] if is_in_place else None
        sums = transport(name, group).reduce_scatter(x, SCALE, out=out).wait()
        assert_close(sums, total[own], FP32_REORDERED_SUM, f"reduce-scatter {is_in_place}")
        assert not is_in_place or sums.data_ptr() == out.data_ptr()

        x = torch.empty(ROWS, COLUMNS)
        x[own] = inputs[0][own]
        gathered = transport(name, group).all_gather(x[own], out=x if is_in_place else None).wait()
        assert_close(gathered, inputs[0], EXACT, f"all-gather {is_in_place}")
        assert not is_in_place or gathered.data_ptr() == x.data_ptr()
    x = inputs[rank].clone()
    summed = transport(name, group).all_reduce(x, SCALE).wait()
    assert summed.data_ptr() == x.data_ptr()
    assert_close(x, total, FP32_REORDERED_SUM, "all-reduce")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(world_size=3)
def test_sums_of_activations_are_computed_in_rank_order(groups, dtype):
    """Every partial sum is rounded to the dtype; 35 elements are no multiple of the ranks."""
    generator = torch.Generator().manual_seed(5)
    first, second, third = torch.randn(3, 5, 7, generator=generator).to(dtype)
    x = [first, second, third][groups.dp.rank()].clone()
    GlooTransport(groups.dp).all_reduce(x).wait()
    assert torch.equal(x, (first + second) + third)


@distributed(world_size=4, num_distributed_optimizer_instances=2)
def test_a_backend_without_tags_keeps_the_steps_of_two_axes_in_order(groups):
    """Its operations have no tags: a second step may not start at the ranks' leisure."""
    mesh = Mesh(shard=groups.intra_dp_cp, replicate=groups.inter_dist_opt)
    buckets = [torch.full((16,), float(number)) for number in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        for module in (selection, stage):
            patch.setattr(module, "has_tags", lambda group: False)
        works = [reduce_bucket(b, mesh, ReductionPolicy(0.25), tag=0) for b in buckets]
    assert all(work.is_completed() for work in works)
    for number, bucket in enumerate(buckets):
        assert_close(mesh.own(bucket), torch.full((8,), float(number)), EXACT, f"bucket {number}")
