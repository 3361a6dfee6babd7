"""Sharding the optimizer changes where the work is done, and no bit of the result."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed import finalize_model_grads
from megatron.core.foundation.errors import NumericsError
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters.param_meta import ParamMeta, set_param_meta, shard_of
from tests.distributed.distributed.replicas import Model, accumulate, loss_of, samples, wrap
from tests.distributed.optimizer.state_bytes import differences, expected_bytes, one_step
from tests.harness.distributed import distributed
from tests.harness.tolerances import (
    EXACT,
    FP32_AFTER_OPTIMIZER,
    FP32_ROUNDED_ONCE,
    assert_close,
)

NUM_STEPS = 5
EPSILON = 1e-5
"""Of Adam; see FP32_AFTER_OPTIMIZER."""


def train(groups, *, dtype=torch.float32, num_microbatches=2, **way):
    """Train a few steps and return (losses, norms, weights)."""
    ddp = wrap(groups, dtype=dtype, grad_reduce_in_fp32=True, **way)
    optimizer = build(groups, [ddp], bf16=dtype == torch.bfloat16)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        losses.append(accumulate(ddp, groups, step, num_microbatches))
        ok, norm, _ = optimizer.step()
        assert ok
        norms.append(norm)
    return losses, norms, ddp.state_dict()


def build(groups, chunks, **settings):
    is_sharded = chunks[0].ddp_config.use_distributed_optimizer
    config = OptimizerConfig(
        lr=1e-2,
        adam_eps=EPSILON,
        weight_decay=0.1,
        clip_grad=0.05,
        use_distributed_optimizer=is_sharded,
        **settings,
    )
    return get_megatron_optimizer(config, chunks, pg_collection=groups)


def train_serially(dtype=torch.float32):
    model = Model(dtype)
    mains = [p.detach().float().requires_grad_() for p in model.parameters()]
    matrices = [p for p in mains if p.dim() > 1]
    others = [p for p in mains if p.dim() <= 1]
    rule = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        eps=EPSILON,
        fused=True,
    )
    losses, norms = [], []
    for step in range(NUM_STEPS):
        model.zero_grad()
        loss = loss_of(model, samples(step))
        loss.backward()
        losses.append(float(loss.detach()))
        for main, parameter in zip(mains, model.parameters(), strict=True):
            main.grad = parameter.grad.float()
        norms.append(float(nn.utils.clip_grad_norm_(mains, 0.05)))
        rule.step()
        with torch.no_grad():
            for main, parameter in zip(mains, model.parameters(), strict=True):
                parameter.copy_(main)
    return losses, norms, model.state_dict()


WAYS = [
    {"use_distributed_optimizer": True},
    {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 700},
    {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 3000,
    },
]


ZERO_2_WAYS = [
    {"data_parallel_sharding_strategy": "optim_grads"},
    {"data_parallel_sharding_strategy": "optim_grads", "bucket_size": 700},
    {
        "data_parallel_sharding_strategy": "optim_grads",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 3000,
    },
]


ZERO_3 = {"data_parallel_sharding_strategy": "optim_grads_params"}


@distributed(world_size=(2, 4))
def test_zero_2_and_3_equal_replicas(groups):
    for num_microbatches in (1, 2):
        plain = train(groups, num_microbatches=num_microbatches)
        # One micro batch: the same sums. More: summed over ranks first, then over micro batches.
        tolerance = EXACT if num_microbatches == 1 else FP32_AFTER_OPTIMIZER
        for way in (*ZERO_2_WAYS, ZERO_3):
            sharded = train(groups, num_microbatches=num_microbatches, **way)
            for what, ours, theirs in zip(("loss", "norm"), sharded, plain, strict=False):
                assert_close(torch.tensor(ours), torch.tensor(theirs), tolerance, f"{what} {way}")
            for name, expected in plain[2].items():
                assert_close(sharded[2][name], expected, tolerance, f"{name} {way}")


@distributed(world_size=4, num_distributed_optimizer_instances=2)
def test_zero_2_and_3_replicated_across_instances_equal_replicas(groups):
    plain = train(groups)
    for strategy in ("optim_grads", "optim_grads_params"):
        sharded = train(
            groups,
            bucket_size=700,
            num_distributed_optimizer_instances=2,
            data_parallel_sharding_strategy=strategy,
        )
        for name, expected in plain[2].items():
            assert_close(sharded[2][name], expected, FP32_AFTER_OPTIMIZER, f"{strategy} {name}")


@distributed(world_size=2)
def test_zero_2_keeps_no_whole_gradient(groups):
    ddp = wrap(groups, data_parallel_sharding_strategy="optim_grads", bucket_size=2000)
    accumulate(ddp, groups, 0, 2)
    (buffer,) = ddp.gradient_buffers
    kept = sum(owned.numel() for owned in buffer.owned_gradients())
    assert kept == buffer.flat.plan.numel // 2
    assert not buffer.full
    for parameter in ddp.module.parameters():
        assert parameter.grad is None and not hasattr(parameter, "main_grad")


@distributed(world_size=(2, 4))
def test_zero_1_is_bit_equal_to_replicas_and_close_to_serial(groups):
    plain = train(groups, overlap_grad_reduce=True, bucket_size=2000)
    losses, norms, weights = train_serially()
    mean_losses = [None] * dist.get_world_size()
    dist.all_gather_object(mean_losses, plain[0])
    for step, per_rank in enumerate(zip(*mean_losses, strict=True)):
        mean = sum(per_rank) / len(per_rank)
        assert_close(mean, losses[step], FP32_AFTER_OPTIMIZER, f"loss {step}")
        assert_close(plain[1][step], norms[step], FP32_AFTER_OPTIMIZER, f"norm {step}")
    for name, expected in weights.items():
        assert_close(plain[2][name], expected, FP32_AFTER_OPTIMIZER, name)
    for way in WAYS:
        sharded = train(groups, **way)
        assert sharded[:2] == plain[:2], way
        for name, expected in plain[2].items():
            assert_close(sharded[2][name], expected, EXACT, f"{name} {way}")


@distributed(world_size=2)
def test_parameters_are_whole_after_a_step_while_gathers_in_the_forward_pass_are_off(groups):
    way = {"use_distributed_optimizer": True, "bucket_size": 700, "overlap_param_gather": True}
    expected = train(groups, **way)[2]
    ddp = wrap(groups, grad_reduce_in_fp32=True, **way)
    optimizer = build(groups, [ddp])
    ddp.disable_forward_pre_hook(param_sync=False)
    for step in range(NUM_STEPS):
        accumulate(ddp, groups, step, 2)
        optimizer.step()
        if step == 2:
            ddp.enable_forward_pre_hook()
    ddp.disable_forward_pre_hook()
    for name, parameter in ddp.module.named_parameters():
        assert_close(parameter, expected[name], EXACT, name)


@distributed(world_size=4, num_distributed_optimizer_instances=2)
def test_two_instances_of_the_sharded_optimizer_stay_equal(groups):
    instances = {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}
    _, norms, weights = train(groups, bucket_size=700, **instances)
    gathered = [None] * 4
    dist.all_gather_object(gathered, (norms, weights))
    _, serial_norms, serial_weights = train_serially()
    for other_norms, other_weights in gathered:
        assert other_norms == norms
        for name, weight in weights.items():
            assert_close(other_weights[name], weight, EXACT, name)
            assert_close(weight, serial_weights[name], FP32_AFTER_OPTIMIZER, name)
    for norm, expected in zip(norms, serial_norms, strict=True):
        assert_close(norm, expected, FP32_AFTER_OPTIMIZER, "norm")


@distributed(world_size=2)
def test_bf16_with_fp32_main_weights_is_bit_equal_when_sharded(groups):
    plain = train(groups, dtype=torch.bfloat16)
    for way in WAYS:
        sharded = train(groups, dtype=torch.bfloat16, **way)
        assert sharded[:2] == plain[:2], way
        for name, expected in plain[2].items():
            assert_close(sharded[2][name], expected, EXACT, f"{name} {way}")


@distributed(world_size=4, tp=2)
def test_a_bad_gradient_in_one_shard_stops_the_update_on_all_ranks(groups):
    for way in ({}, WAYS[0]):
        ddp = wrap(groups, **way)
        optimizer = build(groups, [ddp])
        accumulate(ddp, groups, 0, 1)
        before = {name: tensor.clone() for name, tensor in ddp.state_dict().items()}
        if dist.get_rank() in (1, 3):  # both replicas of tensor-parallel rank 1
            weight = ddp.module.second.weight
            for shard in ddp.shards_of(weight):
                shard.gradient.view(-1)[0] = torch.nan
        with pytest.raises(NumericsError, match=r"second.weight is not finite on global rank [13]"):
            optimizer.step()
        for name, tensor in ddp.state_dict().items():
            assert_close(tensor, before[name], EXACT, name)


class SplitLayer(nn.Module):
    """A matrix split over tensor-parallel ranks and a replicated norm weight."""

    def __init__(self, rank, size):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        full = torch.randn(64, 40, generator=generator)
        meta = ParamMeta(split_dim=0, split_axis="tp")
        self.matrix = nn.Parameter(shard_of(full, meta, rank, size).clone())
        self.norm = nn.Parameter(torch.randn(40, generator=generator))
        set_param_meta(self.matrix, meta)
        set_param_meta(self.norm, ParamMeta(partial_grad_axes=("tp",)))


@distributed(world_size=4, tp=2)
def test_the_norm_counts_split_and_replicated_parameters_once(groups):
    tp_rank = groups.tp.rank()
    for way in ({}, {"use_distributed_optimizer": True}):
        ddp = wrap(groups, model=SplitLayer(tp_rank, 2), **way)
        optimizer = build(groups, [ddp], log_num_zeros_in_grad=True)
        ddp.zero_grad_buffer()
        full = SplitLayer(0, 1)
        # The norm's gradient is partial: each rank has seen half of the tokens.
        (ddp.module.matrix.square().sum() + ddp.module.norm.square().sum() / 2).backward()
        finalize_model_grads([ddp], pg_collection=groups)
        ok, norm, zeros = optimizer.step()
        expected = torch.cat([2 * p.detach().flatten() for p in full.parameters()]).norm()
        assert ok and zeros == 0
        assert_close(norm, expected, FP32_ROUNDED_ONCE, f"norm {way}")


class Stage(nn.Module):
    """The first or last stage of a pipeline with a tied embedding."""

    def __init__(self, is_first):
        super().__init__()
        generator = torch.Generator().manual_seed(8)
        weight = torch.randn(37, 24, generator=generator)
        self.share_embeddings_and_output_weights = True
        self.pre_process, self.post_process = is_first, not is_first
        if is_first:
            self.word_embeddings = nn.Parameter(weight)
            self.other = nn.Parameter(torch.randn(1000, generator=generator))
        else:
            self.other = nn.Parameter(torch.randn(300, generator=generator))
            self.output = nn.Parameter(weight)
            set_param_meta(self.output, ParamMeta(tied_to="word_embeddings"))

    def shared_embedding_or_output_weight(self):
        return self.word_embeddings if self.pre_process else self.output


class HalfPrecision(nn.Module):
    """Stands for a wrapper between the model and its replication."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@distributed(world_size=4, pp=2)
