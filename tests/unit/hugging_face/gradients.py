"""Compare the gradients of a model of Transformers with those of the same model here."""

import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.hugging_face import read_model_directory
from megatron.hugging_face.reading import full_name
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close


def compare_gradients(
    directory: Path, theirs: Any, ours: Mapping[str, Tensor], *, reads_images: bool = False
) -> float:
    """Compare every gradient of a model with that of the same model here.

    Args:
        theirs: the model of Transformers, after backward.
        ours: our names -> gradients of the one-device model; of a frozen parameter None, zeros or
            nothing.
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
        found |= {f"language_model.{n}": found[n] for n in [*found]}  # MiniMax M3's files
        found |= {
            n.replace("model.", "backbone.", 1): found[n] for n in [*found] if n[:6] == "model."
        }
    model = read_model_directory(directory, reads_images=reads_images)
    prefix = model.family.prefixes[0]
    compared, worst = 0, 0.0
    largest = max(float(p.grad.abs().max()) for p in theirs.parameters() if p.grad is not None)
    for rule in model.family.rules(model.settings):
        for mine, others in rule.names(model.settings):
            mine = mine.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            mine = mine.replace("self_attention.in_proj.layer_norm_", "input_layernorm.")
            mine = mine.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
            in_modules = [_of_module(full_name(name, prefix), names) for name in others]
            known = [names[name] for name in in_modules if name in names]
            if any(name in buffers for name in in_modules) or any(
                not parameter.requires_grad for parameter in known
            ):
                continue
            has_none = rule.num_experts is None and ours.get(mine) is None
            if known and (has_none or any(p.grad is None for p in known)):
                assert all(map(_is_zero, [ours.get(mine), *(p.grad for p in known)])), mine
                compared += sum(p.numel() for p in known)
                continue
            grads = [_gradient(names, full_name(n, prefix)) for n in others]
            grads = [g.flatten() if any(rule.unit_dims) else g for g in grads]
            if rule.is_transposed:
                grads = [g.transpose(-1, -2) for g in grads]
            mine_whole = _our_gradient(ours, mine, rule.num_experts)
            if rule.num_blocks is not None:
                grads = [_in_blocks(torch.cat(grads, 1), rule.num_blocks)]
            for rows in rule.row_map(model.settings, [len(g) for g in grads]):
                part = grads[rows.source].narrow(0, rows.begin, rows.length)
                own = mine_whole.narrow(0, rows.megatron_begin, rows.length)
                assert_close(own, part, FP32_REORDERED_SUM, mine)
                scale = max(float(grads[rows.source].abs().max()), largest / 100)
                error = float((own - part).abs().max()) / scale
                compared, worst = compared + part.numel(), max(worst, error)
    # Where Transformers has no class of the language model, the encoder of images is not read.
    of_images = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.")
    left_out = of_images if model.family.around else ()
    assert compared == sum(
        parameter.numel()
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad and not name.startswith(left_out)
    )
    return worst


def _is_zero(gradient: Tensor | None) -> bool:
    """Whether a parameter learns nothing; of a frozen one there may be no gradient, or zeros."""
    return gradient is None or not bool(gradient.any())


def _in_blocks(theirs: Tensor, num_blocks: int) -> Tensor:
    """Return [e, rows, ...], rows of the blocks in turn, with blocks and experts above others."""
    return theirs.unflatten(1, (-1, num_blocks)).transpose(1, 2).flatten(0, 2)


_EXPERT = re.compile(
    r"(.*)\.(block_sparse_moe|mlp|feed_forward|ffn|mixer)\.experts\.(\d+)\.(\w+)\.weight"
)
_HALF = {"w1": 0, "gate_proj": 0, "w3": 1, "up_proj": 1}


def _gradient(names: Mapping[str, Any], name: str) -> Tensor:
    """Return the gradient of a tensor of their files: modules hold all experts in one tensor."""
    # Mistral Large 4:
    name = re.sub(r"^(layers\.\d+)\.experts\.", r"model.language_model.\1.mlp.experts.", name)
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        layer, number, part = expert[1], int(expert[3]), expert[4]
        if expert[2] == "mixer":  # without a gate
            return names[f"{layer}.mixer.experts.{part}"].grad[number]
        joined = f"{layer}.{'feed_forward' if expert[2] == 'feed_forward' else 'mlp'}.experts"
        if part not in _HALF:
            return names[f"{joined}.down_proj"].grad[number]
        return names[f"{joined}.gate_up_proj"].grad[number].chunk(2)[_HALF[part]]
    of_all = re.fullmatch(r"(.*)\.moe\.(gate|up)_proj\.weight", name)
    if of_all is not None:
        both = names[f"{of_all[1]}.mlp.experts.gate_up_proj"].grad
        return both.chunk(2, 1)[of_all[2] == "up"]
    of_pair = re.fullmatch(r"(.*)\.(gate|up)_proj\.weight", name)
    if of_pair is not None and _of_module(f"{of_pair[1]}.gate_up_proj.weight", names) in names:
        joined = names[_of_module(f"{of_pair[1]}.gate_up_proj.weight", names)].grad
        return joined.chunk(2)[of_pair[2] == "up"]
    of_convolution = re.fullmatch(r"(.*)\.([qkv])_conv1d\.weight", name)
    if of_convolution is not None:
        joined = names[_of_module(f"{of_convolution[1]}.conv1d.weight", names)].grad
        return joined.chunk(3)["qkv".index(of_convolution[2])]
    joined_in_file = re.fullmatch(r"(.*\.)(query_key_value|linear_attn\.in_proj)(\.\w+)", name)
    if joined_in_file is not None and _of_module(name, names) not in names:
        before, part, kind = joined_in_file.groups()
        apart = (f"{before}{one}{kind}" for one in _JOINED[part])
        return torch.cat([names[_of_module(one, names)].grad for one in apart])
    return names[_of_module(name, names)].grad


_JOINED = {
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "linear_attn.in_proj": [f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")],
}
"""Tensor in files of Sarvam or Lara -> the tensors in the modules."""
_RENAMED = {
    "block_sparse_moe": "mlp", "mlp.moe_statics.": "mlp.gate.moe_statics.",
    ".post_mlp_layernorm.": ".mlp.post_mlp_layernorm.",
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    ".linear_gate.": ".gate_proj.", ".learnable_sink_param": ".sinks",
    "attention_sink_bias": "sinks", "self_attn.softmax_offset": "self_attn.sinks",
    ".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm.",
    ".linear_attn.out_norm.": ".linear_attn.norm.",
    ".hc_pre.hc_attn_layer.hc_": ".attn_hc.", ".hc_pre.hc_mlp_layer.hc_": ".ffn_hc.",
    ".hc_pre.hc_head.hc_head_": ".hc_head.hc_",
}  # fmt: skip
"""Part of a name in files -> part of the module's name."""
_OF_GRANITE = {"input_linear.weight": "experts.gate_up_proj", "output_linear.weight":
               "experts.down_proj", "router.layer.weight": "router.weight"}  # fmt: skip


