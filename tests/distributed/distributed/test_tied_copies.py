"""Weights of which two pipeline stages hold a copy each: both train with the sum of gradients."""

import torch
from torch import nn

from megatron.core.distributed import finalize_model_grads
from megatron.core.param_meta import ParamMeta, set_param_meta
from tests.distributed.distributed.replicas import wrap
from tests.harness.distributed import distributed

ONES = torch.ones(5)


class TwoCopies(nn.Module):
    """Copies of two weights of the same shape, as of an embedding and of a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Parameter(ONES.clone()), nn.Parameter(ONES.clone())
        for name, parameter in self.named_parameters():
            set_param_meta(parameter, ParamMeta(tied_to=name))


def stage(groups, factor, **ddp):
    """Return a stage whose gradients are `factor` and ten times as much."""
    chunk = wrap(groups, model=TwoCopies(), **ddp)
    (factor * (chunk.module.embedding + 10 * chunk.module.head)).sum().backward()
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


@distributed(world_size=2, pp=2)
def test_the_two_ends_of_a_v_add_theirs_on_one_rank(groups):
    chunks = [stage(groups, factor=factor) for factor in (1, 2)]
    finalize_model_grads(chunks, pg_collection=groups)
    for chunk in chunks:
        assert gradients(chunk) == [(3 * ONES).tolist(), (30 * ONES).tolist()]