def test_tied_copies_on_two_stages_get_one_gradient_count_once_and_stay_equal(groups):
    is_first = groups.pp.rank() == 0
    results = []
    for way in ({}, {"use_distributed_optimizer": True, "bucket_size": 200}):
        stage = Stage(is_first)
        ddp = wrap(groups, model=HalfPrecision(stage), **way)
        optimizer = build(groups, [ddp])
        for _ in range(3):
            ddp.zero_grad_buffer()
            tied = stage.shared_embedding_or_output_weight()
            factor = 1.0 if is_first else 3.0
            (factor * tied.square().sum() + stage.other.square().sum()).backward()
            finalize_model_grads([ddp], pg_collection=groups)
            ok, norm, _ = optimizer.step()
            assert ok
        both = [torch.empty_like(tied) for _ in range(2)]
        dist.all_gather(both, tied.detach().clone(), group=groups.pp)
        assert_close(both[0], both[1], EXACT, "tied weights")
        assert {shard.name for span in ddp.spans() for shard in span.shards} <= set(
            dict(stage.named_parameters())
        )
        results.append((norm, tied.detach().clone()))
    assert results[0][0] == results[1][0]
    assert_close(results[1][1], results[0][1], EXACT, "tied weight with sharded state")


@distributed(world_size=4, tp=2)
def test_gradients_are_divided_by_the_tokens_of_all_replicas(groups):
    class PerToken:
        calculate_per_token_loss = True

    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallel(
        PerToken(), DistributedDataParallelConfig(), Model(), pg_collection=groups
    )
    ddp.zero_grad_buffer()
    tokens = 10 + groups.dp.rank()
    (tokens * ddp.module.first.bias.sum()).backward()
    finalize_model_grads([ddp], torch.tensor(tokens, dtype=torch.int), pg_collection=groups)
    assert_close(ddp.module.first.bias.main_grad, torch.ones(301), FP32_ROUNDED_ONCE, "mean")


