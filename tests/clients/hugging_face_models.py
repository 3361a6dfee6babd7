"""Small random models of Transformers, and the logits of the same models in layers from here.

It runs under the releases 4 and 5 of Transformers, of which each library wants one.
"""

from pathlib import Path

import torch
import transformers

from megatron.core import mpu
from megatron.core.pipeline_parallel import get_forward_backward_func

S, B, V = 16, 2, 64
SHAPE = {
    "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    "head_dim": 8, "attention_dropout": 0.0, "tie_word_embeddings": False,
}  # fmt: skip
YARN = {
    "type": "yarn", "rope_type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = SHAPE | ROUTED | {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_nextn_predict_layers": 0, "scoring_func": "sigmoid",
}  # fmt: skip
SHARED = ROUTED | {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "num_nextn_predict_layers": 0,
}  # fmt: skip
HALF_ROTATED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# Heads are normed after the recurrence: a small epsilon would make rounding errors large where
# their output is nearly zero.
LINEAR = SHAPE | {
    "rms_norm_eps": 1e-1, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 16,
}  # fmt: skip
DENSE_FIRST = ["dense", "sparse", "sparse", "sparse"]
FAMILIES = {
    "llama": ("LlamaConfig", SHAPE),
    "qwen2": ("Qwen2Config", SHAPE),
    "qwen3": ("Qwen3Config", SHAPE),
    "mixtral": ("MixtralConfig", SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig", SHAPE | ROUTED | {"num_experts": 4, "norm_topk_prob": True},
    ),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "deepseek_v3, yarn": ("DeepseekV3Config", LATENT | {"rope_scaling": YARN}),
    "mistral": ("MistralConfig", SHAPE | {"sliding_window": 7}),
    "gemma": ("GemmaConfig", SHAPE | {"pad_token_id": None, "tie_word_embeddings": True}),
    "glm4_moe": ("Glm4MoeConfig", SHAPE | SHARED | {
        "attention_bias": True, "use_qk_norm": True, "rope_parameters": HALF_ROTATED}),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        LATENT | {"routed_scaling_factor": 1.8, "mlp_layer_types": DENSE_FIRST,
                  "rms_norm_eps": 1e-6},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4,
                 "rope_parameters": HALF_ROTATED},
    ),
    "hy_v3": (
        "HYV3Config",
        SHAPE | ROUTED | {"num_experts": 4, "num_shared_experts": 1, "router_scaling_factor": 2.5,
                          "first_k_dense_replace": 1, "mlp_layer_types": DENSE_FIRST},
    ),
    "olmoe": ("OlmoeConfig", SHAPE | {
        "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7,
                 "initial_context_length": 4096},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR),
}  # fmt: skip
"""Family -> the class of its config, and its arguments."""


def tokens() -> torch.Tensor:
    """Return the ids [b, s] that all models see."""
    return torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(3))


def save_model(family: str, directory: Path) -> torch.Tensor:
    """Write a random model to `directory` and return its logits [b, s, v] for `tokens()`."""
    kind, arguments = FAMILIES[family]
    torch.manual_seed(5)
    config = getattr(transformers, kind)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1:  # norms and biases begin with ones and zeros, which hide errors
                tensor.uniform_(0.5, 1.5) if "norm" in name else tensor.uniform_(-0.1, 0.1)
        logits: torch.Tensor = model(tokens()).logits
    model.save_pretrained(directory)
    return logits


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
