"""--deepspeed_config: what a file says in flags, and where the two contradict each other."""

import json
from pathlib import Path

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.training.cli.dry_run import describe_run
from megatron.training.cli.parser import parse_command_line
from megatron_lattice import read_deepspeed_config

FILES = Path(__file__).parents[2] / "fixtures" / "deepspeed"


def parse(path, *words):
    words = ("--deepspeed", "--deepspeed_config", str(path), "--dry-run-world-size", "8", *words)
    return read(words).config


def read(words):
    return parse_command_line(words, deepspeed_reader=read_deepspeed_config)


def write(tmp_path, document):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(document))
    return path


def test_a_file_stands_for_flags():
    changed = parse(FILES / "zero1_bf16.json").changed()
    expected = {
        "bf16": True,
        "micro_batch_size": 4,
        "global_batch_size": 256,
        "use_distributed_optimizer": True,
        "data_parallel_sharding_strategy": "optim",
        "ddp_bucket_size": 500_000_000,
        "lr": 3e-4,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "log_interval": 10,
    }
    ours = ("deepspeed", "deepspeed_config", "dry_run_world_size")
    assert {n: v for n, v in changed.items() if n not in ours} == expected


def test_replicas_are_what_the_other_sizes_leave(tmp_path):
    path = write(tmp_path, {"train_batch_size": 16, "gradient_accumulation_steps": 2,
                            "tensor_parallel": {"autotp_size": 2}})  # fmt: skip
    flat = parse(path, "--pipeline-model-parallel-size", "2").flat()
    assert (flat["micro_batch_size"], flat["tensor_model_parallel_size"]) == (4, 2)


def test_schedule_becomes_flags(tmp_path):
    params = {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_max_lr": 0.01,
              "warmup_min_lr": 0.001, "warmup_type": "linear"}  # fmt: skip
    flat = parse(write(tmp_path, {"scheduler": {"type": "WarmupDecayLR", "params": params}})).flat()
    names = ("lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr", "min_lr")
    assert [flat[n] for n in names] == ["linear", 100, 10, 0.01, 0.001]


def test_flags_decide_what_is_auto():
    flat = parse(FILES / "zero3_all_auto.json", "--bf16", "--lr", "0.5").flat()
    assert (flat["bf16"], flat["lr"], flat["micro_batch_size"]) == (True, 0.5, None)
    assert flat["data_parallel_sharding_strategy"] == "optim_grads_params"


def test_conflicts_are_listed_together():
    with pytest.raises(ConfigError) as raised:
        parse(FILES / "zero1_bf16.json", "--lr", "0.1", "--micro-batch-size", "3", "--bf16")
    text = str(raised.value)
    assert "2 problems" in text
    assert (
        "--lr 0.1 conflicts with 0.0003" in text and "--micro-batch-size 3 conflicts with 4" in text
    )


def test_problems_of_the_file_stand_beside_those_of_the_command_line():
    with pytest.raises(ConfigError) as raised:
        parse(FILES / "onebit_adam.json", "--no-such-flag")
    text = str(raised.value)
    assert "4 problems" in text and "did you mean gradient_clipping?" in text


@pytest.mark.parametrize(
    ("document", "fix"),
    [
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}},
         "use WarmupLR"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}},
         '"warmup_type": "linear"'),
        ({"optimizer": {"type": "RMSprop"}}, "use AdamW"),
        ({"gradient_allreduce_op": "sum"}, "means over tokens"),
        ({"train_batch_size": 9}, "use train_batch_size 8 or 16"),
    ],
)  # fmt: skip
def test_what_the_loop_cannot_do_is_refused(tmp_path, document, fix):
    with pytest.raises(ConfigError, match="problem") as raised:
        parse(write(tmp_path, document))
    assert fix in str(raised.value)


@pytest.mark.parametrize(
    "words", [["--deepspeed"], ["--deepspeed_config", str(FILES / "zero1_bf16.json")]]
)
def test_the_two_flags_come_together(words):
    with pytest.raises(ConfigError, match="give both"):
        read(words)


def test_a_script_without_a_reader_refuses_a_file_and_names_the_argument():
    words = ["--deepspeed", "--deepspeed_config", str(FILES / "zero1_bf16.json")]
    with pytest.raises(ConfigError, match="deepspeed_reader=megatron_lattice"):
        parse_command_line(words)


def test_keys_without_effect_are_in_the_notes():
    words = ["--deepspeed", "--deepspeed_config", str(FILES / "zero2_fp16.json")]
    lines = read(words).notes
    assert any(line.startswith("activation_checkpointing.partition_activations") for line in lines)
    assert any("warm-up is linear" in line for line in lines)


def test_dry_run_shows_what_a_file_becomes():
    words = ["--deepspeed", "--deepspeed_config", str(FILES / "zero1_bf16.json")]
    words += ["--dry-run-world-size", "8", "--num-layers", "2", "--hidden-size", "64"]
    words += ["--num-attention-heads", "4", "--seq-length", "32", "--train-iters", "1"]
    words += ["--mock-data", "--tensor-model-parallel-size", "2"]
    report = describe_run(lambda: read(words))
    assert "--data-parallel-sharding-strategy optim" in report
    assert "global batch 128 = 8 micro batches x 4 samples x 4 replicas" in report


def test_auto_leaves_to_the_flags_what_a_schedule_is_not_defined_without(tmp_path):
    """The file that Transformers documents for a user who lets it fill in the numbers."""
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    rates = ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
    document = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": auto},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(rates, "auto")},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        **dict.fromkeys(
            ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size",
             "train_micro_batch_size_per_gpu"), "auto",
        ),
    }  # fmt: skip
    flags = ("--lr", "2e-4", "--train-iters", "70", "--lr-warmup-iters", "7")
    changed = parse(write(tmp_path, document), *flags, "--micro-batch-size", "3").changed()
    found = {name: changed[name] for name in ("lr", "lr_warmup_iters", "micro_batch_size")}
    assert found == {"lr": 2e-4, "lr_warmup_iters": 7, "micro_batch_size": 3}
    assert changed.get("lr_decay_style", "linear") == "linear"
    assert changed.get("lr_decay_iters", 70) == 70
