"""Every kind of context parallelism sends exactly the bytes that theory says, and no more."""

import contextlib
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core.context_parallel.attention import (
    ContextParallelGroups,
    context_parallel_attention,
)
from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import MaskSpec
from megatron.core.ssm.sequence_pieces import SequencePieces
from megatron.core.transport import collectives
from tests.harness.distributed import run_distributed

LOCAL, BATCH, WIDTH, VALUE_WIDTH = 16, 2, 8, 6
TAPS = 4


class SentBytes:
    """Counts what this rank hands to others, at the door of the collectives.

    How a backend moves it (ranks of one host may share memory) is another matter.
    """

    def __init__(self) -> None:
        self.total = 0

    def _count(self, tensor, num_others, num_parts=1):
        self.total += tensor.numel() * tensor.element_size() * num_others // num_parts

    def patches(self):
        """Return patches of everything that moves bytes."""
        send_receive, gather = dist.batch_isend_irecv, collectives.all_gather
        reduce, exchange = collectives.reduce_scatter, collectives.all_to_all

        def counted_send_receive(operations):
            for operation in operations:
                if operation.op is dist.isend:
                    self._count(operation.tensor, 1)
            return send_receive(operations)

        def counted_gather(piece, group, *out):
            self._count(piece, group.size() - 1)
            return gather(piece, group, *out)

        def counted_reduce(pieces, group, *out):
            self._count(pieces, group.size() - 1, group.size())
            return reduce(pieces, group, *out)

        def counted_exchange(pieces, group):
            self._count(pieces, group.size() - 1, group.size())
            return exchange(pieces, group)

        stack = contextlib.ExitStack()
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", counted_send_receive))
        for name, counted in (
            ("all_gather", counted_gather),
            ("reduce_scatter", counted_reduce),
            ("all_to_all", counted_exchange),
        ):
            stack.enter_context(mock.patch.object(collectives, name, counted))
        return stack


def bytes_of_a_layer(groups, cp_comm_type, heads, key_heads):
    """Return (bytes sent forward, bytes sent backward)."""
    shapes = ((heads, WIDTH), (key_heads, WIDTH), (key_heads, VALUE_WIDTH))
    inputs = [torch.randn(LOCAL, BATCH, *shape, requires_grad=True) for shape in shapes]
    sent = SentBytes()
    with sent.patches():
        out = context_parallel_attention(
            *inputs,
            AttentionOptions(1.0, MaskSpec((-1, 0))),
            cp_comm_type=cp_comm_type,
            groups=ContextParallelGroups(groups.cp, groups.hcp),
        )
        forward = sent.total
        out.sum().backward()
    return forward, sent.total - forward


def theory(cp_comm_type, cp, levels, heads, key_heads):
    """Return (forward, backward) in bytes: what docs/context_parallelism.md says."""
    tokens = 4 * LOCAL * BATCH
    keys = tokens * key_heads * (WIDTH + VALUE_WIDTH)
    if cp_comm_type in ("p2p", "all_gather"):
        return (cp - 1) * keys, 2 * (cp - 1) * keys
    u, ring = (cp, 1) if cp_comm_type == "a2a" else levels
    keys = max(1, u // key_heads) * keys  # replicated to where they are used
    exchanged = keys + tokens * heads * (WIDTH + VALUE_WIDTH)  # keys, values, queries, output
    through_heads = exchanged * (u - 1) // u
    return through_heads + (ring - 1) * keys, through_heads + 2 * (ring - 1) * keys


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("cp_comm_type", "cp", "levels", "heads", "key_heads"),
    [
        ("p2p", 4, None, 4, 2),
        ("all_gather", 4, None, 4, 2),
        ("a2a", 2, None, 4, 4),
        ("a2a", 4, None, 8, 2),
        ("a2a+p2p", 4, [2, 2], 4, 2),
        ("a2a+p2p", 4, [2, 2], 4, 1),
    ],
)
def test_bytes_of_a_layer_are_those_of_theory(cp_comm_type, cp, levels, heads, key_heads):
    layout = {"cp": cp} | ({"hierarchical_cp": levels} if levels else {})
    expected = theory(cp_comm_type, cp, levels, heads, key_heads)
    assert (
        run_distributed(bytes_of_a_layer, cp, cp_comm_type, heads, key_heads, **layout)
        == [expected] * cp
    )


@dataclass(frozen=True)
class LinearChunks:
    """A state S [b, WIDTH, VALUE_WIDTH] becomes A S + B; `update` [b, WIDTH, ...] is (A, B)."""

    update: torch.Tensor

    def transition(self):
        return self.update

    @staticmethod
    def after(transition, state):
        factor, added = transition.split([WIDTH, VALUE_WIDTH], dim=-1)
        return added if state is None else factor @ state + added


def bytes_of_recurrences(groups, *lengths):
    """Return the bytes sent forward and backward for one head's state and convolution."""
    return [bytes_of_a_recurrence(groups, rows) for rows in lengths]


def bytes_of_a_recurrence(groups, rows):
    pieces = SequencePieces(groups.cp)
    x = torch.randn(rows, BATCH, WIDTH, requires_grad=True)
    sent = SentBytes()
    with sent.patches():
        before = pieces.rows_before(pieces.fold(x), TAPS - 1)
        update = before.mean() + torch.randn(2 * BATCH, WIDTH, WIDTH + VALUE_WIDTH)
        out = pieces.states_before(LinearChunks(update))
        forward = sent.total
        out.sum().backward()
    return forward, sent.total - forward


@pytest.mark.distributed
def test_bytes_of_a_recurrence_do_not_depend_on_the_length_of_the_sequence():
    cp = 4
    elements = 2 * BATCH * WIDTH * (TAPS - 1 + WIDTH + VALUE_WIDTH)
    expected = [((cp - 1) * 4 * elements,) * 2] * 2
    assert run_distributed(bytes_of_recurrences, cp, 8, 64, cp=cp) == [expected] * cp
