"""Each mapping, its gradient, and the bits of its result on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import tensor_parallel
from megatron.core.foundation.errors import DataError
from megatron.core.tensor_parallel import mappings
from megatron.core.transport import collectives
from tests.harness.distributed import distributed
from tests.harness.tolerances import EXACT, FP32_ROUNDED_ONCE, assert_close


def of_rank(rank: int, *shape: int) -> Tensor:
    """A tensor that every rank can compute for every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank))


def apply(name: str, x: Tensor, upstream: Tensor, **arguments) -> tuple[Tensor, Tensor]:
    """Return a mapping's output and gradient."""
    leaf = x.clone().requires_grad_()
    out = getattr(mappings, name)(leaf, **arguments)
    (grad,) = torch.autograd.grad(out, leaf, upstream)
    return out.detach(), grad


def total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).double().sum(0)


@distributed(world_size=4, tp=4)
def test_each_mapping_and_its_gradient(groups):
    rank, size, s, b, h = groups.tp.rank(), 4, 8, 2, 12
    whole = [of_rank(r, s, b, h) for r in range(size)]
    rows = [of_rank(r, s // size, b, h) for r in range(size)]
    columns = [of_rank(r, s, b, h // size) for r in range(size)]
    upstream = [of_rank(10 + r, s, b, h) for r in range(size)]
    up_rows = [of_rank(20 + r, s // size, b, h) for r in range(size)]
    up_columns = [of_rank(30 + r, s, b, h // size) for r in range(size)]
    row_piece, column_piece = (lambda x: x.chunk(size)[rank]), (lambda x: x.chunk(size, -1)[rank])
    cases = [
        # mapping, inputs and upstream gradients of all ranks, expected output and gradient
        ("copy_to_tensor_model_parallel_region", whole, upstream, whole[rank], total(upstream)),
        ("reduce_from_tensor_model_parallel_region", whole, upstream, total(whole), upstream[rank]),
        ("scatter_to_tensor_model_parallel_region", whole, up_columns,
         column_piece(whole[rank]), torch.cat(up_columns, -1)),
        ("gather_from_tensor_model_parallel_region", columns, upstream,
         torch.cat(columns, -1), column_piece(upstream[rank])),
        ("all_gather_last_dim_from_tensor_parallel_region", columns, upstream,
         torch.cat(columns, -1), column_piece(total(upstream))),
        ("reduce_scatter_last_dim_to_tensor_parallel_region", whole, up_columns,
         column_piece(total(whole)), torch.cat(up_columns, -1)),
        ("scatter_to_sequence_parallel_region", whole, up_rows,
         row_piece(whole[rank]), torch.cat(up_rows)),
        ("gather_from_sequence_parallel_region", rows, upstream,
         torch.cat(rows), row_piece(total(upstream))),
        ("reduce_scatter_to_sequence_parallel_region", whole, up_rows,
         row_piece(total(whole)), torch.cat(up_rows)),
    ]  # fmt: skip
    for name, inputs, ups, expected, expected_grad in cases:
        out, grad = apply(name, inputs[rank], ups[rank])
        assert out.is_contiguous(), name
        assert_close(out, expected, FP32_ROUNDED_ONCE, name)
        assert_close(grad, expected_grad, FP32_ROUNDED_ONCE, f"gradient of {name}")
    out, grad = apply(
        "gather_from_sequence_parallel_region", rows[rank], upstream[rank],
        tensor_parallel_output_grad=False,
    )  # fmt: skip
    assert_close(grad, row_piece(upstream[rank]), EXACT, "gradient of a replicated gather")


@distributed(world_size=4, tp=4)
def test_mappings_take_inputs_that_are_not_contiguous(groups):
    rank = groups.tp.rank()
    x = [of_rank(r, 12, 2, 8).transpose(0, 2) for r in range(4)]
    upstream = of_rank(9, 2, 2, 12)
    out, grad = apply("reduce_scatter_to_sequence_parallel_region", x[rank], upstream)
    assert_close(out, total(x).chunk(4)[rank], FP32_ROUNDED_ONCE, "output")
    assert_close(grad, torch.cat([upstream] * 4), EXACT, "gradient")
    out, _ = apply("reduce_from_tensor_model_parallel_region", x[rank], torch.ones(8, 2, 12))
    assert_close(out, total(x), FP32_ROUNDED_ONCE, "sum")


@distributed(world_size=4, tp=4)
def test_uneven_rows_are_gathered_and_reduced(groups):
    rank, sizes = groups.tp.rank(), [3, 0, 4, 1]
    rows = [of_rank(r, n, 5) for r, n in enumerate(sizes)]
    upstream = [of_rank(10 + r, 8, 5) for r in range(4)]
    out, grad = apply(
        "gather_from_sequence_parallel_region", rows[rank], upstream[rank],
        output_split_sizes=sizes,
    )  # fmt: skip
    assert_close(out, torch.cat(rows), EXACT, "gather")
    assert_close(grad, total(upstream).split(sizes)[rank], FP32_ROUNDED_ONCE, "its gradient")
    out, grad = apply(
        "reduce_scatter_to_sequence_parallel_region", upstream[rank], rows[rank],
        input_split_sizes=sizes,
    )  # fmt: skip
    assert_close(out, total(upstream).split(sizes)[rank], FP32_ROUNDED_ONCE, "reduce-scatter")
    assert_close(grad, torch.cat(rows), EXACT, "its gradient")


@distributed(world_size=4, tp=4)
def test_all_to_all_sends_rows_there_and_gradients_back(groups):
    rank = groups.tp.rank()
    sent = [[1, 2, 0, 3], [2, 0, 1, 1], [0, 4, 1, 0], [1, 1, 1, 1]]  # sent[from][to]
    inputs = [of_rank(r, sum(sent[r]), 3) for r in range(4)]
    received = [sent[r][rank] for r in range(4)]
    leaf = inputs[rank].clone().requires_grad_()
    out = tensor_parallel.all_to_all(groups.tp, leaf, received, sent[rank])
    expected = torch.cat([inputs[r].split(sent[r])[rank] for r in range(4)])
    assert_close(out, expected, EXACT, "received")
    (grad,) = torch.autograd.grad(out, leaf, out.detach() * 2)
    assert_close(grad, inputs[rank] * 2, EXACT, "gradient")


@distributed(world_size=4, tp=4)
def test_trading_tokens_for_features_is_undone_by_its_inverse(groups):
    rank = groups.tp.rank()
    whole = of_rank(0, 8, 12)
    own = whole.chunk(4)[rank].clone().requires_grad_()
    traded = tensor_parallel.all_to_all_sp2hp(own)
    assert_close(traded, whole.chunk(4, -1)[rank], EXACT, "features")
    back = tensor_parallel.all_to_all_hp2sp(traded)
    assert_close(back, own, EXACT, "tokens")
    (grad,) = torch.autograd.grad(back, own, own.detach() * 3)
    assert_close(grad, own * 3, EXACT, "gradient")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(world_size=4, tp=4)
def test_sums_have_the_same_bits_on_all_ranks_and_in_all_runs(groups, dtype):
    x = of_rank(groups.tp.rank(), 37, 3, 5).to(dtype)
    sums = [collectives.all_reduce(x.clone(), groups.tp) for _ in range(3)]
    sums.append(collectives.start_all_reduce(x.clone(), groups.tp).wait())
    everyone = collectives.all_gather(sums[0].unsqueeze(0), groups.tp)
    for other in [*sums, *everyone]:
        assert torch.equal(other, sums[0])


@distributed(world_size=2, tp=2)
def test_collectives_and_mappings_leave_their_input_alone(groups):
    x = of_rank(groups.tp.rank(), 8, 3)
    before = x.clone()
    collectives.reduce_scatter(x, groups.tp)
    collectives.all_gather(x, groups.tp)
    mappings.copy_to_tensor_model_parallel_region(x, groups.tp)
    mappings.reduce_from_tensor_model_parallel_region(x, groups.tp)
    assert torch.equal(x, before)


# Batches ------------------------------------------------------------------------------------


@distributed(world_size=4, tp=2)
def test_a_batch_reaches_all_tensor_parallel_ranks(groups):
    replica = dist.get_rank() // 2
    tokens = torch.arange(6).view(2, 3) + 10 * replica
    batch = {
        "tokens": tokens,
        "scalar": torch.tensor(5 + replica),
        "empty": torch.zeros(0, 3).long(),
    }
    data = batch if groups.tp.rank() == 0 else None
    got = tensor_parallel.broadcast_data(list(batch), data, torch.int64)
    assert all(torch.equal(got[key], batch[key]) for key in batch)


@pytest.mark.parametrize("problem", ["missing", "dtype"])
@distributed(world_size=2, tp=2)
def test_a_bad_batch_is_refused_on_all_ranks(groups, problem):
    value = {"missing": None, "dtype": torch.zeros(3)}[problem]
    data = {"tokens": value} if groups.tp.rank() == 0 else None
    with pytest.raises(DataError, match="'tokens'"):
        tensor_parallel.broadcast_data(["tokens"], data, torch.int64)


@distributed(world_size=4, tp=4)
def test_flat_pieces_are_joined_again(groups):
    x = of_rank(0, 4, 6)
    piece = tensor_parallel.split_tensor_into_1d_equal_chunks(x)
    assert torch.equal(tensor_parallel.gather_split_1d_tensor(piece).view(4, 6), x)
