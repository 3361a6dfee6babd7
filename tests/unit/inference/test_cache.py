"""What is read from the cache is what would have been computed again."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.foundation.errors import ConfigError
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference_params import InferenceParams
from megatron.core.kernels.cpu.prepacked_weights import drop_prepacked, linear, prepack
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from megatron.inference.forward import CachedModel
from megatron.inference.sampling import Draw, Sampling
from tests.harness.tolerances import BF16_ROUNDED_ONCE, EXACT, FP32_REORDERED_SUM, assert_close

COMMON = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "init_method_std": 0.2,
    "use_cpu_initialization": True,
}
MODELS = {
    "learned positions": (TransformerConfig, {}, {"position_embedding_type": "learned_absolute"}),
    "grouped, normed heads": (
        TransformerConfig,
        {"num_query_groups": 2, "qk_layernorm": True, "normalization": "RMSNorm"},
        {},
    ),
    "gated heads": (
        TransformerConfig, {"num_query_groups": 2, "attention_output_gate": True}, {},
    ),
    "window": (TransformerConfig, {"window_size": (3, 0)}, {}),
    "sink, interleaved": (
        TransformerConfig,
        {"softmax_type": "learnable", "rotary_interleaved": True},
        {"rotary_percent": 0.5},
    ),
    "bounded, in turn with and without a window": (
        TransformerConfig,
        {"window_size": (3, 0), "window_attn_skip_freq": 2, "rotary_base_local": 100.0,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sandwich_norm": True},
        {},
    ),
    "states": (
        TransformerConfig,
        {"experimental_attention_variant": "gdn", "linear_attention_freq": 2,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
         "linear_value_head_dim": 5},
        {},
    ),
    "letters": (
        TransformerConfig,
        {"num_layers": 6, "hybrid_layer_pattern": "M*-MKS", "mamba_num_groups": 2,
         "mamba_num_heads": 4, "mamba_head_dim": 6, "mamba_state_dim": 5,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
         "linear_value_head_dim": 5},
        {},
    ),
    "latents": (
        MLATransformerConfig,
        {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4,
         "v_head_dim": 6, "multi_latent_attention": True},
        {},
    ),
    "chosen keys": (
        MLATransformerConfig,
        {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4,
         "v_head_dim": 6, "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 6,
         "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 4},
        {},
    ),
    "chosen pools": (
        MLATransformerConfig,
        {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 0,
         "v_head_dim": 6, "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 6,
         "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 3, "dsa_indexer_block_size": 3},
        {},
    ),
    "chosen blocks": (
        TransformerConfig,
        {"num_query_groups": 2, "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 2,
         "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 4, "dsa_indexer_block_size": 2,
         "dsa_indexer_local_blocks": 1},
        {},
    ),
}  # fmt: skip


def model(name):
    kind, fields, options = MODELS[name]
    rng_state().set_seed(5)
    config = kind(**COMMON | fields)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, pp_rank=0)
    return GPTModel(
        config,
        spec,
        vocab_size=64,
        max_sequence_length=32,
        pg_collection=ProcessGroupCollection.single(),
        **{"position_embedding_type": "rope", **options},
    ).eval()


def tokens(rows, length):
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_of_pieces_are_those_of_the_whole(name):
    gpt, ids = model(name), tokens(3, 12)
    whole = gpt(ids, None, None)
    cache = InferenceParams(3, 12)
    begin = 0
    for length in (5, 4, 1, 1, 1):
        positions = torch.arange(begin, begin + length).expand(3, length)
        piece = ids[:, begin : begin + length]
        logits = gpt(piece, positions, None, inference_params=cache)
        assert_close(logits, whole[:, begin : begin + length], FP32_REORDERED_SUM, "logits")
        cache.sequence_len_offset += length
        begin += length


@pytest.mark.parametrize(
    "name",
    [
        "learned positions",
        "window",
        "latents",
        "chosen keys",
        "chosen pools",
        "chosen blocks",
        "states",
        "letters",
    ],
)
@torch.no_grad()
def test_rows_may_be_at_places_of_their_own(name):
    gpt, ids = model(name), tokens(3, 12)
    whole = gpt(ids, None, None)
    cache = StaticInferenceContext(4, 12)
    cache.materialize_only_last_token_logits = True

    def step(rows, first, offsets, lengths):
        width = max(lengths)
        batch = torch.zeros(len(rows), width, dtype=torch.long)
        for place, (row, offset, n) in enumerate(zip(rows, offsets, lengths, strict=True)):
            batch[place, :n] = ids[row, offset : offset + n]
        positions = torch.tensor(offsets)[:, None] + torch.arange(width)
        cache.set_rows(first, offsets, lengths)
        got = gpt(batch, positions, None, inference_context=cache)
        assert got.shape[1] == 1
        for place, (row, offset, n) in enumerate(zip(rows, offsets, lengths, strict=True)):
            assert_close(got[place, 0], whole[row, offset + n - 1], FP32_REORDERED_SUM, "logits")

    step([0, 1], 0, [0, 0], [7, 3])  # prompts of two lengths, padded
    step([0, 1], 0, [7, 3], [1, 1])
    step([2], 2, [0], [5])  # one more joins
    step([0, 1, 2], 0, [8, 4, 5], [1, 1, 1])
    cache.move_row(2, 0, 6)  # the first ends, the last takes its place
    step([2, 1], 0, [6, 5], [1, 1])
    step([2, 1], 0, [7, 6], [2, 1])


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_give_the_same_product_until_they_change(dtype, num_rows):
    draw = torch.Generator().manual_seed(6)
    weight, bias = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((24, 16), (24,)))
    x = torch.randn(1, num_rows, 16, generator=draw).to(dtype)
    can = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with torch.no_grad():
        assert prepack(weight, is_for_one_row=num_rows == 1) == can
        tolerance = FP32_REORDERED_SUM if dtype == torch.float32 else BF16_ROUNDED_ONCE
        assert_close(linear(x, weight, bias), F.linear(x, weight, bias), tolerance, "product")
        weight.mul_(2)
        assert_close(linear(x, weight, None), F.linear(x, weight), EXACT, "product")
        drop_prepacked(weight)
        assert_close(linear(x, weight, bias), F.linear(x, weight, bias), EXACT, "product")


def test_more_than_the_cache_holds_is_refused():
    cache = StaticInferenceContext(2, 8)
    cache.sequence_len_offset = 5
    with pytest.raises(ConfigError, match=r"2 rows of 9 tokens for a cache of 2 rows of 8"):
        cache.enter(4, 2, torch.device("cpu"))


def test_log_probabilities_come_with_the_tokens():
    gpt, ids = model("learned positions"), tokens(2, 4)
    cached = CachedModel(
        gpt, vocab_size=60, max_rows=2, max_length=8, groups=ProcessGroupCollection.single()
    )
    draws = [Draw(Sampling(temperature=1.0), row, 4) for row in range(2)]
    chosen, logprobs = cached.next_tokens(
        ids.tolist(), draws, first_row=0, offsets=[0, 0], num_top_logprobs=3
    )
    with torch.no_grad():
        expected = gpt(ids, None, None)[:, -1, :60].log_softmax(-1)
    for row in range(2):
        first, *best = logprobs[row]
        assert first[0] == chosen[row]
        assert [token for token, _ in best] == expected[row].topk(3).indices.tolist()
        got = torch.tensor([value for _, value in logprobs[row]])
        assert_close(
            got, expected[row][[token for token, _ in logprobs[row]]], FP32_REORDERED_SUM, "logits"
        )
