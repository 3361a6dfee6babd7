"""Generated text is the same in every layout, and stops where it should."""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.inference.generate import generate
from megatron.inference.sampling import Sampling
from tests.harness.distributed import run_distributed

VOCABULARY = 93
CONTEXT = 32
PROMPTS = [[5, 17, 3], [11], [80, 2, 2, 9, 41]]


def tiny_gpt(
    groups,
    num_chunks=1,
    sequence_parallel=False,
    num_query_groups=None,
    schedule="1f1b",
    num_experts=None,
):
    pp, tp = groups.pp.size(), groups.tp.size()
    rng_state().set_seed(42)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=num_query_groups,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_schedule=schedule,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        sequence_parallel=sequence_parallel,
        context_parallel_size=groups.cp.size(),
        pipeline_dtype=torch.float32,
        num_moe_experts=num_experts,
        expert_model_parallel_size=groups.ep.size(),
        moe_token_dispatcher_type="alltoall",
        # Wide enough that the most likely token is not a matter of rounding.
        init_method_std=0.5,
    )
    rank, layout = groups.pp.rank(), pipeline_layout(config)
    return [
        GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=num_experts),
            vocab_size=96,
            max_sequence_length=CONTEXT,
            pre_process=layout.has_embedding(rank, chunk),
            post_process=layout.has_loss(rank, chunk),
            pg_collection=groups,
            vp_stage=chunk if num_chunks > 1 else None,
        )
        for chunk in range(num_chunks)
    ]


def continue_prompts(
    groups,
    sampling,
    num_chunks=1,
    sequence_parallel=False,
    eod=None,
    schedule="1f1b",
    num_experts=None,
):
    return generate(
        tiny_gpt(groups, num_chunks, sequence_parallel, None, schedule, num_experts),
        PROMPTS,
        max_new_tokens=8,
        vocab_size=VOCABULARY,
        max_sequence_length=CONTEXT,
        sampling=sampling,
        eod=eod,
        pg_collection=groups,
    )


def raised_by(groups, prompts, max_new_tokens):
    with pytest.raises(ConfigError) as caught:
        generate(
            tiny_gpt(groups),
            prompts,
            max_new_tokens=max_new_tokens,
            vocab_size=VOCABULARY,
            max_sequence_length=CONTEXT,
            pg_collection=groups,
        )
    return str(caught.value)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=20, seed=3)])
def test_every_layout_writes_the_same_text(sampling):
    (serial,) = run_distributed(continue_prompts, 1, sampling)
    assert [row[: len(p)] for row, p in zip(serial, PROMPTS, strict=True)] == PROMPTS
    assert [len(row) for row in serial] == [len(p) + 8 for p in PROMPTS]
    assert max(map(max, serial)) < VOCABULARY
    for size, arguments, layout in (
        (2, (), {"tp": 2}),
        (2, (1, True), {"tp": 2}),
        (4, (), {"tp": 2, "pp": 2}),
        (2, (2,), {"pp": 2, "vp": 2}),
        (2, (2, False, None, "zb-v"), {"pp": 2, "vp": 2}),
        (4, (1, True), {"tp": 2, "cp": 2}),
    ):
        results = run_distributed(continue_prompts, size, sampling, *arguments, **layout)
        assert results == [serial] * size, layout


def test_experts_on_ranks_of_their_own_write_the_same_text():
    arguments = (Sampling(), 1, False, None, "1f1b", 4)
    (serial,) = run_distributed(continue_prompts, 1, *arguments)
    (dense,) = run_distributed(continue_prompts, 1, Sampling())
    assert serial != dense
    for size, layout in ((2, {"ep": 2}), (4, {"tp": 2, "ep": 2}), (4, {"pp": 2, "ep": 2})):
        results = run_distributed(continue_prompts, size, *arguments, **layout)
        assert results == [serial] * size, layout


def test_a_row_ends_before_the_end_of_document_token():
    (free,) = run_distributed(continue_prompts, 1, Sampling())
    eod = free[0][len(PROMPTS[0]) + 4]
    (ended,) = run_distributed(continue_prompts, 1, Sampling(), 1, False, eod)
    for prompt, row, whole in zip(PROMPTS, ended, free, strict=True):
        new = whole[len(prompt) :]
        assert row == prompt + (new[: new.index(eod)] if eod in new else new)


@pytest.mark.parametrize(
    ("prompts", "max_new_tokens", "message"),
    [
        ([[1], []], 4, "empty"),
        ([[1] * 30], 4, "use at most --max-new-tokens 2"),
        ([[1, 93]], 4, "93 is outside the vocabulary of 93"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(prompts, max_new_tokens, message):
    assert message in run_distributed(raised_by, 1, prompts, max_new_tokens)[0]


def tokens_and_tokens_without_a_cache(groups, layout):
    model = tiny_gpt(groups, layout.get("chunks", 1), num_query_groups=layout.get("groups"))
    options = {"max_new_tokens": 8, "vocab_size": VOCABULARY, "max_sequence_length": CONTEXT}
    return [
        generate(model, PROMPTS, **options, pg_collection=groups, **way)
        for way in ({"uses_cache": False}, {"max_rows": 2}, {"max_rows": 1})
    ]


@pytest.mark.parametrize(
    ("size", "layout", "settings"),
    [
        (1, {}, {}),
        (4, {"tp": 4}, {"groups": 2}),  # ranks that share a group of keys
        (2, {"pp": 2, "vp": 2}, {"chunks": 2}),
    ],
)
def test_neither_the_cache_nor_the_batch_changes_the_text(size, layout, settings):
    for ways in run_distributed(tokens_and_tokens_without_a_cache, size, settings, **layout):
        assert ways[0] == ways[1] == ways[2]


def refusal_of_a_cache(groups):
    with pytest.raises(ConfigError) as caught:
        generate(
            tiny_gpt(groups, sequence_parallel=True), PROMPTS, max_new_tokens=2,
            vocab_size=VOCABULARY, max_sequence_length=CONTEXT, uses_cache=True,
            pg_collection=groups,
        )  # fmt: skip
    return str(caught.value)


def test_ranks_that_share_the_sequence_have_no_cache():
    for message in run_distributed(refusal_of_a_cache, 2, tp=2):
        assert "build the model without them to generate" in message
