"""Attention to compressed entries: over ranks that share a sequence, in documents, in blocks."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.context_parallel.partition import shard_sequence
from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import compressed_attention
from megatron.core.transformer.indexer import finish_indexer_step
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, FP64_REORDERED_SUM, assert_close

BATCH, HIDDEN, HEAD = 2, 32, 10


def config_with(ratio, **fields):
    usual = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "init_method_std": 0.3,
        "q_lora_rank": 14, "kv_lora_rank": HEAD, "qk_head_dim": HEAD - 4, "qk_pos_emb_head_dim": 4,
        "v_head_dim": HEAD, "qk_layernorm": True, "attention_dropout": 0.0,
        "add_bias_linear": False, "experimental_attention_variant": "dsv4_hybrid",
        "csa_compress_ratios": [ratio], "o_groups": 2, "o_lora_rank": 6, "window_size": (5, 0),
        "softmax_type": "learnable", "dsa_indexer_n_heads": 6, "dsa_indexer_head_dim": 8,
        "dsa_indexer_topk": 2, "dsa_indexer_loss_coeff": 0.7, "use_cpu_initialization": True,
    }  # fmt: skip
    return MLATransformerConfig(**{**usual, **fields})


def built(config, groups):
    torch.manual_seed(3)
    spec = get_gpt_layer_local_spec(
        multi_latent_attention=True, qk_layernorm=True, kind=config.layer_kind(1)
    ).submodules.self_attention
    module = build_module(spec, config=config, layer_number=1, pg_collection=groups).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "position_bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def packed_of(documents):
    if documents is None:
        return None
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents]
    return PackedSeqParams(seq_idx=torch.stack(rows).int())


def outputs_and_gradients(groups, length, documents, ratio, fields):
    """Return this rank's output, its part of the input's gradient, the weights' sums, and the
    indexer's loss of the step."""
    size, rank = groups.cp.size(), groups.cp.rank()
    module = built(config_with(ratio, context_parallel_size=size, **fields), groups)
    made = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(length, BATCH, HIDDEN, generator=made).double() for _ in range(2))
    if size > 1:
        x, weight = (shard_sequence(t, 0, rank, size) for t in (x, weight))
    out, _ = module(x.requires_grad_(), None, packed_seq_params=packed_of(documents))
    (out * weight).sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    if size > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=groups.cp)
    finish_indexer_step([module], groups)
    loss = module.core_attention.indexer_loss
    return out.detach(), x.grad, gradients, 0.0 if loss is None else float(loss.step_loss)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("cp", "length", "documents", "ratio", "fields"),
    [
        (2, 20, None, 4, {}),
        (2, 12, ([5, 7], [1, 2, 9]), 4, {"dsa_indexer_use_sparse_loss": True}),
        (4, 24, ([3, 14, 7], [9, 15]), 3, {}),
        (2, 12, None, 16, {"csa_indexed_ratio": 16}),
        (2, 24, None, 3, {"csa_indexed_ratio": 3, "window_size": None}),
    ],
)
def test_outputs_loss_and_gradients_are_those_of_one_process(
    cp, length, documents, ratio, fields, monkeypatch
):
    case = (length, documents, ratio, fields)
    expected = outputs_and_gradients(ProcessGroupCollection.single(), *case)
    monkeypatch.setattr(compressed_attention, "BLOCK_ELEMENTS", 9 * 6 * BATCH)
    in_blocks = outputs_and_gradients(ProcessGroupCollection.single(), *case)
    found = run_distributed(outputs_and_gradients, cp, *case, cp=cp)
    for rank, size, (out, of_input, gradients, loss) in [
        (0, 1, in_blocks), *((rank, cp, result) for rank, result in enumerate(found))
    ]:  # fmt: skip
        mine = [t if size == 1 else shard_sequence(t, 0, rank, size) for t in expected[:2]]
        assert_close(out, mine[0], FP64_REORDERED_SUM, "output")
        assert_close(of_input, mine[1], FP64_REORDERED_SUM, "gradient of the input")
        assert loss == pytest.approx(expected[3], rel=1e-12)
        for name, gradient in gradients.items():
            assert_close(gradient, expected[2][name], FP64_REORDERED_SUM, f"gradient of {name}")


