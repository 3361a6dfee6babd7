"""Weights through mbridge, as it is published: Transformers -> layers here -> Transformers' names.

On four CPU ranks two calls of CUDA have stand-ins, and the config has the attributes of the release
of Transformers that the library was written for.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron.core import mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

S, B, V = 16, 2, 64
SHAPE = {
    "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    "head_dim": 8, "attention_dropout": 0.0, "tie_word_embeddings": False,
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SHAPE, **ROUTED, num_experts=4, norm_topk_prob=True
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4}, **ROUTED, n_routed_experts=4, n_shared_experts=1,
        n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_nextn_predict_layers=0,
    ),
}  # fmt: skip
CHANGED = {
    # The library leaves the weights of the chosen experts as they are; Mixtral's sum to one.
    "mixtral": {"moe_router_pre_softmax": False},
}


class FormerConfig:
    """A config as Transformers 4 has it: rotary settings are attributes, `in` asks for one."""

    def __init__(self, config: transformers.PreTrainedConfig) -> None:
        self._config = config
        self.rope_theta = config.rope_parameters["rope_theta"]
        self.rope_scaling = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._config, name)

    def __contains__(self, name: str) -> bool:
        return getattr(self, name, None) is not None


def tokens() -> torch.Tensor:
    return torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(3))


def logits_of(models: list[torch.nn.Module]) -> torch.Tensor | None:
    """Run the pipeline: logits [b, s, v] on the last stage, None on the others."""
    outputs = []

    def step(_iterator, model):
        output = model(tokens(), torch.arange(S)[None].expand(B, -1), None)
        return output, lambda out: (outputs.append(out) or torch.zeros(()), {})

    for model in models:
        model.eval()
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step, data_iterator=None, model=models, num_microbatches=1,
            seq_length=S, micro_batch_size=B, forward_only=True,
        )  # fmt: skip
    if not outputs:
        return None
    group = mpu.get_tensor_model_parallel_group()
    parts = [torch.empty_like(outputs[0]) for _ in range(group.size())]
    torch.distributed.all_gather(parts, outputs[0].contiguous(), group=group)
    return torch.cat(parts, -1)


def through_mbridge(_groups, family, directory):
    """Load a directory of Transformers and export it: logits, and the exported weights."""
    # It imports every model of Transformers that it knows: seconds that only the ranks spend.
    from mbridge import AutoBridge
    from mbridge.core.safetensor_io import SafeTensorIO

    with (
        patch("torch.cuda.current_device", lambda: "cpu"),
        patch.object(torch.nn.Module, "cuda", lambda module, *_: module),
    ):
        config = FormerConfig(transformers.AutoConfig.from_pretrained(directory))
        bridge = AutoBridge.from_config(config, dtype=torch.float32)
        bridge.set_extra_args(**CHANGED.get(family, {}))
        # Its reader of DeepSeek's FP8 files puts tensors on a GPU; these files are in fp32.
        bridge._get_safetensor_io = SafeTensorIO
        models = bridge.get_model(weight_path=directory, bf16=False)
        with torch.no_grad():
            exported = {name: weight.clone() for name, weight in bridge.export_weights(models)}
        return logits_of(models), exported


@pytest.mark.filterwarnings("default:Apex is not installed:UserWarning")
@pytest.mark.parametrize(
    ("family", "experts"),
    [
        *(("llama", {}), ("qwen2", {}), ("mixtral", {"ep": 2, "expt_tp": 1})),
        *(("qwen3_moe", {"ep": 2, "expt_tp": 1}), ("qwen3_moe", {"expt_tp": 2})),
        ("deepseek_v3", {"ep": 2, "expt_tp": 1}),
    ],
)
def test_a_model_keeps_its_logits_and_weights_through_mbridge(family, experts, tmp_path: Path):
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1:  # norms and biases begin with ones and zeros, which hide errors
                tensor.uniform_(0.5, 1.5) if "norm" in name else tensor.uniform_(-0.1, 0.1)
        expected = model(tokens()).logits
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    results = run_distributed(
        through_mbridge, 4, family, str(tmp_path), timeout_s=120, tp=2, pp=2, **experts
    )
    for logits, exported in results:
        assert exported.keys() == stored.keys()
        assert all(torch.equal(exported[name], stored[name]) for name in stored)
        if logits is not None:
            assert_close(logits, expected, FP32_REORDERED_SUM, family)
    assert sum(logits is not None for logits, _ in results) == 2
