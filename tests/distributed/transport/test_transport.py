"""Every transport keeps the one protocol: the same sums and values, with and without `out`."""

import pytest
import torch

from megatron.core.distributed import communication
from megatron.core.distributed.communication import Mesh, reduce_gradients
from megatron.core.transport import transport as selection
from megatron.core.transport.shm.shared_buffer import SharedBuffer
from megatron.core.transport.shm.shm_bucket_transport import BucketSlot, ShmBucketTransport
from megatron.core.transport.shm.shm_collectives import open_shm_group
from megatron.core.transport.shm.shm_transport import ShmTransport
from megatron.core.transport.torch_transport import (
    GlooTransport,
    MessageTransport,
    NativeTransport,
)
from megatron.core.transport.work import Work
from tests.harness.distributed import distributed
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, assert_close

ROWS, COLUMNS, SCALE = 12, 64, 0.5
TRANSPORTS = ("native", "blocking", "gloo", "messages", "unordered", "slots", "in place")


def transport_and_memory(name, group):
    """Return a transport, and [ROWS, COLUMNS] that it can use as its buffer."""
    memory = torch.empty(ROWS, COLUMNS)
    match name:
        case "native" | "blocking":
            return NativeTransport(group, blocks=name == "blocking"), memory
        case "gloo":
            return GlooTransport(group), memory
        case "messages" | "unordered":
            return MessageTransport(group, 3, is_in_order=name == "messages"), memory
        case "slots":
            return ShmTransport(group, open_shm_group(group)), memory
    shared = SharedBuffer(memory.nbytes, num_counters=1)
    values = shared.tensor(torch.float32, 0, memory.numel()).view(ROWS, COLUMNS)
    slot = BucketSlot(shared, 0, keeps_pages=False)
    return ShmBucketTransport(slot, shared.peers(group), group), values


def check_protocol(group, name):
    size, rank = group.size(), group.rank()
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(size, ROWS, COLUMNS, generator=generator)
    total = inputs.sum(0) * SCALE
    for is_in_place in (False, True):
        transport, x = transport_and_memory(name, group)
        x.copy_(inputs[rank])
        out = x[own] if is_in_place else None
        sums = transport.reduce_scatter(x, SCALE, out=out).wait()
        assert_close(sums, total[own], FP32_REORDERED_SUM, f"reduce-scatter {is_in_place}")
        assert not is_in_place or sums.data_ptr() == out.data_ptr()

        transport, x = transport_and_memory(name, group)
        x[own] = inputs[0][own]
        gathered = transport.all_gather(x[own], out=x if is_in_place else None).wait()
        assert_close(gathered, inputs[0], EXACT, f"all-gather {is_in_place}")
        assert not is_in_place or gathered.data_ptr() == x.data_ptr()
    transport, x = transport_and_memory(name, group)
    x.copy_(inputs[rank])
    summed = transport.all_reduce(x, SCALE).wait()
    assert summed.data_ptr() == x.data_ptr()
    assert_close(x, total, FP32_REORDERED_SUM, "all-reduce")


@pytest.mark.parametrize("name", TRANSPORTS)
@distributed(world_size=2)
def test_two_ranks_exchange_by_the_protocol(groups, name):
    check_protocol(groups.dp, name)


@pytest.mark.parametrize("name", TRANSPORTS)
@distributed(world_size=3)
def test_three_ranks_exchange_by_the_protocol(groups, name):
    check_protocol(groups.dp, name)


@distributed(world_size=4, num_distributed_optimizer_instances=2)
def test_a_backend_without_tags_keeps_the_steps_of_two_axes_in_order(groups):
    """Its operations have no tags: a second step may not start at the ranks' leisure."""
    mesh = Mesh(shard=groups.intra_dp_cp, replicate=groups.inter_dist_opt)
    buckets = [torch.full((16,), float(number)) for number in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        for module in (selection, communication):
            patch.setattr(module, "has_tags", lambda group: False)
        works = [Work(reduce_gradients(b, mesh, scale=0.25, tag=0)) for b in buckets]
    assert all(work.is_completed() for work in works)
    for number, bucket in enumerate(buckets):
        assert_close(mesh.own(bucket), torch.full((8,), float(number)), EXACT, f"bucket {number}")