@distributed(world_size=2, pp=2)
def test_all_stages_have_the_same_parameter_groups(groups):
    is_first = groups.pp.rank() == 0
    model = nn.Linear(4, 4, bias=is_first)
    set_param_meta(model.weight, ParamMeta(is_embedding_or_output=not is_first))
    config = OptimizerConfig(lr=1.0, decoupled_lr=2.0)
    optimizer = get_megatron_optimizer(config, [model], pg_collection=groups)
    mine = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    gathered = [None, None]
    dist.all_gather_object(gathered, mine)
    assert gathered[0] == gathered[1] and len(mine) == 3


@distributed(world_size=4)
def test_bytes_sent_and_held_are_those_of_the_theory(groups):
    for stage in range(4):
        for dtype in (torch.float32, torch.bfloat16):
            found = one_step(groups, dtype, stage)
            expected = expected_bytes(stage, dtype, num_ranks=4, num_layers=4)
            assert not list(differences(found, expected)), (stage, dtype)
            assert found[1] > 0


class ExpertLayer(nn.Module):
    """One dense weight, and one expert of two, which lives on half of the ranks."""

    def __init__(self, expert):
        super().__init__()
        self.dense = nn.Parameter(torch.full((300,), 2.0))
        self.expert = nn.Parameter(torch.full((500,), 1.0 + expert))
        set_param_meta(self.expert, ParamMeta(is_expert=True))


