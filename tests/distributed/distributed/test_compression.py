"""Compressed reductions: bounded error, nothing lost over time, equal replicas, bytes counted."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.communication import Mesh
from megatron.core.distributed.compression import (
    BFloat16Wire,
    BlockInt8Wire,
    CompressedReduction,
    TrafficCount,
)
from megatron.core.distributed.sharding_arithmetic import BLOCK
from megatron.core.distributed.zero.stage import ReductionPolicy, reduce_bucket
from megatron.core.foundation.errors import ConfigError
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.topology.group import SINGLE_RANK
from tests.distributed.distributed.replicas import accumulate, wrap
from tests.harness.distributed import distributed
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, assert_close

ROWS, COLUMNS = 48, 32
NUMEL = 16 * BLOCK
"""A matrix of 12 blocks, and 4 blocks of something else."""


def gradient(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(NUMEL, generator=generator) * torch.logspace(-2, 2, NUMEL)


def meshes(groups) -> dict[str, Mesh]:
    found = {
        "shard": Mesh(shard=groups.dp_cp, replicate=SINGLE_RANK),
        "replicate": Mesh(shard=SINGLE_RANK, replicate=groups.dp_cp),
    }
    if groups.inter_dist_opt.size() > 1:
        found = {"both": Mesh(shard=groups.intra_dp_cp, replicate=groups.inter_dist_opt)}
    return found


def compression(
    kind: str, rank: int = 4, warmup: int = 0, fraction: float = 0.25
) -> CompressedReduction:
    settings = DistributedDataParallelConfig(
        grad_compression=kind,
        powersgd_rank=rank,
        grad_compression_warmup=warmup,
        topk_fraction=fraction,
    )
    return CompressedReduction(settings, [(0, ROWS, COLUMNS)], NUMEL, TrafficCount())


def reduced(values: torch.Tensor, mesh: Mesh, how: CompressedReduction | None) -> torch.Tensor:
    """Return this rank's part of the mean."""
    bucket = values.clone()
    reduce_bucket(bucket, mesh, ReductionPolicy(1 / mesh.size), tag=5, compression=how).wait()
    return mesh.own(bucket)


@pytest.mark.parametrize("wire", [BFloat16Wire(), BlockInt8Wire()], ids=["bf16", "int8"])
def test_a_packed_value_is_within_half_a_level(wire):
    values = gradient(1)
    packed = wire.pack(values)
    is_int8 = isinstance(wire, BlockInt8Wire)
    assert packed.numel() == NUMEL * (BLOCK + 4) // BLOCK if is_int8 else 2 * NUMEL
    largest = values.abs().view(-1, BLOCK).amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)
    level = largest / 127 if is_int8 else values.abs() * 2.0**-7
    assert ((wire.unpack(packed) - values).abs() <= 0.51 * level).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("wire", [BFloat16Wire(), BlockInt8Wire()], ids=["bf16", "int8"])
def test_what_is_not_finite_arrives_as_not_finite(wire, bad):
    values = gradient(1)
    values[200] = bad
    found = wire.unpack(wire.pack(values))
    assert not found.view(-1, BLOCK)[1].isfinite().all()
    assert found.view(-1, BLOCK)[2:].isfinite().all()


def check_error_and_replicas(groups) -> None:
    size = dist.get_world_size()
    gradients = [gradient(rank) for rank in range(size)]
    mean = torch.stack(gradients).double().mean(0)
    for name, mesh in meshes(groups).items():
        for kind, bound in (("bf16", 2.0**-7), ("int8", 2.0**-5)):
            own = reduced(gradients[dist.get_rank()], mesh, compression(kind))
            expected = mesh.own(mean)
            largest = torch.stack([mesh.own(g).abs() for g in gradients]).amax(0)
            largest = largest.view(-1, BLOCK).amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)
            assert ((own - expected).abs() <= bound * largest).all(), (name, kind)
            if mesh.shard_size == 1:
                copies = [torch.empty_like(own) for _ in range(size)]
                dist.all_gather(copies, own)
                for copy in copies:
                    assert_close(copy, own, EXACT, f"copy of the sum {kind}")


@distributed(world_size=2)
def test_two_ranks_agree_within_the_rounding(groups):
    check_error_and_replicas(groups)


@distributed(world_size=4, num_distributed_optimizer_instances=2)
def test_copies_of_shards_agree_within_the_rounding(groups):
    check_error_and_replicas(groups)


def errors_of_mean(groups, mesh: Mesh, kind: str, num_steps: int) -> list[float]:
    """Return how far the mean of what has arrived is from the mean of what was sent, by step."""
    level = torch.logspace(-2, 2, NUMEL)
    gradients = [gradient(r) / level for r in range(mesh.size)]
    mean = mesh.own(torch.stack(gradients).double().mean(0))
    how, total, errors = compression(kind), torch.zeros_like(mean), []
    for step in range(num_steps):
        total += reduced(gradients[dist.get_rank()], mesh, how)
        errors.append(float((total / (step + 1) - mean).norm()))
    return errors


@distributed(world_size=4)
def test_errors_are_fed_back_until_all_has_arrived(groups):
    """The same gradient step after step: the mean of what arrives tends to it as 1 / steps."""
    for name, mesh in meshes(groups).items():
        errors = errors_of_mean(groups, mesh, "int8", 40)
        assert errors[-1] <= 2 / 40 * errors[0], name
    # A subspace of 4 of 32 dimensions turns to what was left out, which takes some rounds.
    for name, mesh in meshes(groups).items():
        errors = errors_of_mean(groups, mesh, "topk", 40)
        assert errors[-1] <= 0.1 * errors[0], name
    errors = errors_of_mean(groups, meshes(groups)["replicate"], "powersgd", 200)
    assert errors[-1] <= 0.35 * errors[49] <= 0.35 * 0.5 * errors[0]


