"""Chunks of keys, the factor of queries without positions, weights on the input of experts."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.metrics.flops import forward_flops_per_token
from megatron.training.metrics.model_size import ModelSize
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

VOCAB, LENGTH = 64, 13


def make_model(**fields):
    config = TransformerConfig(
        **{
            "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "no_rope_freq": [0, 1], **fields,
        }
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=LENGTH, position_embedding_type="rope"
    ).eval()


LOCAL = {
    "attention_chunk_size": 5, "window_attn_skip_freq": [1, 0], "qk_l2_norm": True,
    "query_scale_beta": 0.7, "query_scale_interval": 3,
    "query_scale_without_rope": True,
}  # fmt: skip


def test_the_attention_of_a_layer_is_the_formula():
    model = make_model(**LOCAL)
    x, at = torch.randn(LENGTH, 1, 16), torch.arange(LENGTH)
    angles = model._rotary_args(LENGTH)["rotary_pos_emb"].squeeze(1)
    for layer, attention in enumerate(block.self_attention for block in model.decoder.layers):
        packed = attention.linear_qkv(x)[0].view(LENGTH, 2, 4, 4)
        q, k, v = packed[:, :, :2].flatten(1, 2), packed[:, :, 2], packed[:, :, 3]
        hidden = at[None] > at[:, None]
        if layer == 0:
            q, k = (
                t * angles.cos() + torch.cat((-t[..., 2:], t[..., :2]), -1) * angles.sin()
                for t in (q, k)
            )
            q, k = (t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() for t in (q, k))
            hidden = hidden | (at[None] // 5 != at[:, None] // 5)
        else:
            q = q * (1 + 0.7 * torch.log(1.0 + (at + 1) // 3))[:, None, None]
        scores = torch.einsum("snd,tnd->nst", q, k.repeat_interleave(2, 1)) / 2
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = torch.einsum("nst,tnd->snd", weights, v.repeat_interleave(2, 1)).reshape(-1, 16)
        found, _ = attention(x, None, **model._rotary_args(LENGTH))
        proj = attention.linear_proj
        assert_close(found[:, 0], expected @ proj.weight.T, FP32_REORDERED_SUM, f"layer {layer}")


def test_documents_are_cut_by_chunks_and_count_their_own_positions():
    model, ids = make_model(**LOCAL), torch.randint(VOCAB, (2, LENGTH))
    seq_idx = torch.tensor([[0] * 9 + [1] * 4, [0] * 3 + [4] * 10])
    together = model(ids, None, None, packed_seq_params=PackedSeqParams(seq_idx=seq_idx))
    for row, begin, end in ((0, 0, 9), (0, 9, 13), (1, 0, 3), (1, 3, 13)):
        alone = model(ids[row : row + 1, begin:end], None, None)
        assert_close(together[row, begin:end], alone[0], FP32_REORDERED_SUM, f"{row}, {begin}")


@torch.no_grad()
def test_tokens_one_by_one_give_the_logits_of_the_whole_sequence():
    model, ids = make_model(**LOCAL), torch.randint(VOCAB, (2, LENGTH))
    context = StaticInferenceContext(2, LENGTH)
    for position, expected in enumerate(model(ids, None, None).unbind(1)):
        found = model(ids[:, position : position + 1], None, None, inference_context=context)
        context.sequence_len_offset += 1
        assert_close(found[:, 0], expected, FP32_REORDERED_SUM, f"position {position}")


def test_an_expert_reads_the_token_times_its_weight():
    fields = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}
    model = make_model(**fields, moe_apply_probs_on_input=True, num_layers=1, no_rope_freq=None)
    layer, x = model.decoder.layers[0].mlp, torch.randn(LENGTH, 1, 16)
    probs, chosen = layer.router(x)
    expected = torch.zeros(LENGTH, 16)
    for token, row in enumerate(x[:, 0]):
        for expert in chosen.view(LENGTH, -1)[token].nonzero().flatten().tolist():
            part = layer.experts.local_experts[expert]
            share = probs.view(LENGTH, -1)[token, expert]
            expected[token] += part.linear_fc2.weight @ F.gelu(
                part.linear_fc1.weight @ (row * share)
            )
    assert_close(layer(x)[0][:, 0], expected, FP32_REORDERED_SUM, "experts of weighted inputs")


@pytest.mark.parametrize(("chunk", "length"), [(5, 13), (4, 12), (20, 13)])
def test_the_keys_of_chunks_are_counted(chunk, length):
    def scores(**fields):
        config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, **fields)
        size = ModelSize(config=config, vocab_size=VOCAB, seq_length=length)
        return forward_flops_per_token(size), 2 * 2 * size.score_width

    full, per_key = scores()
    local, _ = scores(attention_chunk_size=chunk)
    # Half of the diagonal counts, as without chunks.
    of_chunk = sum(i % chunk + 0.5 for i in range(length)) / length
    assert full - local == pytest.approx(per_key * (length / 2 - of_chunk))
