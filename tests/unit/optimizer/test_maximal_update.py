"""muP: what each kind of parameter gets, and that activations move alike at every width."""

import math
from dataclasses import replace

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

BASE, HEAD, VOCABULARY, SEQUENCE = 32, 8, 64, 16


def model_of_width(width, *, uses_mup=True, **settings):
    rng_state().set_seed(3)
    config = TransformerConfig(
        num_layers=2, hidden_size=width, num_attention_heads=width // HEAD, init_method_std=0.1,
        hidden_dropout=0.0, attention_dropout=0.0, use_mup=uses_mup,
        mup_base_hidden_size=BASE if uses_mup else None, mup_base_head_dim=HEAD, **settings,
    )  # fmt: skip
    groups = ProcessGroupCollection.single()
    return GPTModel(
        config, get_gpt_decoder_block_spec(config, False), vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE, position_embedding_type="learned_absolute",
        pg_collection=groups,
    )  # fmt: skip


def rates_of(model, **settings):
    """Return the learning rate of each parameter, relative to the schedule's."""
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1.0, **settings), [model])
    rate = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    by_shard = {id(item.shard.parameter): rate[id(item.main_param)] for item in optimizer.shards}
    return {name: by_shard[id(p)] for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("settings", "hidden", "other"),
    [
        ({}, 1 / 4, 1.0),
        ({"optimizer": "lion"}, 1 / 4, 1.0),
        ({"optimizer": "sgd"}, 1.0, 4.0),
        ({"optimizer": "muon", "muon_scale_mode": "spectral"}, 1 / 4, 1.0),
        ({"optimizer": "muon", "muon_scale_mode": "unit_rms_norm"}, 1.0, 1.0),
    ],
)
def test_learning_rates_follow_the_kind_of_parameter(settings, hidden, other):
    for name, rate in rates_of(model_of_width(4 * BASE), **settings).items():
        is_hidden = ".linear_" in name and name.endswith(".weight") and "layer_norm" not in name
        assert rate == pytest.approx(hidden if is_hidden else other), name


def test_initial_values_shrink_with_the_width_in_hidden_weights_alone():
    usual, scaled = (model_of_width(4 * BASE, uses_mup=mup) for mup in (False, True))
    for (name, before), (_, after) in zip(
        usual.named_parameters(), scaled.named_parameters(), strict=True
    ):
        is_hidden = ".linear_" in name and name.endswith(".weight") and "layer_norm" not in name
        factor = 0.5 if is_hidden else 1.0
        assert torch.allclose(after, before * factor, atol=1e-6), name


def test_a_model_of_the_base_width_is_the_usual_one():
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(SEQUENCE).expand(2, -1)
    usual, scaled = (model_of_width(BASE, uses_mup=mup) for mup in (False, True))
    assert torch.equal(usual(tokens, positions, None), scaled(tokens, positions, None))


def moved(width, *, uses_mup, steps=3):
    """Train a few steps; return how far logits and the last hidden states have moved, rms."""
    model = model_of_width(width, uses_mup=uses_mup)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.02, weight_decay=0.0), [model])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (8, SEQUENCE), generator=generator)
    positions = torch.arange(SEQUENCE).expand(8, -1)
    states = []
    model.decoder.register_forward_hook(lambda module, given, out: states.append(out.detach()))

    def logits():
        with torch.no_grad():
            return model(tokens, positions, None)

    before = logits()
    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens, positions, None, labels=tokens.roll(-1, 1)).mean().backward()
        optimizer.step()
    after = logits()
    return [float((b - a).square().mean().sqrt()) for a, b in
            ((before, after), (states[0], states[-1]))]  # fmt: skip


def test_activations_move_alike_at_every_width():
    widths = (32, 64, 128, 256)
    scaled = [moved(width, uses_mup=True) for width in widths]
    usual = [moved(width, uses_mup=False) for width in widths]
    for at_each in zip(*scaled, strict=True):
        # Growth with the width as a power of it; noise is a few hundredths.
        slope = math.log(at_each[-1] / at_each[0]) / math.log(widths[-1] / widths[0])
        assert slope < 0.1, at_each
    logits = [of_width[0] for of_width in usual]
    assert math.log(logits[-1] / logits[0]) / math.log(widths[-1] / widths[0]) > 0.3, logits


def test_sizes_that_mean_nothing_are_refused():
    config = model_of_width(BASE).config
    with pytest.raises(ConfigError, match="mup_base_hidden_size=0"):
        replace(config, mup_base_hidden_size=0)
