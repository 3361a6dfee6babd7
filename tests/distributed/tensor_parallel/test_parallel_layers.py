"""Layers over several ranks against the same layers on one: outputs and every gradient."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from megatron.core.foundation.errors import DataError
from megatron.core.low_precision.quantized_linear import QuantizedLinear
from megatron.core.low_precision.recipes import fp4_recipe, fp8_recipe
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parameters.initialization import init_method_normal
from megatron.core.parameters.keyed_draws import keyed_dropout
from megatron.core.parameters.param_meta import get_param_meta, shard_of
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.step_context.random_scope import SequenceShard
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport import collectives
from tests.harness.distributed import distributed
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, FP64_REORDERED_SUM, assert_close

SERIAL = ProcessGroupCollection.single()
S, B, H, F = 8, 2, 16, 24
NORMAL = init_method_normal(0.4)


class ParallelMLP(nn.Module):
    """A column-parallel and a row-parallel layer around tanh; with stride 2, a gated one."""

    def __init__(self, config, groups, *, stride=1, **column) -> None:
        super().__init__()
        common = {"config": config, "init_method": NORMAL, "pg_collection": groups}
        self.up = ColumnParallelLinear(H, F * stride, stride=stride, **column, **common)
        self.down = RowParallelLinear(
            F, H, bias=True, input_is_parallel=not column.get("gather_output", False),
            skip_bias_add=False, **common,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.up(x)[0].chunk(self.up.stride, -1)
        return self.down(torch.tanh(blocks[0]) * (blocks[1] if len(blocks) > 1 else 1.0))[0]


def copy_shards(parallel: nn.Module, serial: nn.Module, group) -> None:
    """Give the parallel module its pieces of the serial module's parameters."""
    with torch.no_grad():
        for ours, whole in zip(parallel.parameters(), serial.parameters(), strict=True):
            ours.copy_(shard_of(whole, get_param_meta(ours), group.rank(), group.size()))


