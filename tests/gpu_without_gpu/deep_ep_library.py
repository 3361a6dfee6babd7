"""A stand-in for the library `deep_ep`, on gloo: the signatures that are documented, their results.

It takes what the library takes and refuses the rest. Rows of a rank arrive by source and then by
position, as the library's do.
"""

import contextlib
import dataclasses
import sys
import types
from unittest import mock

import torch
import torch.distributed as dist

from megatron.core.foundation import optional_imports
from megatron.core.kernels.registry import OTHER_DEVICES
from megatron.core.transformer.moe import dispatchers

CALLS: list[str] = []
"""Methods that were called, in order."""


def _exchange(rows, sent, received, group):
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out


class _Rows:
    """Which tokens go to which rank, and how many come."""

    def __init__(self, is_token_in_rank, group):
        self.group, self.num_tokens = group, len(is_token_in_rank)
        pairs = is_token_in_rank.t().nonzero()
        self.rank, self.token = pairs[:, 0], pairs[:, 1]
        counts = is_token_in_rank.sum(0)
        self.sent = counts.tolist()
        self.received = _exchange(counts, [1] * len(counts), [1] * len(counts), group).tolist()

    def send(self, values):
        return _exchange(values, self.sent, self.received, self.group)

    def send_back(self, rows):
        back = _exchange(rows, self.received, self.sent, self.group)
        summed = back.new_zeros((self.num_tokens, *back.shape[1:]), dtype=torch.float32)
        return summed.index_add_(0, self.token, back.float()).to(rows.dtype)


class _Sizes:
    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0