_OF_MISTRAL_LARGE = {
    r"^output\.": "lm_head.",
    r"^tok_embeddings\.": "model.language_model.embed_tokens.",
    r"^(layers|norm)\.": r"model.language_model.\1.",
    r"\.attention\.wq\.": ".self_attn.q_proj.",
    r"\.attention\.wo\.": ".self_attn.o_proj.",
    r"\.wkv_b\.": ".kv_b_proj.",
    r"\.wkv_a_with_mqa\.": ".kv_a_proj_with_mqa.",
    r"\.kv_a_norm\.": ".kv_a_layernorm.",
    r"\.attention_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"ssmax_scaling\.s$": "softmax_scaling.scale",
    r"ssmax_scaling\.b$": "softmax_scaling.bias",
    r"(layers\.\d+)\.attention\.": r"\1.self_attn.",
    r"(layers\.\d+)\.(gate|shared_experts)\.": r"\1.mlp.\2.",
    r"\.feed_forward\.": ".mlp.",
    r"\.w1\.": ".gate_proj.",
    r"\.w2\.": ".down_proj.",
    r"\.w3\.": ".up_proj.",
}
"""Pattern of a name in files of Mistral Large 4 -> name in the modules."""
_PATTERNS = {
    r"^lerope\.alpha": "model.language_model.rotary_emb.alpha",
    r"^(model\.layers\.\d+)\.attention\.": r"\1.self_attn.",
    r"self_attn\.dense": "self_attn.o_proj",
    r"self_attn\.(A_log|dt_bias|f_([ab]_)?proj)": r"self_attn.forget_gate.\1",
    r"^model\.word_embeddings": "model.embed_tokens",
    r"mlp\.router\.gate": "mlp.gate",
    r"mlp\.shared_mlp": "mlp.shared_experts",
    r"mlp\.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    r"mlp\.gate\.expert_bias": "mlp.gate.e_score_correction_bias",
    r"mlp\.expert_bias": "mlp.e_score_correction_bias",
    r"mlp\.experts\.e_score_correction_bias": "mlp.gate.e_score_correction_bias",  # Laguna
    r"mlp\.shared_expert\.": "mlp.shared_experts.",
    r"\.moe\.router_bias": ".mlp.gate.e_score_correction_bias",  # Step 3.5
    r"\.moe\.gate\.": ".mlp.gate.",
    r"\.moe\.down_proj\.weight": ".mlp.experts.down_proj",
    r"\.share_expert\.": ".mlp.shared_experts.",
    # DeepSeek V4:
    r"^head\.": "lm_head.",
    r"\.attn\.": ".self_attn.",
    r"\.ffn\.": ".mlp.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"(layers\.\d+)\.hc_(attn|ffn)_": r"\1.\2_hc.",
    r"\.attn_sink$": ".sinks",
    r"self_attn\.indexer\.(compressor\.)?": "self_attn.compressor.indexer.",
    r"indexer\.weights_proj": "indexer.scorer.weights_proj",
    r"(self_attn|compressor|indexer)\.norm\.": r"\1.kv_norm.",
    r"\.q_norm\.": ".q_a_norm.",
    r"\.ape$": ".position_bias",
    r"\.w([qo])_([ab])\.": r".\1_\2_proj.",
    r"\.wkv\.": ".kv_proj.",
    r"\.wgate\.": ".gate_proj.",
    r"\.gate\.bias$": ".gate.e_score_correction_bias",
    r"shared_experts\.w1": "shared_experts.gate_proj",
    r"shared_experts\.w2": "shared_experts.down_proj",
    r"shared_experts\.w3": "shared_experts.up_proj",
}
"""Pattern of a name in files of HY 3, K-EXAONE, Kimi Linear, Ling or DeepSeek V4 -> name in the
modules."""


