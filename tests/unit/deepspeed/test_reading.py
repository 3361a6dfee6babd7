"""What a configuration may say, and how it is told that it may not."""

import base64
import json

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron_lattice.deepspeed.reading import collect, load_document, read_settings
from megatron_lattice.deepspeed.settings import (
    data_parallel_config,
    engine_settings,
    optimizer_config,
    resolve_batch,
)


def message(document, **options):
    with pytest.raises(ConfigError) as raised:
        engine_settings(document, replicas=2, **options)
    return str(raised.value)


def test_all_problems_stand_in_one_message_with_their_paths():
    text = message(
        {
            "train_batch_size": 9,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 5, "reduce_bucket": 1e8, "overlap_comm": "yes"},
            "fp16": {"enabled": True, "hysteresis": 0},
            "bf16": {"enabled": True},
            "optimiser": {},
        }
    )
    assert "7 problems" in text
    for part in (
        "zero_optimization.stage: 5",
        "did you mean reduce_bucket_size?",
        'zero_optimization.overlap_comm: "yes"',
        "fp16.hysteresis: 0",
        "fp16.enabled and bf16.enabled",
        "did you mean optimizer?",
        "train_batch_size 9 is not",
    ):
        assert part in text


def test_key_in_the_wrong_section_is_found_in_its_own():
    assert "did you mean zero_optimization.overlap_comm?" in message({"overlap_comm": True})
    assert "did you mean gradient_clipping?" in message(
        {"zero_optimization": {"gradient_clipping": 1.0}}
    )


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((None, None, None), (2, 1, 1)),
        ((32, None, None), (32, 16, 1)),
        ((32, 4, None), (32, 4, 4)),
        ((32, None, 4), (32, 4, 4)),
        ((None, 4, 4), (32, 4, 4)),
        ((None, 4, None), (8, 4, 1)),
        ((None, None, 3), (6, 1, 3)),
        ((32, 4, 4), (32, 4, 4)),
    ],
)
def test_two_batch_sizes_give_the_third(given, sizes):
    found = resolve_batch(*given, replicas=2)
    assert (found.train, found.micro, found.accumulation) == sizes
    named = [number for number in given if number is not None]
    assert list(found.sources.values()).count("given") == len(named)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((9, 2, 2), "use train_batch_size 8, or drop one"),
        ((9, 2, None), "use train_batch_size 8 or 12"),
        ((1, None, None), "use train_batch_size 2"),
        ((9, None, 2), "train_batch_size 9 cannot be divided by gradient_accumulation_steps 2"),
    ],
)
def test_batch_sizes_that_do_not_fit_come_with_ones_that_do(given, wanted):
    with pytest.raises(ConfigError) as raised:
        resolve_batch(*given, replicas=2)
    assert wanted in str(raised.value)


def test_source_is_a_mapping_a_file_or_base64(tmp_path):
    document = {"train_batch_size": 4}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(document))
    packed = base64.urlsafe_b64encode(json.dumps(document).encode()).decode()
    assert load_document(document) == load_document(path) == load_document(packed) == document


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"train_batch_size": 4,}', "line 1, column"),
        ("[]", "holds a list"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "'enabled' appears twice"),
    ],
)
def test_bad_file_is_refused_with_its_place(tmp_path, text, reason):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_document(path)


def test_missing_file_is_refused():
    with pytest.raises(ConfigError, match="no file"):
        load_document("nowhere/ds.json")


def test_refused_key_at_its_default_asks_for_nothing():
    off = {"offload_param": {"device": "none"}, "zero_hpz_partition_size": 1}
    _, problems = collect({"zero_optimization": off, "autotuning": {"enabled": False}})
    assert problems == []


def test_keys_without_effect_are_named_once():
    found = read_settings({"memory_breakdown": True, "comms_logger": {"enabled": True}})
    assert set(found.without_effect) == {"memory_breakdown", "comms_logger.enabled"}


def test_shard_groups_become_instances():
    settings = engine_settings(
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, replicas=8
    )
    assert data_parallel_config(settings).num_distributed_optimizer_instances == 4
    assert "shard groups must have equal sizes" in message(
        {"zero_optimization": {"stage": 3, "mics_shard_size": 3}}
    )


def test_quantized_gradients_become_compression():
    settings = engine_settings(
        {"zero_optimization": {"stage": 1, "zero_quantized_gradients": True}}, replicas=2
    )
    assert data_parallel_config(settings).grad_compression == "int8"


@pytest.mark.parametrize(
    ("section", "rule", "decoupled"),
    [
        ({"type": "Adam"}, "adam", True),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "adam", False),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, "adam", True),
        ({"type": "Lion", "params": {"lr": 1e-4}}, "lion", True),
        ({"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9}}, "muon", True),
        ({"type": "SGD", "params": {"lr": 0.1}}, "sgd", True),
    ],
)
def test_optimizer_types(section, rule, decoupled):
    config = optimizer_config(engine_settings({"optimizer": section}, replicas=2))
    assert (config.optimizer, config.decoupled_weight_decay) == (rule, decoupled)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"optimizer": {"type": "AdmW"}}, "did you mean Adam"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "learning_rate"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "a list of 2 numbers"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer has no type"),
        ({"scheduler": {"type": "WarmupLr"}}, "did you mean WarmupLR?"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "cycle_min_lr is missing"),
        ({"tensor_parallel": {"autotp_size": 2}}, "--tensor-model-parallel-size 2"),
        ({"amp": {"enabled": True}}, 'use "bf16"'),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "use fp32 or fp32"),
    ],
)
def test_what_cannot_be_is_refused(section, reason):
    assert reason in message(section)
