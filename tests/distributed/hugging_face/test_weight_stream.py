"""The stream of weights is what `--save-hf` writes, to the bit, in every layout."""

import pytest
import torch
from safetensors.torch import load_file

from megatron.hugging_face.weight_stream import stream_weights
from megatron.training import get_args
from pretrain_gpt import forward_step
from tests.harness.distributed import run_distributed
from tests.harness.live_memory import LiveMemory
from tests.parity.training_run import train_with_flags
from tests.unit.hugging_face.models import flags_for, saved

FLAGS = "--global-batch-size 4 --micro-batch-size 1 --train-iters 1 --num-workers 0"
LAYOUTS = {
    "gpt2": (2, "--tensor-model-parallel-size 2 --bf16", {"tp": 2}),
    "llama 3.1, tied": (
        4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
           " --num-layers-per-virtual-pipeline-stage 1", {"tp": 2, "pp": 2, "vp": 2}),
    "qwen3 with experts": (
        4, "--expert-model-parallel-size 2 --use-distributed-optimizer"
           " --data-parallel-sharding-strategy optim_grads_params --bf16", {"ep": 2}),
    "deepseek v3": (
        4, "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4"
           " --expert-tensor-parallel-size 1 --use-distributed-optimizer", {"tp": 2, "ep": 4,
                                                                            "expt_tp": 1}),
    "qwen2, tied": (2, "--tensor-model-parallel-size 2 --lora-rank 4 --use-dora", {"tp": 2}),
    "mixtral": (
        2, "--expert-model-parallel-size 2 --lora-rank 4"
           " --lora-target-modules linear_qkv experts.linear_fc1 experts.linear_fc2", {"ep": 2}),
    "gpt_oss": (
        2, "--pipeline-model-parallel-size 2", {"pp": 2}),
}  # fmt: skip
BUCKET_BYTES = {"gpt_oss": 250_000, "mixtral": 250_000}
"""Of each case, 60 kB but where a tensor is larger."""


def streamed(groups, words, path, bucket_bytes):
    """Train a step, then compare the stream with the files; return what was held besides."""
    chunks = []

    def step(iterator, model):
        if all(model is not chunk for chunk in chunks):
            chunks.append(model)
        return forward_step(iterator, model)

    train_with_flags(groups, words, step)
    written = load_file(path)
    largest = max(tensor.numel() * tensor.element_size() for tensor in written.values())
    assert largest < bucket_bytes * 7 // 8
    names, num_buckets = [], 0
    with LiveMemory() as memory:
        for bucket in stream_weights(chunks, vars(get_args()), bucket_bytes=bucket_bytes):
            num_buckets += 1
            for name, tensor in bucket.items():
                names.append(name)
                assert tensor.dtype == written[name].dtype, name
                assert torch.equal(tensor, written[name]), name
        peak = memory.peak
    assert sorted(names) == sorted(written)
    return num_buckets, peak


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_stream_is_what_an_export_writes(case, tmp_path):
    saved(case, tmp_path / "model")
    world_size, flags, layout = LAYOUTS[case]
    words = [
        *flags_for(tmp_path / "model"), *FLAGS.split(), *flags.split(),
        "--save", str(tmp_path / "save"), "--save-hf", str(tmp_path / "out"),
    ]  # fmt: skip
    file, bucket_bytes = tmp_path / "out" / "model.safetensors", BUCKET_BYTES.get(case, 60_000)
    for num_buckets, peak in run_distributed(
        streamed, world_size, words, file, bucket_bytes, timeout_s=240.0, **layout
    ):
        assert num_buckets > 3
        # Merging adapters holds copies of the one parameter besides.
        assert bucket_bytes < peak <= (3 if "lora" in flags else 2) * bucket_bytes
