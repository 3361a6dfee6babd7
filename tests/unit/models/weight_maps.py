"""Copy weights of other implementations into a `GPTModel`: written for the tests alone."""

import torch
from torch import Tensor


def pack_qkv(*heads: Tensor, num_groups: int, head_dim: int) -> Tensor:
    """Interleave rows of queries (and gates), keys and values by group, as many as it has."""
    parts = [t.unflatten(0, (num_groups, -1, head_dim)) for t in heads]
    return torch.cat(parts, dim=1).flatten(0, 2)


def from_plain_gpt2(plain, num_heads: int) -> dict[str, Tensor]:
    """Map the names of `benchmarks.plain_gpt.PlainGPT2`."""
    state = {
        "embedding.word_embeddings.weight": plain.words.weight,
        "embedding.position_embeddings.weight": plain.positions.weight,
        "decoder.final_layernorm.weight": plain.norm.weight,
        "decoder.final_layernorm.bias": plain.norm.bias,
    }
    for i, block in enumerate(plain.blocks):
        d = block.proj.weight.shape[0] // num_heads
        for kind in ("weight", "bias"):
            qkv = getattr(block.qkv, kind).chunk(3)
            layer = {
                "input_layernorm": getattr(block.norm1, kind),
                "self_attention.linear_qkv": pack_qkv(*qkv, num_groups=num_heads, head_dim=d),
                "self_attention.linear_proj": getattr(block.proj, kind),
                "pre_mlp_layernorm": getattr(block.norm2, kind),
                "mlp.linear_fc1": getattr(block.up, kind),
                "mlp.linear_fc2": getattr(block.down, kind),
            }
            state |= {f"decoder.layers.{i}.{n}.{kind}": t for n, t in layer.items()}
    return state


def from_plain_llama(plain, num_groups: int) -> dict[str, Tensor]:
    """Map the names of `benchmarks.plain_gpt.PlainLlama`."""
    state = {
        "embedding.word_embeddings.weight": plain.words.weight,
        "decoder.final_layernorm.weight": plain.norm.weight,
        "output_layer.weight": plain.head.weight,
    }
    for i, block in enumerate(plain.blocks):
        weights = (block.q.weight, block.k.weight, block.v.weight)
        layer = {
            "input_layernorm": block.norm1.weight,
            "self_attention.linear_qkv": pack_qkv(
                *weights, num_groups=num_groups, head_dim=block.d
            ),
            "self_attention.linear_proj": block.proj.weight,
            "pre_mlp_layernorm": block.norm2.weight,
            "mlp.linear_fc1": torch.cat((block.gate.weight, block.up.weight)),
            "mlp.linear_fc2": block.down.weight,
        }
        state |= {f"decoder.layers.{i}.{n}.weight": t for n, t in layer.items()}
    return state


def from_hugging_face_gpt2(model) -> dict[str, Tensor]:
    """Map a GPT2LMHeadModel, whose linear weights are stored transposed."""
    body, heads = model.transformer, model.config.n_head
    state = {
        "embedding.word_embeddings.weight": body.wte.weight,
        "embedding.position_embeddings.weight": body.wpe.weight,
        "decoder.final_layernorm.weight": body.ln_f.weight,
        "decoder.final_layernorm.bias": body.ln_f.bias,
    }
    for i, block in enumerate(body.h):
        for kind in ("weight", "bias"):
            qkv = getattr(block.attn.c_attn, kind).t().chunk(3)
            width = model.config.n_embd // heads
            layer = {
                "input_layernorm": getattr(block.ln_1, kind),
                "self_attention.linear_qkv": pack_qkv(*qkv, num_groups=heads, head_dim=width),
                "self_attention.linear_proj": getattr(block.attn.c_proj, kind).t(),
                "pre_mlp_layernorm": getattr(block.ln_2, kind),
                "mlp.linear_fc1": getattr(block.mlp.c_fc, kind).t(),
                "mlp.linear_fc2": getattr(block.mlp.c_proj, kind).t(),
            }
            state |= {f"decoder.layers.{i}.{n}.{kind}": t for n, t in layer.items()}
    return state


def from_hugging_face_llama(model) -> dict[str, Tensor]:
    """Map a model of the Llama family: Llama, Mistral, Qwen 2 (QKV bias), Qwen 3 (QK norm), the
    layers of Qwen3-Next with full attention (an output gate beside the queries of each head)."""
    body, config = model.model, model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    state = {
        "embedding.word_embeddings.weight": body.embed_tokens.weight,
        "decoder.final_layernorm.weight": body.norm.weight,
    }
    if not config.tie_word_embeddings:
        state["output_layer.weight"] = model.lm_head.weight
    for i, block in enumerate(body.layers):
        attention, mlp, name = block.self_attn, block.mlp, f"decoder.layers.{i}."
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        for kind in ("weight", "bias"):
            rows = [getattr(p, kind) for p in projections]
            if rows[0] is not None:
                if config.model_type == "qwen3_next":
                    both = rows[0].unflatten(0, (-1, 2, head))
                    rows = [both[:, 0].flatten(0, 1), both[:, 1].flatten(0, 1), *rows[1:]]
                packed = pack_qkv(*rows, num_groups=config.num_key_value_heads, head_dim=head)
                state[f"{name}self_attention.linear_qkv.{kind}"] = packed
        layer = {
            "input_layernorm": block.input_layernorm.weight,
            "self_attention.linear_proj": attention.o_proj.weight,
            "pre_mlp_layernorm": block.post_attention_layernorm.weight,
            "mlp.linear_fc1": torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
            "mlp.linear_fc2": mlp.down_proj.weight,
        }
        if hasattr(attention, "q_norm"):
            layer["self_attention.q_layernorm"] = attention.q_norm.weight
            layer["self_attention.k_layernorm"] = attention.k_norm.weight
        state |= {f"{name}{n}.weight": t for n, t in layer.items()}
    return state


def randomised(model: torch.nn.Module, vectors_around: float = 1.0) -> torch.nn.Module:
    """Move every parameter, norms and biases too, so that none could be left out unnoticed."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 + (vectors_around if parameter.dim() == 1 else 0.0))
    return model
