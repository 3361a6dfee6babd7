"""Small models of Transformers with every special feature on, and ours built from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from megatron.core.dist_checkpointing.loader import load_state
from megatron.core.dist_checkpointing.validation import parse_strict_handling
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.sharded_state import sharded_state_dict_of
from megatron.core.transport.object_collectives import SingleProcess
from megatron.hugging_face import open_model, read_model_directory
from megatron.hugging_face.reading import full_name
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.resolve import resolve
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

VOCAB, LENGTH = 97, 24
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
_NEOX = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 64, "layer_norm_eps": 1e-6,
}  # fmt: skip
_LATENT = {
    **_SIZES, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "n_routed_experts": 8,
    "n_shared_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip

_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
_GLM = {
    **_SIZES, "head_dim": 16, "pad_token_id": None, "eos_token_id": 2, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
_BESIDE_SHARED = {
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 4, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64,
         "bos_token_id": 1, "eos_token_id": 2, "layer_norm_epsilon": 1e-6},
    ),
    "gpt2, untied, another width": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64,
         "n_inner": 96, "tie_word_embeddings": False, "activation_function": "gelu",
         "bos_token_id": 1, "eos_token_id": 2},
    ),
    "llama": ("LlamaConfig", {**_SIZES, "rope_theta": 5000.0}),
    "llama 3.1, tied": (
        "LlamaConfig",
        {**_SIZES, "max_position_embeddings": 32768, "tie_word_embeddings": True,
         "rope_parameters": _LLAMA3_ROPE},
    ),
    "llama, interpolated": (
        "LlamaConfig",
        {**_SIZES, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "mistral, sliding window": ("MistralConfig", {**_SIZES, "sliding_window": 7, "head_dim": 32}),
    "qwen2, tied": ("Qwen2Config", {**_SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 32}),
    "phi3, partly rotated": (
        "Phi3Config",
        {**_SIZES, "sliding_window": 9, "partial_rotary_factor": 0.5, "pad_token_id": None,
         "bos_token_id": 1, "eos_token_id": 2, "original_max_position_embeddings": 64},
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {**_NEOX, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0,
                                      "partial_rotary_factor": 0.25}},
    ),
    "gpt_neox, one after the other, tied": (
        "GPTNeoXConfig",
        {**_NEOX, "use_parallel_residual": False, "tie_word_embeddings": True,
         "hidden_act": "gelu_fast"},
    ),
    "gemma2": (
        "Gemma2Config",
        {**_SIZES, "pad_token_id": None, "head_dim": 32, "query_pre_attn_scalar": 24,
         "sliding_window": 7,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**_SIZES, "pad_token_id": None, "head_dim": 32, "query_pre_attn_scalar": 24,
         "sliding_window": 7,
         "final_logit_softcapping": 3.0,
         "layer_types": ["sliding_attention", "full_attention", "full_attention",
                         "sliding_attention"],
         "rope_parameters": {
             "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}},
    ),
    "mixtral": (
        "MixtralConfig",
        {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    ),
    "qwen3 with experts": (
        "Qwen3MoeConfig",
        {**_SIZES, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3,
         "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "qwen3 with experts, not normed": (
        "Qwen3MoeConfig",
        {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "norm_topk_prob": False},
    ),
    "qwen2, stretched": (
        "Qwen2Config",
        {**_SIZES, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
            "original_max_position_embeddings": 16}},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**_SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
         "sliding_window": 7, "swiglu_limit": 0.5, "rope_parameters": {
             "rope_type": "yarn", "factor": 4.0, "rope_theta": 150000.0, "truncate": False,
             "beta_fast": 4.0, "original_max_position_embeddings": 16}},
    ),
    "deepseek v2": (
        "DeepseekV2Config",
        {**_LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3,
         "num_experts_per_tok": 4, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
         "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.5}},
    ),
    "deepseek v2 lite, tied": (
        "DeepseekV2Config",
        {**_LATENT, "topk_method": "greedy", "q_lora_rank": None, "num_experts_per_tok": 3,
         "n_group": 1, "topk_group": 1, "tie_word_embeddings": True},
    ),
    "deepseek v3": (
        "DeepseekV3Config",
        {**_LATENT, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1,
         "routed_scaling_factor": 2.5, "first_k_dense_replace": 2, "rope_parameters": _YARN},
    ),
    "deepseek v3.2": (
        "DeepseekV32Config",
        {**_LATENT, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1,
         "routed_scaling_factor": 2.5, "first_k_dense_replace": 2, "rope_parameters": _YARN,
         # So many heads that no key has a score of zero, of which any may be chosen there.
         "index_n_heads": 16, "index_head_dim": 12, "index_topk": 6, "pad_token_id": None},
    ),
    "glm with chosen keys": (
        "GlmMoeDsaConfig",
        {**_LATENT, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4,
         "n_shared_experts": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
         "index_n_heads": 16, "index_head_dim": 12, "index_topk": 6, "pad_token_id": None},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        # As of qwen3_next, an epsilon that heads with nearly no output stand.
        {**_LATENT, "rms_norm_eps": 1e-1, "q_lora_rank": None, "n_routed_experts": None,
         "num_local_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
         "n_shared_experts": 1, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
         "linear_head_dim": 16, "linear_num_heads": 4, "layer_types": [
             "linear_attention", "linear_attention", "full_attention", "linear_attention"]},
    ),
    "gemma": ("GemmaConfig", {**_SIZES, "pad_token_id": None, "head_dim": 32}),
    "glm": ("GlmConfig", {**_GLM, "attention_bias": True}),
    "glm4": ("Glm4Config", {**_GLM, "attention_bias": False}),
    "glm4 with experts": (
        "Glm4MoeConfig",
        {**_GLM, **_BESIDE_SHARED, "attention_bias": True, "use_qk_norm": True},
    ),
    "dots1": (
        "Dots1Config",
        {**_SIZES, **_BESIDE_SHARED, "norm_topk_prob": True, "sliding_window": 7,
         "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "seed_oss": (
        "SeedOssConfig",
        {**_SIZES, "head_dim": 32, "attention_dropout": 0.0, "pad_token_id": None},
    ),
    "ernie4_5": ("Ernie4_5Config", {**_SIZES, "head_dim": 32, "pad_token_id": None}),
    "smollm3": (
        "SmolLM3Config",
        {**_SIZES, "no_rope_layers": [1, 0, 1, 0], "pad_token_id": None},
    ),
    "cwm": ("CwmConfig", {**_SIZES, "head_dim": 16, "sliding_window": 7,
                          "rope_parameters": _LLAMA3_ROPE}),
    "ministral": (
        "MinistralConfig",
        {**_SIZES, "head_dim": 16, "sliding_window": 7, "rope_parameters": _PLAIN_ROPE,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "arcee": ("ArceeConfig", {**_SIZES, "head_dim": 32}),
    "stablelm": (
        "StableLmConfig",
        {**_SIZES, "use_qkv_bias": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ),
    "nemotron": (
        "NemotronConfig",
        {**_SIZES, "head_dim": 32, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "qwen2 with experts": (
        "Qwen2MoeConfig",
        {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 48, "norm_topk_prob": False},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        # Heads are normed after the recurrence: where their output is nearly zero, a small epsilon
        # would make rounding errors large, here and there.
        {**_SIZES, "rms_norm_eps": 1e-2, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
         "layer_types": ["linear_attention", "linear_attention", "full_attention",
                         "linear_attention"],
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
         "linear_value_head_dim": 20},
    ),
    "mamba2": (
        "Mamba2Config",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_heads": 8,
         "head_dim": 16, "n_groups": 4, "state_size": 12, "time_step_limit": (0.01, 0.9)},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {"vocab_size": VOCAB, "pad_token_id": None, "hidden_size": 64, "intermediate_size": 96,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "mamba_num_heads": 8, "mamba_head_dim": 12,
         "n_groups": 4, "ssm_state_size": 10, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
         "moe_latent_size": 24, "routed_scaling_factor": 2.5,
         "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]},
    ),
    "bamba": (
        "BambaConfig",
        {**_SIZES, "rms_norm_eps": 1e-2, "pad_token_id": None, "attn_layer_indices": [2],
         "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12},
    ),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64,
         "n_inner": 96, "layer_norm_epsilon": 1e-6, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "starcoder2": ("Starcoder2Config", {**_SIZES, "sliding_window": 7}),
}  # fmt: skip
"""Name -> config class of Transformers and its arguments."""


def their_model(case: str) -> Any:
    """Build a model of Transformers with random weights, norms and biases included."""
    kind, fields = CASES[case]
    config = getattr(transformers, kind)(**fields)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # A channel of a convolution has four taps, not the width of the model.
                parameter.normal_(0, 0.5 if "conv1d" in name else 0.08)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model.eval()


def saved(case: str, directory: Path) -> Any:
    """Build such a model, save it in `directory`, and return it."""
    model = their_model(case)
    model.save_pretrained(directory)
    return model


def flags_for(directory: Path) -> list[str]:
    """Return the command line that starts from a model, with a dropout of 0."""
    return [
        "--load-hf", str(directory), "--seq-length", str(LENGTH), "--micro-batch-size", "1",
        "--hidden-dropout", "0", "--attention-dropout", "0", "--transformer-impl", "local",
        "--train-iters", "1", "--lr", "1e-3", "--mock-data", "--tokenizer-type", "NullTokenizer",
    ]  # fmt: skip


def our_model(
    directory: Path, groups: ProcessGroupCollection | None = None, *words: str
) -> tuple[GPTModel, dict[str, Any]]:
    """Build this rank's part of the model that the settings of a directory describe, and load it.

    Args:
        groups: of this rank; None is one process.
        words: further flags, of the layout for example.
    """
    groups = groups or ProcessGroupCollection.single()
    stage, num_stages = groups.pp.rank(), groups.pp.size()
    tp = groups.tp.size()
    config = parse_command_line([*flags_for(directory), *words]).config
    run = resolve(config, world_size=tp * num_stages * groups.dp_cp.size())
    run = run.overlaid({"unpadded_vocab_size": run.tokenizer.vocab_size})
    transformer = run.transformer_config
    model = GPTModel(
        transformer,
        get_gpt_decoder_block_spec(transformer, use_transformer_engine=False, pp_rank=stage),
        vocab_size=-(-run.tokenizer.vocab_size // (128 * tp)) * 128 * tp,
        max_sequence_length=run.model.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == num_stages - 1,
        share_embeddings_and_output_weights=not run.model.untie_embeddings_and_output_weights,
        position_embedding_type=run.model.position_embedding_type,
        rotary_base=run.latent_attention.rotary_base,
        rotary_percent=run.model.rotary_percent,
        seq_len_interpolation_factor=run.model.rotary_seq_len_interpolation_factor,
        rope_scaling=run.model.use_rope_scaling,
        rope_scaling_factor=run.model.rope_scaling_factor,
        pg_collection=groups,
    )
    load_state(
        sharded_state_dict_of(model, pg_collection=groups),
        open_model(directory),
        peers=SingleProcess(),
        strict=parse_strict_handling("raise_unexpected"),
    )
    return model, {**run.values}


def compare_gradients(directory: Path, theirs: Any, ours: Mapping[str, Tensor]) -> float:
    """Compare every gradient of a model with that of the same model here.

    Args:
        theirs: the model of Transformers, after backward.
        ours: our names -> gradients of the one-device model.
    Returns:
        the largest error, relative to the largest gradient of its tensor, or to a hundredth of the
        model's: some are zero in theory.
    Raises:
        AssertionError: a gradient differs, or one of theirs was compared with none.
    """
    names = dict(theirs.named_parameters())
    if "lm_head.weight" in names:
        names.setdefault("embed_out.weight", names["lm_head.weight"])  # so GPT-NeoX's file has it
    buffers = dict(theirs.named_buffers())
    # Nemotron-H calls its model `model`, and `backbone` in files.
    for found in (names, buffers):
        # Qwen2.5-VL's module has its files' names with another folder before.
        found |= {n.removeprefix("model."): found[n] for n in [*found] if ".visual." in n}
        found |= {
            n.replace("language_model.", "", 1): found[n]
            for n in [*found]
            if n.startswith("model.language_model.")
        }
        found |= {
            n.replace("model.", "backbone.", 1): found[n] for n in [*found] if n[:6] == "model."
        }
    model = read_model_directory(directory)
    geometry = model.settings.geometry
    prefix = model.family.prefixes[0]
    compared, worst = 0, 0.0
    trained = {id(p) for p in theirs.parameters() if p.grad is not None}
    largest = max(float(p.grad.abs().max()) for p in theirs.parameters() if id(p) in trained)
    for rule in model.family.rules(model.settings):
        for mine, others in rule.names(geometry):
            if any(_of_module(full_name(name, prefix)) in buffers for name in others):
                continue
            mine = mine.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            mine = mine.replace("self_attention.in_proj.layer_norm_", "input_layernorm.")
            mine = mine.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
            frozen = [p for n in others if (p := names.get(full_name(n, prefix))) is not None
                      and id(p) not in trained]  # fmt: skip
            if frozen:
                assert ours[mine] is None, mine
                compared += sum(p.numel() for p in frozen)
                continue
            grads = [_gradient(names, full_name(n, prefix)) for n in others]
            grads = [g.flatten() if any(rule.unit_dims) else g for g in grads]
            if rule.is_transposed:
                grads = [g.transpose(-1, -2) for g in grads]
            mine_whole = _our_gradient(ours, mine, rule.num_experts)
            if rule.num_blocks is not None:
                grads = [_in_blocks(grads[0], rule.num_blocks)]
            for rows in rule.row_map(geometry, [len(g) for g in grads]):
                part = grads[rows.source].narrow(0, rows.begin, rows.length)
                own = mine_whole.narrow(0, rows.megatron_begin, rows.length)
                assert_close(own, part, FP32_REORDERED_SUM, mine)
                scale = max(float(grads[rows.source].abs().max()), largest / 100)
                error = float((own - part).abs().max()) / scale
                compared, worst = compared + part.numel(), max(worst, error)
    assert compared == sum(p.numel() for p in theirs.parameters())
    return worst


def _in_blocks(theirs: Tensor, num_blocks: int) -> Tensor:
    """Return [e, rows, ...], rows of the blocks in turn, with blocks and experts above others."""
    return theirs.unflatten(1, (-1, num_blocks)).transpose(1, 2).flatten(0, 2)


_EXPERT = re.compile(r"(.*)\.(block_sparse_moe|mlp|mixer)\.experts\.(\d+)\.(\w+)\.weight")
_HALF = {"w1": 0, "gate_proj": 0, "w3": 1, "up_proj": 1}


def _gradient(names: Mapping[str, Any], name: str) -> Tensor:
    """Return the gradient of a tensor of their files: modules hold all experts in one tensor."""
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        layer, number, part = expert[1], int(expert[3]), expert[4]
        if expert[2] == "mixer":  # without a gate
            return names[f"{layer}.mixer.experts.{part}"].grad[number]
        if part not in _HALF:
            return names[f"{layer}.mlp.experts.down_proj"].grad[number]
        both = names[f"{layer}.mlp.experts.gate_up_proj"].grad[number]
        return both.chunk(2)[_HALF[part]]
    of_convolution = re.fullmatch(r"(.*)\.([qkv])_conv1d\.weight", name)
    if of_convolution is not None:
        joined = names[f"{of_convolution[1]}.conv1d.weight"].grad
        return joined.chunk(3)["qkv".index(of_convolution[2])]
    return names[_of_module(name)].grad


def _of_module(name: str) -> str:
    """Return what the modules of Mixtral and Kimi Linear call a tensor of their files."""
    name = re.sub(r"self_attn\.(A_log|dt_bias|f_[ab]_proj)", r"self_attn.forget_gate.\1", name)
    return name.replace("block_sparse_moe", "mlp")


def _our_gradient(ours: Mapping[str, Tensor], name: str, num_experts: int | None) -> Tensor:
    """Return our gradient, experts above each other."""
    if num_experts is None:
        return ours[name]
    before, after = name.split("experts.experts.")
    forms = (before + "experts.local_experts.{}." + after, before + "experts." + after + "{}")
    form = next(form for form in forms if form.format(0) in ours)
    return torch.cat([ours[form.format(number)] for number in range(num_experts)])