@distributed(world_size=4, ep=2)
def test_experts_are_averaged_over_all_replicas_and_each_counts_once(groups):
    for way in ({}, {"use_distributed_optimizer": True}):
        ddp = wrap(groups, model=ExpertLayer(groups.ep.rank()), bucket_size=200, **way)
        optimizer = build(groups, [ddp])
        for _ in range(2):
            ddp.zero_grad_buffer()
            weight = 1.0 + dist.get_rank()  # of this rank's tokens
            (weight * (ddp.module.dense.sum() + ddp.module.expert.sum())).backward()
            finalize_model_grads([ddp], pg_collection=groups)
        # Each expert's gradient is the sum over its two ranks, divided by four replicas.
        mine = sum(1.0 + rank for rank in groups.ranks["expt_dp"]) / 4
        for shard in ddp.shards_of(ddp.module.expert):
            assert_close(shard.gradient, torch.full_like(shard.values, mine), EXACT, f"{way}")
        for shard in ddp.shards_of(ddp.module.dense):
            assert_close(shard.gradient, torch.full_like(shard.values, 2.5), EXACT, f"{way}")
        total = 300 * 2.5**2
        for expert in range(2):
            ranks = [r for r in range(4) if r % 2 == expert]
            total += 500 * (sum(1.0 + rank for rank in ranks) / 4) ** 2
        ok, norm, _ = optimizer.step()
        assert_close(norm, total**0.5, FP32_ROUNDED_ONCE, f"norm {way}")
        gathered = [None] * 2
        dist.all_gather_object(
            gathered, {n: p.detach() for n, p in ddp.module.named_parameters()},
            group=groups.expt_dp,
        )  # fmt: skip
        for name, weight in gathered[0].items():
            assert_close(gathered[1][name], weight, EXACT, f"{name} {way}")


@distributed(world_size=4)
def test_ranks_that_own_nothing_of_a_tiny_model_take_part(groups):
    ddp = wrap(groups, model=nn.Linear(3, 1), use_distributed_optimizer=True)
    optimizer = build(groups, [ddp], log_num_zeros_in_grad=True)
    assert bool(optimizer.shards) == (dist.get_rank() < 2)  # the bias, the weight
    for _ in range(2):
        ddp.zero_grad_buffer()
        ddp(torch.ones(2, 3)).sum().backward()
        finalize_model_grads([ddp], pg_collection=groups)
        ok, norm, zeros = optimizer.step()
        assert ok and zeros == 0
        assert_close(norm, 4.0, FP32_ROUNDED_ONCE, "norm")
    weights = [None] * 4
    dist.all_gather_object(weights, ddp.module.weight.tolist())
    assert weights == [weights[0]] * 4
