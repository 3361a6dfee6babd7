"""A small model and its training on several replicas, next to the same training in one process."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

NUM_SAMPLES = 8
CONFIG = SimpleNamespace(calculate_per_token_loss=False)


class Model(nn.Module):
    """An embedding that is also the head, a norm, two layers with odd sizes."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(37, 24)
        self.first = nn.Linear(24, 301)
        self.norm = nn.LayerNorm(301)
        self.second = nn.Linear(301, 24, bias=False)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        self.to(dtype)

    def forward(self, ids):
        hidden = self.embedding(ids)
        hidden = hidden + self.second(self.norm(F.gelu(self.first(hidden))))
        return hidden @ self.embedding.weight.T


def samples(step):
    """Return ids [NUM_SAMPLES, 6] of one step."""
    return torch.randint(37, (NUM_SAMPLES, 6), generator=torch.Generator().manual_seed(50 + step))


def loss_of(model, ids):
    logits = model(ids[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def wrap(groups, dtype=torch.float32, model=None, **ddp):
    ddp_config = DistributedDataParallelConfig(**ddp)
    model = Model(dtype) if model is None else model
    return DistributedDataParallel(CONFIG, ddp_config, model, pg_collection=groups)


def accumulate(ddp, groups, step, num_microbatches, finalize=True):
    """Run forward and backward of this replica's share of a step; gradients end up reduced."""
    rank, size = groups.dp_cp.rank(), groups.dp_cp.size()
    mine = samples(step)[rank::size].chunk(num_microbatches)
    ddp.zero_grad_buffer()
    losses = []
    with ddp.no_sync():
        for ids in mine[:-1]:
            losses.append(loss_of(ddp, ids) / num_microbatches)
            losses[-1].backward()
    losses.append(loss_of(ddp, mine[-1]) / num_microbatches)
    losses[-1].backward()
    if finalize:
        finalize_model_grads([ddp], pg_collection=groups)
    return sum(float(loss.detach()) for loss in losses)


def whole_gradients(ddp):
    """Return the reduced gradient of each parameter, from the shards this rank owns."""
    found = {}
    for span in ddp.spans():
        for shard in span.shards:
            full = found.setdefault(shard.name, torch.full((shard.parameter.numel(),), torch.nan))
            full[shard.begin : shard.end] = shard.gradient.flatten().float()
    return found


def serial_gradients(step, dtype=torch.float32):
    model = Model(dtype)
    loss_of(model, samples(step)).backward()
    return {name: p.grad.flatten().float() for name, p in model.named_parameters()}