def randomize(module: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def give_main_grads(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.main_grad = torch.full_like(parameter, torch.nan)
        parameter.main_grad_is_fresh = True


def assert_same_gradients(parallel: nn.Module, serial: nn.Module, group, tolerance) -> None:
    for (name, ours), whole in zip(parallel.named_parameters(), serial.parameters(), strict=True):
        meta = get_param_meta(ours)
        grad = ours.main_grad if ours.grad is None else ours.grad
        if meta.partial_grad_axes:
            assert meta.partial_grad_axes == ("tp",)
            grad = collectives.all_reduce(grad.clone(), group)
        expected = shard_of(whole.grad, meta, group.rank(), group.size())
        assert_close(grad, expected, tolerance, f"gradient of {name}")


def check_mlp(groups, *, sequence_parallel, main_grad, overlap=True, **column) -> None:
    size, group = groups.tp.size(), groups.tp
    config = ModelParallelConfig(
        tensor_model_parallel_size=size,
        sequence_parallel=sequence_parallel,
        async_tensor_model_parallel_allreduce=overlap,
    )
    serial = randomize(ParallelMLP(ModelParallelConfig(), SERIAL, **column))
    parallel = ParallelMLP(config, groups, **column)
    copy_shards(parallel, serial, group)
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(2))
    upstream = torch.randn(S, B, H, generator=torch.Generator().manual_seed(3))
    x_serial = x.clone().requires_grad_()
    expected = serial(x_serial)
    expected.backward(upstream)
    if main_grad:
        give_main_grads(parallel)

    def piece(t: Tensor) -> Tensor:
        return t.chunk(size)[group.rank()] if sequence_parallel else t

    x_parallel = piece(x).clone().requires_grad_()
    out = parallel(x_parallel)
    out.backward(piece(upstream))
    assert_close(out, piece(expected), FP32_REORDERED_SUM, "output")
    assert_close(x_parallel.grad, piece(x_serial.grad), FP32_REORDERED_SUM, "input gradient")
    assert_same_gradients(parallel, serial, group, FP32_REORDERED_SUM)
    if main_grad:
        assert all(p.grad is None and not p.main_grad_is_fresh for p in parallel.parameters())
    if not sequence_parallel:
        everyone = collectives.all_gather(out.detach().unsqueeze(0), group)
        assert all(torch.equal(other, out) for other in everyone), "replicas differ"


RECIPES = {
    "tensorwise": fp8_recipe("tensorwise", "hybrid"),
    "blockwise": fp8_recipe("blockwise", "e4m3"),
    "mxfp8": fp8_recipe("mxfp8", "hybrid"),
    "nvfp4": fp4_recipe("nvfp4"),
}


def use_recipe(module: ParallelMLP, recipe) -> ParallelMLP:
    for layer in (module.up, module.down):
        meta = get_param_meta(layer.weight)
        quantized = QuantizedLinear(
            recipe=recipe, tp=layer.tp_group, cp=SINGLE_RANK, split_dim=meta.split_dim,
            stride=meta.stride,
        )  # fmt: skip
        layer.spec = replace(layer.spec, quantized=quantized)
    return module.double()


def check_low_precision(groups, *, sequence_parallel, recipe) -> None:
    size, group = groups.tp.size(), groups.tp
    config = ModelParallelConfig(
        tensor_model_parallel_size=size, sequence_parallel=sequence_parallel
    )
    serial = randomize(use_recipe(ParallelMLP(ModelParallelConfig(), SERIAL, stride=2), recipe))
    parallel = use_recipe(ParallelMLP(config, groups, stride=2), recipe)
    copy_shards(parallel, serial, group)
    # In fp64 no sum is close enough to a step of the format for its order to matter.
    x = torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rows = SequenceShard.full(S)
    with rng_state().in_scope("mlp", rows=rows):
        expected = serial(x)
        expected.square().sum().backward()
    own = rows.shard(group.rank(), size) if sequence_parallel else rows
    with rng_state().in_scope("mlp", rows=own):
        out = parallel(x.chunk(size)[group.rank()] if sequence_parallel else x)
        out.square().sum().backward()
    expected = expected.chunk(size)[group.rank()] if sequence_parallel else expected
    assert_close(out, expected, FP64_REORDERED_SUM, "output")
    assert_same_gradients(parallel, serial, group, FP64_REORDERED_SUM)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@distributed(world_size=2, tp=2)
def test_blocks_and_scales_that_ranks_share_are_those_of_one_process(
    groups, sequence_parallel, recipe
):
    check_low_precision(groups, sequence_parallel=sequence_parallel, recipe=RECIPES[recipe])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("main_grad", [False, True])
@distributed(world_size=2, tp=2)
def test_mlp_on_two_ranks_equals_serial(groups, sequence_parallel, main_grad):
    check_mlp(groups, sequence_parallel=sequence_parallel, main_grad=main_grad)
    check_mlp(groups, sequence_parallel=sequence_parallel, main_grad=main_grad, overlap=False)
    check_mlp(groups, sequence_parallel=sequence_parallel, main_grad=main_grad, bias=False)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("main_grad", [False, True])
@distributed(world_size=4, tp=4)
def test_mlp_on_four_ranks_equals_serial(groups, sequence_parallel, main_grad):
    check_mlp(groups, sequence_parallel=sequence_parallel, main_grad=main_grad, stride=2)


@distributed(world_size=4, tp=4)
def test_gathered_outputs_and_cut_inputs_equal_serial(groups):
    check_mlp(groups, sequence_parallel=False, main_grad=True, gather_output=True)


@distributed(world_size=2, tp=2)
def test_autocast_equals_serial_autocast(groups):
    for sequence_parallel in (False, True):
        config = ModelParallelConfig(
            tensor_model_parallel_size=2, sequence_parallel=sequence_parallel
        )
        parallel = ParallelMLP(config, groups)
        serial = randomize(ParallelMLP(ModelParallelConfig(), SERIAL))
        copy_shards(parallel, serial, groups.tp)
        x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(2))
        local = x.chunk(2)[groups.tp.rank()] if sequence_parallel else x
        with torch.autocast("cpu", torch.bfloat16):
            out, expected = parallel(local), serial(x)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        if sequence_parallel:
            expected = expected.chunk(2)[groups.tp.rank()]
        torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=2e-2)
        assert parallel.up.weight.grad is not None


# Embedding, head and loss -------------------------------------------------------------------

VALID, PADDED = 29, 40


