"""Attention of a split sequence equals attention of the whole one, output and gradients."""

import pytest
import torch

from megatron.core.context_parallel.attention import (
    ContextParallelGroups,
    attend_in_units,
    context_parallel_attention,
)
from megatron.core.context_parallel.partition import shard_sequence
from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import MaskSpec
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import BF16_WHOLE_MODEL, FP32_REORDERED_SUM, assert_close

LENGTH, BATCH = 48, 2


def attention_case(
    heads, key_heads, window, with_documents, dropout, with_sink, dtype=torch.float32
):
    """Return inputs of a whole sequence, the gradient of its output, and the options."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = {
        "query": draw(LENGTH, BATCH, heads, 8),
        "key": draw(LENGTH, BATCH, key_heads, 8),
        "value": draw(LENGTH, BATCH, key_heads, 6),  # another width than the keys, as in MLA
    }
    documents = None
    if with_documents:
        starts = torch.rand(BATCH, LENGTH, generator=generator) < 0.08
        documents = starts.cumsum(1).int()
    options = AttentionOptions(
        0.3,
        MaskSpec(window, documents),
        dropout=dropout,
        sink=draw(heads).requires_grad_() if with_sink else None,
    )
    return tensors, draw(LENGTH, BATCH, heads * 6), options


def output_and_gradients(groups, cp_comm_type, case):
    """Attend with this rank's rows; return rows of output and gradients, and the sink's."""
    rng_state().set_seed(11)
    tensors, grad, options = attention_case(*case)
    rank, size = groups.cp.rank(), groups.cp.size()
    if size > 1:
        tensors = {name: shard_sequence(t, 0, rank, size) for name, t in tensors.items()}
        grad = shard_sequence(grad, 0, rank, size)
    for tensor in tensors.values():
        tensor.requires_grad_()
    context = ContextParallelGroups(groups.cp, groups.hcp)
    with rng_state().in_scope("test"):
        if cp_comm_type == UNITS:
            out = attend_in_units(
                **tensors, options=options, group=groups.cp, num_units=8 // size, attend=attend
            )
        else:
            out = context_parallel_attention(
                **tensors, options=options, cp_comm_type=cp_comm_type, groups=context
            )
    out.backward(grad)
    found = {name: tensor.grad for name, tensor in tensors.items()} | {"output": out.detach()}
    return found, None if options.sink is None else options.sink.grad


def attend(kernel, *arguments):
    """Attend with all heads at once."""
    return kernel(*arguments)


UNITS = "units of the sequence"
CAUSAL, WINDOW, EVERYTHING = (-1, 0), (13, 0), (-1, -1)
CASES = {
    "causal": (4, 4, CAUSAL, False, 0.0, False),
    "shared key heads": (4, 2, CAUSAL, False, 0.0, False),
    "dropout": (4, 2, CAUSAL, False, 0.25, False),
    "window and sink": (8, 4, WINDOW, False, 0.0, True),
    "documents": (4, 1, CAUSAL, True, 0.0, False),
    "documents, window, dropout, sink": (4, 2, WINDOW, True, 0.25, True),
    "both directions, documents": (4, 2, EVERYTHING, True, 0.0, True),
    "uneven key heads": (12, 3, CAUSAL, False, 0.25, True),
}
LAYOUTS = [
    ("p2p", {"cp": 2}), ("p2p", {"cp": 4}), ("all_gather", {"cp": 2}), ("all_gather", {"cp": 4}),
    ("a2a", {"cp": 2}), ("a2a", {"cp": 4}),
    ("a2a+p2p", {"cp": 4, "hierarchical_cp": [2, 2]}),
]  # fmt: skip


def assert_equals_whole(cp_comm_type, layout, case, tolerance=FP32_REORDERED_SUM):
    """Compare every rank's rows with those of one process."""
    serial = ProcessGroupCollection.single()
    expected, expected_sink = output_and_gradients(serial, cp_comm_type, case)
    size = layout["cp"]
    results = run_distributed(output_and_gradients, size, cp_comm_type, case, **layout)
    for rank, (found, _) in enumerate(results):
        for name, whole in expected.items():
            rows = shard_sequence(whole, 0, rank, size)
            assert_close(found[name], rows, tolerance, f"{name} {rank}")
    if expected_sink is not None:
        total = sum(sink for _, sink in results)
        assert_close(total, expected_sink, FP32_REORDERED_SUM, "gradient of the sink")


@pytest.mark.distributed
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(
    ("cp_comm_type", "layout"), LAYOUTS, ids=[f"{k}-{v['cp']}" for k, v in LAYOUTS]
)
def test_every_rank_holds_its_rows_of_the_whole_attention(cp_comm_type, layout, case):
    assert_equals_whole(cp_comm_type, layout, CASES[case])


@pytest.mark.distributed
@pytest.mark.parametrize(("cp_comm_type", "layout"), [LAYOUTS[1], LAYOUTS[3], LAYOUTS[6]])
def test_half_precision_is_merged_in_full(cp_comm_type, layout):
    """Sums over ranks are fp32; what is rounded to bf16 on the way is a chain as in one process:

    scores, probabilities, output, and from it the sum that gradients of scores cancel against.
    """
    case = (4, 2, CAUSAL, True, 0.0, False, torch.bfloat16)
    assert_equals_whole(cp_comm_type, layout, case, BF16_WHOLE_MODEL)


@pytest.mark.distributed
@pytest.mark.parametrize("case", list(CASES))
def test_units_of_the_sequence_have_the_same_bits_on_any_number_of_ranks(case):
    one = ProcessGroupCollection.single()
    expected, expected_sink = output_and_gradients(one, UNITS, CASES[case])
    usual, usual_sink = output_and_gradients(one, "p2p", CASES[case])
    for name, whole in usual.items():
        assert_close(expected[name], whole, FP32_REORDERED_SUM, name)
    if usual_sink is not None:
        assert_close(expected_sink, usual_sink, FP32_REORDERED_SUM, "gradient of the sink")
    for size in (2, 4):
        results = run_distributed(output_and_gradients, size, UNITS, CASES[case], cp=size)
        for rank, (found, _) in enumerate(results):
            for name, whole in expected.items():
                assert torch.equal(found[name], shard_sequence(whole, 0, rank, size)), name
