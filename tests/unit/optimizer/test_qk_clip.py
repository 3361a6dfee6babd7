"""QK-Clip against the formula: which heads, which rows, by how much."""

import math
from dataclasses import replace

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.foundation.errors import ConfigError
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.qk_clip import factors_of_range
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, assert_close
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.training_case import SEQUENCE, VOCABULARY, build_chunks, transformer_config

ALPHA = 0.3
LAYOUT = LayoutCase()


def one_step(family, threshold, optimizer="adam", dtype=torch.float32, **settings):
    """Take a step; return weights, the heads' largest logits by layer, and the optimizer."""
    rng_state().set_seed(5)
    model = ModelCase(family, False, 0.0, largest_logit=threshold)
    config = replace(transformer_config(LAYOUT, model), params_dtype=dtype,
                     bf16=dtype == torch.bfloat16, log_max_attention_logit=True)  # fmt: skip
    groups = ProcessGroupCollection.single()
    (chunk,) = build_chunks(config, model, LAYOUT, groups)
    largest = {}

    def measure(core, inputs, output):
        query, key = (x.detach().float() for x in inputs[:2])
        key = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) * core.softmax_scale
        s = len(query)
        hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
        found = scores.masked_fill(hidden, -math.inf).amax((0, 2, 3))
        before = largest.get(core.layer_number, found)
        largest[core.layer_number] = torch.maximum(before, found)

    for layer in chunk.decoder.layers:
        layer.self_attention.core_attention.register_forward_hook(measure)
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(), chunk, pg_collection=groups
    )
    chosen = OptimizerConfig(optimizer=optimizer, lr=1e-3, bf16=config.bf16, **settings)
    optimizer = get_megatron_optimizer(chosen, [ddp], pg_collection=groups)
    ddp.zero_grad_buffer()
    for sample in range(2):
        tokens = torch.randint(
            VOCABULARY, (1, SEQUENCE), generator=torch.Generator().manual_seed(sample)
        )
        positions = torch.arange(SEQUENCE).unsqueeze(0)
        ddp(tokens, positions, None, labels=tokens).mean().backward()
    ddp.finish_grad_sync()
    assert optimizer.step()[0]
    weights = {n: p.detach().float().clone() for n, p in chunk.named_parameters()}
    return weights, largest, optimizer, config


def expected(weights, largest, threshold, config):
    """Scale rows one by one."""
    weights = {name: weight.clone() for name, weight in weights.items()}
    for number, logits in largest.items():
        prefix = f"decoder.layers.{number - 1}.self_attention."
        gamma = [min(1.0, threshold / float(logit)) for logit in logits]
        if config.multi_latent_attention:
            d, p, e = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
            for head, factor in enumerate(gamma):
                query = weights[prefix + "linear_q_up_proj.weight"]
                query[head * (d + p) : head * (d + p) + d] *= factor**ALPHA
                query[head * (d + p) + d : (head + 1) * (d + p)] *= factor
                key = weights[prefix + "linear_kv_up_proj.weight"]
                key[head * (d + e) : head * (d + e) + d] *= factor ** (1 - ALPHA)
            continue
        per_group, d = len(gamma) // config.num_query_groups, config.kv_channels
        for group in range(config.num_query_groups):
            factor = min(gamma[group * per_group : (group + 1) * per_group])
            first = group * (per_group + 2) * d
            for kind in ("weight", "bias"):
                rows = weights.get(f"{prefix}linear_qkv.{kind}")
                if rows is not None:
                    rows[first : first + per_group * d] *= factor**ALPHA
                    rows[first + per_group * d : first + (per_group + 1) * d] *= factor ** (
                        1 - ALPHA
                    )
    return weights


@pytest.mark.parametrize("family", ["gpt2", "llama", "latent"])
def test_rows_of_heads_above_the_threshold_are_scaled(family):
    free, largest, optimizer, config = one_step(family, None)
    highest = sorted(float(logit) for logits in largest.values() for logit in logits)
    assert optimizer.attention_logits.largest == pytest.approx(highest[-1], rel=1e-5)
    threshold = highest[len(highest) // 2]  # half of the heads are above it
    clipped, *_ = one_step(family, threshold)
    for name, weight in expected(free, largest, threshold, config).items():
        assert_close(clipped[name], weight, FP32_REORDERED_SUM, name)
    assert any(not clipped[name].equal(free[name]) for name in free)


def test_heads_below_the_threshold_are_left_alone():
    free, *_ = one_step("llama", None)
    clipped, *_ = one_step("llama", 1e4)
    for name, weight in free.items():
        assert_close(clipped[name], weight, EXACT, name)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_main_weights_are_scaled_with_those_of_the_model(is_streamed):
    settings = {"use_precision_aware_optimizer": is_streamed}
    _, _, free, _ = one_step("llama", None, dtype=torch.bfloat16, **settings)
    weights, _, clipped, _ = one_step("llama", 0.01, dtype=torch.bfloat16, **settings)
    ratios = []
    for before, after in zip(free.shards, clipped.shards, strict=True):
        main = after.main_param.detach()
        held = clipped.state[after.main_param].get("fp32_param", main)
        name = after.shard.name.removeprefix("module.")
        assert_close(held.view(-1).bfloat16().float(), weights[name].view(-1), EXACT, name)
        if name.endswith("linear_qkv.weight"):
            ratios.append(_norm(after) / _norm(before))
    assert len(ratios) == 12 and max(ratios) < 0.95


def _norm(item):
    return float(item.shard.values.detach().float().norm())


def test_factors_of_rows_reach_any_range_of_a_flattened_weight():
    rows = torch.arange(1.0, 6.0)
    full = rows.repeat_interleave(3)
    for begin in range(15):
        for end in range(begin, 16):
            assert factors_of_range(rows, begin, end, 15).equal(full[begin:end])


@pytest.mark.parametrize(("name", "value"), [("threshold", 0.0), ("alpha", 1.5)])
def test_a_share_or_a_bound_that_means_nothing_is_refused(name, value):
    config = transformer_config(LAYOUT, ModelCase("llama", False, 0.0))
    with pytest.raises(ConfigError, match=f"qk_clip_{name}={value}"):
        replace(config, qk_clip=True, **{f"qk_clip_{name}": value})
