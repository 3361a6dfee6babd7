"""`--load-hf` in several layouts: the losses of one process; `--save-hf` gives the model back."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_AFTER_OPTIMIZER, FP32_REORDERED_SUM, assert_close
from tests.parity.training_run import read_metrics, train_with_flags
from tests.unit.hugging_face.models import flags_for, saved, their_model
from tests.unit.hugging_face.quantized_models import make

FLAGS = (
    "--global-batch-size 4 --micro-batch-size 1 --train-iters 3 --lr 1e-3 --adam-eps 1e-5"
    " --num-workers 0 --log-interval 1"
)
LAYOUTS = {
    "gpt2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
                " --sequence-parallel", {"tp": 2, "pp": 2}),
    "gemma3": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
                  " --sequence-parallel", {"tp": 2, "pp": 2}),
    "qwen3": (2, "--use-distributed-optimizer", {}),
}  # fmt: skip


FEW_BITS = {
    "block FP8": (2, "--tensor-model-parallel-size 2 --sequence-parallel"
                     " --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
                     " --moe-router-bias-update-rate 0", {"tp": 2, "ep": 2, "expt_tp": 1}),
    "INT4 with zero points": (2, "--tensor-model-parallel-size 2", {"tp": 2}),
    "INT4 in groups": (2, "--expert-model-parallel-size 2 --use-distributed-optimizer"
                          " --data-parallel-sharding-strategy optim_grads_params", {"ep": 2}),
    "NVFP4, compressed-tensors": (2, "--pipeline-model-parallel-size 2", {"pp": 2}),
    "MXFP4": (2, "--tensor-model-parallel-size 2 --sequence-parallel", {"tp": 2}),
}  # fmt: skip


def train(directory, tmp_path, name, world_size=1, flags="", **layout):
    """Train three steps from the model; return the losses and the exported weights."""
    metrics, out = tmp_path / f"{name}.jsonl", tmp_path / f"{name}-out"
    words = [
        *flags_for(directory), *FLAGS.split(), *flags.split(), "--metrics-jsonl", str(metrics),
        "--save", str(tmp_path / f"{name}-save"), "--save-hf", str(out),
    ]  # fmt: skip
    run_distributed(train_with_flags, world_size, words, timeout_s=240.0, **layout)
    losses = [line["lm loss"] for line in read_metrics(metrics)]
    return losses, load_file(out / "model.safetensors")


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_published_model_goes_on_training_in_other_layouts(case, tmp_path):
    saved(case, tmp_path / "model")
    expected, weights = train(tmp_path / "model", tmp_path, "one")
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert before.keys() == weights.keys()
    assert not all(torch.equal(before[name], weights[name]) for name in before)
    world_size, flags, layout = LAYOUTS[case]
    losses, found = train(tmp_path / "model", tmp_path, "many", world_size, flags, **layout)
    assert_close(losses, expected, FP32_REORDERED_SUM, "losses")
    assert found.keys() == weights.keys()
    for tensor in weights:
        assert_close(found[tensor], weights[tensor], FP32_AFTER_OPTIMIZER, tensor)


@pytest.mark.parametrize("name", FEW_BITS)
def test_weights_in_few_bits_are_the_same_weights_in_every_layout(name, tmp_path):
    make(name, tmp_path)
    world_size, flags, layout = FEW_BITS[name]
    flags += " --bf16 --lr 0 --min-lr 0 --train-iters 1"
    _, found = train(tmp_path / "quantized", tmp_path, "many", world_size, flags, **layout)
    expected = load_file(tmp_path / "dense" / "model.safetensors")
    assert found.keys() == expected.keys()
    for tensor in expected:
        assert torch.equal(found[tensor].bfloat16(), expected[tensor]), tensor
    config = json.loads((tmp_path / "many-out" / "config.json").read_text())
    assert "quantization_config" not in config


def test_a_half_precision_model_is_trained_and_written_in_the_precision_that_is_said(tmp_path):
    model = tmp_path / "model"
    their_model("llama").bfloat16().save_pretrained(model)
    said, written = {}, {}
    for name, flags in {
        "": "", "in fp32": "--save-hf-dtype fp32", "in bf16": "--save-hf-dtype bf16",
        "in fp16": "--save-hf-dtype fp16", "in fp8": "--save-hf-dtype fp8-block",
        "trained in bf16": "--bf16",
    }.items():  # fmt: skip
        out = tmp_path / f"{name}-out"
        words = [
            *flags_for(model), *FLAGS.split(), *flags.split(), "--train-iters", "1",
            "--save", str(tmp_path / f"{name}-save"), "--save-hf", str(out),
        ]  # fmt: skip
        (said[name],) = run_distributed(train_with_flags, 1, words, timeout_s=240.0)
        written[name] = load_file(out / "model.safetensors")
        stored = {str(value.dtype).removeprefix("torch.") for value in written[name].values()}
        config = json.loads((out / "config.json").read_text())
        if name == "in fp8":
            assert stored == {"float8_e4m3fn", "float32", "bfloat16"}
            assert config["quantization_config"]["weight_block_size"] == [128, 128]
            assert f"wrote a llama model in float8_e4m3fn to {out}" in said[name]
            continue
        assert stored == {config.get("dtype", config.get("torch_dtype"))}, name
        assert f"wrote a llama model in {stored.pop()} to {out}" in said[name]
    assert "stored as bfloat16 and trained in float32; --bf16" in said[""]
    assert "trained in float32" not in said["trained in bf16"]
    for name, dtype in {
        "": torch.float32, "in fp32": torch.float32, "in bf16": torch.bfloat16,
        "in fp16": torch.float16,
    }.items():  # fmt: skip
        for key, value in written[""].items():
            assert torch.equal(written[name][key], value.to(dtype)), (name, key)
