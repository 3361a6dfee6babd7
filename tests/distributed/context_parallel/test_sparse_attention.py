"""Sparse attention over ranks that share a sequence: the choice, output and loss of one process."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.context_parallel.partition import shard_sequence
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import sparse_attention
from megatron.core.transformer.indexer import finish_indexer_step
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP64_REORDERED_SUM, assert_close

BATCH, HIDDEN = 2, 32


def outputs_and_gradients(groups, length, documents, fields):
    """Return this rank's output rows, its part of the input's gradient, the weights' sums, and the
    loss of the step."""
    torch.manual_seed(3)
    size, rank = groups.cp.size(), groups.cp.rank()
    config = MLATransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, init_method_std=0.3,
        q_lora_rank=14, kv_lora_rank=10, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=5,
        qk_layernorm=True, attention_dropout=0.0, add_bias_linear=False, context_parallel_size=size,
        experimental_attention_variant="dsa", dsa_indexer_n_heads=6, dsa_indexer_head_dim=8,
        dsa_indexer_topk=5, dsa_indexer_loss_coeff=0.7, use_cpu_initialization=True, **fields,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        multi_latent_attention=True, qk_layernorm=True, kind=config.layer_kind(1)
    ).submodules.self_attention
    module = build_module(spec, config=config, layer_number=1, pg_collection=groups).double()
    made = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(length, BATCH, HIDDEN, generator=made).double() for _ in range(2))
    if size > 1:
        x, weight = (shard_sequence(t, 0, rank, size) for t in (x, weight))
    packed = None
    if documents is not None:
        rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents]
        packed = PackedSeqParams(seq_idx=torch.stack(rows).int())
    out, _ = module(x.requires_grad_(), None, packed_seq_params=packed)
    (out * weight).sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    if size > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=groups.cp)
    finish_indexer_step([module], groups)
    return out.detach(), x.grad, gradients, module.core_attention.indexer_loss.step_loss


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("cp", "length", "documents", "fields"),
    [
        (2, 20, None, {}),
        (2, 12, ([5, 7], [1, 2, 9]), {"dsa_indexer_use_sparse_loss": True}),
        (4, 24, ([3, 14, 7], [9, 15]), {"window_size": (9, 0), "softmax_type": "learnable"}),
    ],
)
def test_outputs_loss_and_gradients_are_those_of_one_process(
    cp, length, documents, fields, monkeypatch
):
    case = (length, documents, fields)
    expected = outputs_and_gradients(ProcessGroupCollection.single(), *case)
    monkeypatch.setattr(sparse_attention, "BLOCK_ELEMENTS", 3 * 6 * BATCH * length)
    in_blocks = outputs_and_gradients(ProcessGroupCollection.single(), *case)
    found = run_distributed(outputs_and_gradients, cp, *case, cp=cp)
    for rank, size, (out, of_input, gradients, loss) in [
        (0, 1, in_blocks), *((rank, cp, result) for rank, result in enumerate(found))
    ]:  # fmt: skip
        mine = [t if size == 1 else shard_sequence(t, 0, rank, size) for t in expected[:2]]
        assert_close(out, mine[0], FP64_REORDERED_SUM, "output")
        assert_close(of_input, mine[1], FP64_REORDERED_SUM, "gradient of the input")
        assert_close(loss, expected[3], FP64_REORDERED_SUM, "loss")
        for name, gradient in gradients.items():
            assert_close(gradient, expected[2][name], FP64_REORDERED_SUM, f"gradient of {name}")