def _of_module(name: str, names: Container[str]) -> str:
    """Return the name of a tensor in the modules of Transformers, given its name in files.

    Args:
        names: the names in the modules; a name that is among them has no other one.
    """
    if name.startswith("language_model."):  # MiniMax M3's files
        name = name.replace(".index_", ".indexer.").replace("moe.e_score_", "moe.gate.e_score_")
    if name in names:
        return name
    known = name
    for pattern, module in _OF_MISTRAL_LARGE.items():
        known = re.sub(pattern, module, known)
    if known in names:
        return known
    before, found, rest = name.partition("block_sparse_moe.")
    if rest in _OF_GRANITE:
        return before + found + _OF_GRANITE[rest]
    for pattern, module in _PATTERNS.items():
        name = re.sub(pattern, module, name)
    for written, in_module in _RENAMED.items():
        name = name.replace(written, in_module)
    return name


def _our_gradient(ours: Mapping[str, Tensor], name: str, num_experts: int | None) -> Tensor:
    """Return our gradient, experts above each other."""
    if num_experts is None:
        return ours[name]
    before, after = name.split("experts.experts.")
    forms = (before + "experts.local_experts.{}." + after, before + "experts." + after + "{}")
    form = next(form for form in forms if form.format(0) in ours)
    return torch.cat([ours[form.format(number)] for number in range(num_experts)])
