"""A plain torch optimizer behind the data-parallel wrapper is told that it trains nothing."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    plain_optimizers,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig


def step(optimizer_of, *, copies_gradients):
    groups = ProcessGroupCollection.single()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    settings = DistributedDataParallelConfig()
    ddp = DistributedDataParallel(config, settings, nn.Linear(4, 4), pg_collection=groups)
    optimizer = optimizer_of(ddp)
    before = ddp.module.weight.detach().clone()
    ddp.zero_grad_buffer()
    ddp(torch.ones(2, 4)).sum().backward()
    finalize_model_grads([ddp], pg_collection=groups)
    if copies_gradients:
        for parameter in ddp.module.parameters():
            parameter.grad = parameter.main_grad.to(parameter.dtype)
    optimizer.step()
    return not torch.equal(before, ddp.module.weight)


def adam(ddp):
    return torch.optim.Adam(ddp.module.parameters(), lr=0.1)


@contextlib.contextmanager
def torch_hook(hook):
    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_an_optimizer_without_gradients_is_warned_of_once():
    plain_optimizers.watch_plain_optimizers.cache_clear()
    plain_optimizers.watch_plain_optimizers()
    # A hook that comes after ours is called, too.
    with torch_hook(lambda *_: None), pytest.warns(UserWarning, match="updates nothing.*get_meg"):
        assert not step(adam, copies_gradients=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not step(adam, copies_gradients=False)


def test_one_that_was_given_its_gradients_trains_without_a_word():
    plain_optimizers.watch_plain_optimizers.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step(adam, copies_gradients=True)