class TinyLanguageModel(nn.Module):
    """Embedding, dropout, a tied or separate head, and the loss."""

    def __init__(self, config, groups, *, loss: str, smoothing: float) -> None:
        super().__init__()
        self.config, self.group, self.loss = config, groups.tp or SoloGroup(), loss
        self.smoothing = smoothing
        common = {"config": config, "init_method": NORMAL, "pg_collection": groups}
        self.embedding = VocabParallelEmbedding(
            PADDED, H, reduce_scatter_embeddings=config.sequence_parallel, **common
        )
        self.head = ColumnParallelLinear(H, PADDED, bias=False, **common)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        if not self.config.sequence_parallel:
            x = x.transpose(0, 1).contiguous()  # [s, b, h]
        x = torch.tanh(x)
        arguments = {
            "tp_group": self.group, "num_valid": self.config.unpadded_vocab_size,
            "label_smoothing": self.smoothing,
        }  # fmt: skip
        if self.loss == "fused":
            return linear_cross_entropy(
                x, self.head.weight, labels.t(),
                sequence_parallel=self.config.sequence_parallel, **arguments,
            )  # fmt: skip
        logits, _ = self.head(x)
        return vocab_parallel_cross_entropy(
            logits, labels.t(), overwrite_logits=self.loss == "overwrite", **arguments
        )


def language_config(tp: int, sequence_parallel: bool) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=4, tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel, unpadded_vocab_size=VALID,
    )  # fmt: skip


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("loss", ["plain", "overwrite", "fused"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@distributed(world_size=4, tp=4)
def test_embedding_and_loss_equal_serial(groups, sequence_parallel, loss, smoothing):
    # 40 rows over 4 ranks: the third holds 9 real ids and one of padding, the last only padding.
    draw = torch.Generator().manual_seed(4)
    ids, labels = torch.randint(0, VALID, (2, B, S), generator=draw)
    labels[1, 2] = -100
    upstream = torch.rand(S, B, generator=draw)
    build = partial(TinyLanguageModel, smoothing=smoothing)
    serial = randomize(build(language_config(1, False), SERIAL, loss="plain"))
    expected = serial(ids, labels)
    expected.backward(upstream)
    for main_grad in (False, True):
        parallel = build(language_config(4, sequence_parallel), groups, loss=loss)
        copy_shards(parallel, serial, groups.tp)
        if main_grad:
            give_main_grads(parallel)
        out = parallel(ids, labels)
        out.backward(upstream)
        assert_close(out, expected, FP32_REORDERED_SUM, "loss")
        assert_same_gradients(parallel, serial, groups.tp, FP32_REORDERED_SUM)
        everyone = collectives.all_gather(out.detach().unsqueeze(0), groups.tp)
        assert all(torch.equal(other, out) for other in everyone), "losses differ between ranks"


class SoloGroup:
    """One rank, although the process is part of a larger group."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("bad", [VALID, PADDED, -1, 10**9])
@distributed(world_size=4, tp=2)
def test_a_bad_id_is_refused_with_the_same_words_in_every_layout(groups, bad):
    ids = torch.tensor([[0, bad, 3]])
    texts = []
    for tp, collection in ((1, SERIAL), (2, groups)):
        layer = VocabParallelEmbedding(
            PADDED, H, init_method=NORMAL, config=language_config(tp, False),
            pg_collection=collection,
        )  # fmt: skip
        with pytest.raises(DataError, match=f"token id {bad} is outside the vocabulary of 29"):
            layer(ids)
        try:
            layer(ids)
        except DataError as error:
            texts.append(str(error))
    assert texts[0] == texts[1]
    with pytest.raises(DataError, match=f"label {bad} "):
        vocab_parallel_cross_entropy(
            torch.zeros(3, 1, PADDED // 2), ids.t(), tp_group=groups.tp, num_valid=VALID
        )


# Recomputation ------------------------------------------------------------------------------


@pytest.mark.parametrize("distribute", [False, True])
@distributed(world_size=2, tp=2)
def test_recomputation_under_tensor_parallelism_changes_no_bit(groups, distribute):
    config = ModelParallelConfig(tensor_model_parallel_size=2)
    mlp = ParallelMLP(config, groups)

    def block(x):
        with rng_state().in_scope("block", 3):
            return x + keyed_dropout(mlp(x), 0.3)

    results = []
    for call in (block, lambda x: checkpoint(block, distribute, x)):
        rng_state().set_microbatch(0)
        torch.manual_seed(6)
        x = torch.randn(S, B, H, requires_grad=True)
        out = call(torch.tanh(x))
        mlp.zero_grad()
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in mlp.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        assert_close(recomputed, plain, EXACT, "recomputed")
