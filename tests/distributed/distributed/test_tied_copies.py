"""Weights of which two pipeline stages hold a copy each: both train with the sum of gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed import finalize_model_grads
from megatron.core.parameters.param_meta import ParamMeta, set_param_meta
from tests.distributed.distributed.replicas import wrap
from tests.harness.distributed import distributed

ONES = torch.ones(5)


class TwoCopies(nn.Module):
    """Copies of two weights of the same shape, as of an embedding and of a head."""

    def __init__(self, numel=5):
        super().__init__()
        self.embedding, self.head = (nn.Parameter(torch.ones(numel)) for _ in range(2))
        for name, parameter in self.named_parameters():
            set_param_meta(parameter, ParamMeta(tied_to=name))

    def forward(self, factor):
        return (factor * (self.embedding + 10 * self.head)).sum()


def stage(groups, factor, model=None, **ddp):
    """Return a stage whose gradients are `factor` and ten times as much."""
    chunk = wrap(groups, model=model or TwoCopies(), **ddp)
    chunk(factor).backward()
    return chunk


def gradients(chunk):
    pairs = (chunk.module.embedding, chunk.module.head)
    return [shard.reduced_gradient().tolist() for p in pairs for shard in chunk.shards_of(p)]


@distributed(world_size=2, pp=2)
def test_two_tied_weights_of_a_stage_are_not_added_to_each_other(groups):
    for ddp in ({}, {"overlap_grad_reduce": True}, {"use_distributed_optimizer": True}):
        chunk = stage(groups, factor=1 + groups.pp.rank(), **ddp)
        finalize_model_grads([chunk], pg_collection=groups)
        assert gradients(chunk) == [(3 * ONES).tolist(), (30 * ONES).tolist()], ddp


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@distributed(world_size=4, pp=2)
def test_stages_of_different_sizes_cut_a_tied_weight_alike(groups, strategy):
    model = TwoCopies(5000)
    model.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(1 + 4 * groups.pp.rank()))
    chunk = stage(
        groups,
        factor=1 + groups.pp.rank(),
        model=model,
        num_buckets=9,
        data_parallel_sharding_strategy=strategy,
    )
    finalize_model_grads([chunk], pg_collection=groups)
    found = [value for each in gradients(chunk) for value in each]
    count = torch.tensor(len(found))
    dist.all_reduce(count, group=groups.dp)
    assert int(count) == 10_000 and set(found) <= {3.0, 30.0}


@distributed(world_size=2, pp=2)
def test_the_two_ends_of_a_v_add_theirs_on_one_rank(groups):
    chunks = [stage(groups, factor=factor) for factor in (1, 2)]
    finalize_model_grads(chunks, pg_collection=groups)
    for chunk in chunks:
        assert gradients(chunk) == [(3 * ONES).tolist(), (30 * ONES).tolist()]