class Buffer:
    """`deep_ep.Buffer` within a node."""

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False,
                 num_qps_per_rank=24, explicitly_destroy=False):  # fmt: skip
        assert num_nvl_bytes > 0
        self.group, self.num_nvl_bytes = group, num_nvl_bytes

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0
        CALLS.append(f"set_num_sms {new_num_sms}")

    @staticmethod
    def get_dispatch_config(num_ranks):
        return _Sizes()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts, previous_event=None, async_finish=False,
                            allocate_on_comm_stream=False):  # fmt: skip
        CALLS.append("get_dispatch_layout")
        assert topk_idx.dtype is torch.int64
        assert topk_idx.dim() == 2
        ranks, local = self.group.size(), num_experts // self.group.size()
        is_here = topk_idx[..., None] // local == torch.arange(ranks)
        in_rank = (is_here & (topk_idx >= 0)[..., None]).any(1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return in_rank.sum(0).int(), None, per_expert.int(), in_rank, None

    def dispatch(self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None,
                 is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None,
                 topk_weights=None, expert_alignment=1, num_worst_tokens=0, config=None,
                 previous_event=None, async_finish=False,
                 allocate_on_comm_stream=False):  # fmt: skip
        assert x.is_contiguous()
        assert x.numel() * x.element_size() <= self.num_nvl_bytes * len(x)
        if handle is not None:
            CALLS.append("dispatch with handle")
            assert topk_idx is None and topk_weights is None
            return handle.send(x), None, None, None, None, None
        CALLS.append("dispatch")
        assert topk_weights.dtype is torch.float32
        assert topk_idx.shape == topk_weights.shape
        rows, local = _Rows(is_token_in_rank, self.group), len(num_tokens_per_expert)
        local //= self.group.size()
        indices, first = rows.send(topk_idx[rows.token]), self.group.rank() * local
        is_here = (indices >= first) & (indices < first + local)
        indices = torch.where(is_here, indices - first, -1)
        weights = torch.where(is_here, rows.send(topk_weights[rows.token]), 0.0)
        counts = torch.bincount(indices[is_here], minlength=local).tolist()
        handle = _BufferHandle(rows)
        return handle.send(x), indices, weights, counts, handle, None

    def combine(self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None,
                async_finish=False, allocate_on_comm_stream=False):  # fmt: skip
        CALLS.append("combine")
        assert x.is_contiguous()
        weights = None
        if topk_weights is not None:
            assert topk_weights.dtype is torch.float32
            weights = handle.rows.send_back(topk_weights)
        return handle.rows.send_back(x), weights, None


class _BufferHandle:
    def __init__(self, rows):
        self.rows = rows

    def send(self, x):
        return self.rows.send(x[self.rows.token])


class HybridEPBuffer:
    """`deep_ep.HybridEPBuffer` within a node."""

    def __init__(self, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts,
                 use_fp8=False, num_sms_dispatch_api=None, num_sms_combine_api=None):  # fmt: skip
        self.group, self.hidden_dim = group, hidden_dim
        self.most, self.num_local_experts = max_num_of_tokens_per_rank, num_local_experts
        CALLS.append(f"HybridEPBuffer {num_sms_dispatch_api}")

    def dispatch_with_permute(self, *, hidden, routing_map=None, probs=None, scaling_factor=None,
                              num_of_experts_per_rank=None, pad_multiple=None,
                              num_permuted_tokens=None, non_blocking=False,
                              handle=None):  # fmt: skip
        CALLS.append("dispatch_with_permute" + " again" * (handle is not None))
        assert hidden.shape[1] == self.hidden_dim
        assert len(hidden) <= self.most
        weights = counts = None
        if handle is None:
            assert probs.dtype is torch.float32
            assert routing_map.dtype is torch.bool
            local, ranks = num_of_experts_per_rank, self.group.size()
            assert routing_map.shape == probs.shape == (len(hidden), local * ranks)
            parts = routing_map.view(-1, ranks, local)
            rows = _Rows(parts.any(2), self.group)
            of_rank = parts[rows.token, rows.rank].to(torch.uint8)
            here = rows.send(of_rank).bool()
            its_probs = rows.send(probs.view(-1, ranks, local)[rows.token, rows.rank])
            pairs = here.t().nonzero()
            handle = types.SimpleNamespace(rows=rows, expert=pairs[:, 0], row=pairs[:, 1],
                                           shape=here.shape)  # fmt: skip
            weights = its_probs[handle.row, handle.expert]
            counts = here.sum(0)
        else:
            assert num_permuted_tokens == len(handle.row)
        received = handle.rows.send(hidden[handle.rows.token])
        return received[handle.row], weights, None, counts, handle

    def combine_with_unpermute(self, *, hidden, probs=None, handle, pad_multiple=None):
        CALLS.append("combine_with_unpermute")
        rows = handle.rows
        summed = hidden.new_zeros((handle.shape[0], hidden.shape[1])).index_add_(
            0, handle.row, hidden
        )
        of_weights = None
        if probs is not None:
            here = probs.new_zeros(handle.shape)
            here[handle.row, handle.expert] = probs
            back = _exchange(here, rows.received, rows.sent, rows.group)
            whole = probs.new_zeros(rows.num_tokens, rows.group.size(), handle.shape[1])
            whole[rows.token, rows.rank] = back
            of_weights = whole.flatten(1)
        return rows.send_back(summed), of_weights


@contextlib.contextmanager
def library_on_cpu(name):
    """Let the flex dispatcher take the library `name` (deepep, hybridep) here, in any dtype."""
    module = types.ModuleType("deep_ep")
    module.Buffer, module.HybridEPBuffer = Buffer, HybridEPBuffer
    module.__spec__ = types.SimpleNamespace(name="deep_ep")
    table = dispatchers.EXCHANGE
    (kernel,) = (k for k in table.kernels[OTHER_DEVICES] if k.name == name)
    every = frozenset({dispatchers.DEEP_EP, dispatchers.HYBRID_EP})
    kernel = dataclasses.replace(kernel, dtypes=None, supports=every)
    optional_imports.has.cache_clear()
    optional_imports.why_missing.cache_clear()
    CALLS.clear()
    with (
        mock.patch.dict(sys.modules, {"deep_ep": module}),
        mock.patch.dict(table.kernels, {"cpu": (kernel, *table.kernels["cpu"])}),
        mock.patch.dict(table.chosen, clear=True),
    ):
        yield
    optional_imports.has.cache_clear()
    optional_imports.why_missing.cache_clear()
