"""Computation in another precision than that which the code asks for."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from megatron.core.transformer.moe.router import ROUTER_DTYPES


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Compute in `dtype` throughout: code that asks for fp32 gets it, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, before)
        if dtype == torch.float64:
            for name in ("float32", "float"):
                stack.enter_context(mock.patch.object(torch, name, dtype))
            stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
            stack.enter_context(mock.patch.dict(ROUTER_DTYPES, fp32=dtype))
        yield
