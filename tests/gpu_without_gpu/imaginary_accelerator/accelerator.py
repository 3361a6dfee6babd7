"""An accelerator that computes shapes: a device type of torch's own, under `FakeTensorMode`.

torch lets Python register a backend under a name of its own. Tensors on it are fake, so that every
operation checks devices, dtypes and shapes as on a GPU and computes nothing; reads of values are
counted (`waits`).
"""

import functools
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from megatron.core.foundation import device
from megatron.core.kernels import triton_kernels, weight_gradient
from megatron.core.kernels.registry import KernelTable
from megatron.core.optimizer.definitions import adam
from megatron.core.tensor_parallel import parallel_parameters

NAME = "imaginary"


@functools.cache
def register() -> None:
    """Give this process the accelerator. Comes before the first question for a device."""
    _setup_privateuseone_for_python_backend(NAME)
    os.environ["LATTICE_DEVICE"] = NAME  # this process may have been told to use the CPU
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # knows "fake"
    dist.Backend.backend_capability["fake"].append(NAME)
    module: Any = torch.get_device_module(NAME)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    # Random states that nobody draws from.
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    module.set_rng_state = lambda *_: None
    assert device.device_type() == NAME, "the device was asked for before it was registered"


@contextmanager
def as_a_gpu_computes() -> Iterator[None]:
    """Inside, kernels are those that a CUDA GPU would choose, and streams need no wait."""
    of_device = KernelTable.of_device
    with (
        _weights_begin_on_device(),
        mock.patch.object(
            KernelTable,
            "of_device",
            lambda table, kind: of_device(table, "cuda" if kind == NAME else kind),
        ),
        mock.patch.object(F, "scaled_dot_product_attention", _fused_attention),
        mock.patch.object(weight_gradient, "_missing", return_value=None),
        # Where Triton is installed, the host code of its kernels runs; `fake_rank` starts none.
        mock.patch.object(triton_kernels, "COMPILED_FOR", (*triton_kernels.COMPILED_FOR, NAME)),
        mock.patch.object(device, "synchronize"),  # of the schedule's recorder
        mock.patch.object(adam, "has_fused_kernel", return_value=True),
    ):
        yield


@contextmanager
def _weights_begin_on_device() -> Iterator[None]:
    """Inside, weights begin on the device even with --use-cpu-initialization.

    A module of fake tensors cannot be moved; all other tensors are where the program puts them.
    """
    name = parallel_parameters.device_of_parameters.__name__
    users = [module for path, module in list(sys.modules.items())
             if path.startswith("megatron.core.") and hasattr(module, name)]  # fmt: skip
    with ExitStack() as patches:
        for module in users:
            patches.enter_context(
                mock.patch.object(module, name, return_value=device.current_device())
            )
        yield


_PLAIN = F.scaled_dot_product_attention


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """[b, n, s, d]: flash attention, or the memory-efficient one where there is a mask."""
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    if query.dtype not in (torch.bfloat16, torch.float16):
        return _PLAIN(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    if attn_mask is None and query.shape[-1] == value.shape[-1]:
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    if attn_mask is not None:
        scores = (*query.shape[:3], key.shape[2])
        bias = attn_mask if attn_mask.dtype != torch.bool else attn_mask.to(query.dtype)
        attn_mask = bias.expand(scores)
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