@distributed(world_size=2)
def test_gradients_of_low_rank_are_not_changed(groups):
    rank = dist.get_rank()
    shared = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(7))
    values = gradient(rank)
    generator = torch.Generator().manual_seed(rank)
    matrix = torch.randn(ROWS, 3, generator=generator) @ shared
    values[: ROWS * COLUMNS] = matrix.view(-1)
    for name, mesh in meshes(groups).items():
        exact = reduced(values, mesh, None)
        assert_close(
            reduced(values, mesh, compression("powersgd")), exact, FP32_REORDERED_SUM, name
        )


def check_all_are_sent(groups) -> None:
    values = gradient(dist.get_rank())
    for name, mesh in meshes(groups).items():
        exact = reduced(values, mesh, None)
        found = reduced(values, mesh, compression("topk", fraction=1.0))
        assert_close(found, exact, FP32_REORDERED_SUM, name)


@distributed(world_size=2)
def test_the_largest_values_are_all_where_all_are_sent(groups):
    check_all_are_sent(groups)


@distributed(world_size=4, num_distributed_optimizer_instances=2)
def test_the_largest_values_are_all_where_all_are_sent_to_copies_of_shards(groups):
    check_all_are_sent(groups)


@distributed(world_size=2)
def test_an_overflow_is_seen_by_all_and_leaves_no_trace(groups):
    rank = dist.get_rank()
    for mesh in meshes(groups).values():
        for kind in ("bf16", "int8", "powersgd", "topk"):
            how = compression(kind)
            bad = gradient(rank)
            bad[[3, NUMEL - 1] if rank == 1 else []] = torch.inf
            assert not reduced(bad, mesh, how).isfinite().all(), kind
            assert reduced(gradient(rank, 1), mesh, how).isfinite().all(), kind


@distributed(world_size=4)
def test_bytes_are_counted_as_the_formats_say(groups):
    sharded, copied = meshes(groups).values()
    share, rank = 3 / 4, 4
    for kind, packed in (("bf16", 2.0), ("int8", 1 + 4 / BLOCK)):
        for mesh, times in ((sharded, 1), (copied, 2)):
            how = compression(kind)
            reduced(gradient(0), mesh, how)
            assert how.traffic.plain == times * share * NUMEL * 4
            assert how.traffic.sent == times * share * NUMEL * packed
    for mesh in (sharded, copied):
        how = compression("topk", fraction=1 / 16)
        reduced(gradient(0), mesh, how)
        assert how.traffic.sent == 3 * 8 * NUMEL / 16
    how = compression("powersgd", rank)
    reduced(gradient(0), copied, how)
    thin = (ROWS + COLUMNS) * rank + NUMEL - ROWS * COLUMNS
    assert how.traffic.sent == 2 * share * thin * 4
    assert how.traffic.plain == 2 * share * NUMEL * 4


@distributed(world_size=2)
def test_nothing_is_compressed_while_warming_up(groups):
    for mesh in meshes(groups).values():
        how = compression("int8", warmup=2)
        for step in range(3):
            values = gradient(dist.get_rank(), step)
            is_equal = torch.equal(reduced(values, mesh, how), reduced(values, mesh, None))
            assert is_equal == (step < 2)


def losses_and_weights(groups, **way):
    ddp = wrap(groups, grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=4000, **way)
    sharded = ddp.ddp_config.use_distributed_optimizer
    config = OptimizerConfig(lr=1e-2, clip_grad=0.0, use_distributed_optimizer=sharded)
    optimizer = get_megatron_optimizer(config, [ddp], pg_collection=groups)
    losses = []
    for step in range(20):
        losses.append(accumulate(ddp, groups, step % 4, 2))
        assert optimizer.step()[0]
    traffic = [buffer.traffic for buffer in ddp.gradient_buffers]
    return losses, ddp.state_dict(), sum(t.sent for t in traffic) / max(1, traffic[0].plain)


@distributed(world_size=2)
def test_training_goes_its_way_at_every_rung(groups):
    for stage in ("no_shard", "optim", "optim_grads"):
        plain = losses_and_weights(groups, data_parallel_sharding_strategy=stage)[0]
        for kind, share in (("bf16", 0.5), ("int8", 0.26), ("powersgd", 1.0)):
            losses, weights, sent = losses_and_weights(
                groups, data_parallel_sharding_strategy=stage, grad_compression=kind
            )
            fallen, expected = losses[0] - losses[-1], plain[0] - plain[-1]
            assert expected > 0.5
            # 4 of 24 dimensions arrive in a step; the others some of these 20 steps later.
            least = 0.5 if kind == "powersgd" else 0.97
            assert fallen > least * expected, (stage, kind, fallen, expected)
            # Low rank sends to all ranks also where each needs only its shard.
            if kind != "powersgd":
                assert sent <= share, (stage, kind, sent)
            for name, weight in weights.items():
                other = weight.clone()
                dist.broadcast(other, 0)
                assert_close(weight, other, EXACT, f"replica of {name}")


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError) as caught:
        DistributedDataParallelConfig(grad_compression="zip", powersgd_rank=0)
    assert "grad_compression='zip'" in str(caught.value) and "powersgd_rank=0" in str(caught.value)