@pytest.mark.parametrize("ratio", [0, 3, 4])
def test_a_document_is_computed_as_if_it_were_alone(ratio):
    module = built(config_with(ratio), ProcessGroupCollection.single()).eval()
    lengths = [3, 14, 2, 9]
    x = torch.randn(sum(lengths), 1, HIDDEN, dtype=torch.float64)
    together, _ = module(x, None, packed_seq_params=packed_of([lengths]))
    alone = [module(part, None)[0] for part in x.split(lengths)]
    # Angles are fp32, and positions in the sample are not those in the document.
    assert_close(together, torch.cat(alone), FP32_REORDERED_SUM, "output")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"v_head_dim": 6}, "--v-head-dim 10 --kv-lora-rank 10"),
        ({"o_groups": 3}, "--o-groups"),
        ({"csa_compress_ratios": [4, 4]}, "--csa-compress-ratios"),
        ({"csa_compress_ratios": 1}, "0, or 2 and more"),
        ({"csa_compress_ratios": None}, "--csa-compress-ratios"),
        ({"qk_clip": True}, "drop --qk-clip"),
        ({"linear_attention_freq": 2}, "drop --linear-attention-freq"),
        ({"q_lora_rank": None}, "--q-lora-rank"),
        ({"dsa_indexer_topk": None}, "--dsa-indexer-topk"),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        config_with(4, **fields)


@pytest.mark.parametrize("compares_all", [True, False])
def test_the_loss_of_the_indexer_is_the_divergence_from_attention_to_entries(compares_all):
    fields = {"dsa_indexer_use_sparse_loss": not compares_all}
    module = built(config_with(4, **fields), ProcessGroupCollection.single())
    core, length, count = module.core_attention, 14, 3
    x = torch.randn(length, 1, HIDDEN, dtype=torch.float64)
    module(x, None)
    finish_indexer_step([module], ProcessGroupCollection.single())

    query, key, _, projected, index_query, weights, of_index, _, _ = (
        module.get_query_key_value_tensors(x)
    )
    windows = compressed_attention.Windows.of(length, 4, None, x.device)
    entries = core._entries(core.compressor, projected, windows)[:, 0]
    index_key = core._entries(core.indexer.linear_wk, of_index, windows)[:, 0]
    total = 0.0
    for t in range(3, length):
        seen = (t + 1) // 4
        scores = sum(
            weights[t, 0, j] * (index_key[:seen] @ index_query[t, 0, j]).relu() for j in range(6)
        )
        keys = torch.cat((entries[:seen], key[max(0, t - 5) : t + 1, 0, 0]))
        logits = (query[t, 0] @ keys.t()) * HEAD**-0.5
        compared = torch.arange(seen)
        if not compares_all:
            compared = scores.topk(min(2, seen)).indices
        target = torch.softmax(logits[:, compared], -1)  # the shares of the entries among them
        if not compares_all:
            is_seen = torch.ones(len(keys), dtype=torch.bool)
            is_seen[:seen] = False
            is_seen[compared] = True
            hidden = logits.masked_fill(~is_seen, float("-inf"))
            sink = core.softmax_offset.unsqueeze(1)
            target = torch.softmax(torch.cat((hidden, sink), 1), -1)[:, compared]
        target = target.sum(0) / target.sum()
        total += (target * (target.log() - torch.log_softmax(scores[compared], -1))).sum()
    assert count == len(entries)
    assert float(core.indexer_loss.step_loss) == pytest.approx(
        float(total.detach()) / length, rel=1e-10
    )
