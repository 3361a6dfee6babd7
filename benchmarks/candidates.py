"""The models that `single_device.py` compares, each as a function that runs one training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plain_gpt import PlainGPT2, PlainLlama, Sizes
from megatron.core.activations import fast_gelu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.foundation.optional_imports import has, require
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.metrics.flops import training_flops
from megatron.training.metrics.model_size import ModelSize

Step = Callable[[], float]
"""Runs forward and backward (and the optimizer, if chosen) once and returns the loss."""

FAMILIES = ("gpt2", "llama")


def sizes_of(family: str, **overrides: int) -> Sizes:
    """Return the sizes of the benchmark's model: 4 layers, hidden 512, vocabulary 32,000."""
    sizes: dict[str, int] = {} if family == "gpt2" else {"num_kv_heads": 2, "ffn_size": 1408}
    return Sizes(**(sizes | overrides))


def model_flops(family: str, z: Sizes, batch: int) -> float:
    """Return the FLOPs of the matrix products of one step: forward, and twice that backward.

    Of causal attention, the lower half of the score matrix counts.
    """
    config = TransformerConfig(
        num_layers=z.num_layers, hidden_size=z.hidden_size, num_attention_heads=z.num_heads,
        num_query_groups=z.num_kv_heads, ffn_hidden_size=z.ffn_size,
        gated_linear_unit=family == "llama",
    )  # fmt: skip
    size = ModelSize(config=config, vocab_size=z.vocab_size, seq_length=z.sequence)
    return training_flops(size, batch)


def make_batch(z: Sizes, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random ids and labels [b, s]."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(z.vocab_size, (batch, z.sequence + 1), generator=generator)
    return text[:, :-1].contiguous().to(device), text[:, 1:].contiguous().to(device)


def _step(
    model: nn.Module, loss_of: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None
) -> Step:
    parameters = list(model.parameters())

    def step() -> float:
        for parameter in parameters:
            parameter.grad = None
        loss = loss_of()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.item()

    return step


def _optimizer(model: nn.Module, with_optimizer: bool) -> torch.optim.Optimizer | None:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True) if with_optimizer else None


def lattice(
    family: str, z: Sizes, batch: int, dtype: torch.dtype, device: torch.device, optimizes: bool
) -> Step:
    """Our model in our data-parallel wrapper, with the fused head."""
    fields = (
        {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
        }
        if family == "llama"
        else {"activation_func": fast_gelu}
    )
    config = TransformerConfig(
        num_layers=z.num_layers,
        hidden_size=z.hidden_size,
        num_attention_heads=z.num_heads,
        num_query_groups=z.num_kv_heads,
        ffn_hidden_size=z.ffn_size,
        layernorm_epsilon=z.epsilon,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        cross_entropy_loss_fusion=True,
        **fields,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=z.vocab_size,
        max_sequence_length=z.sequence,
        position_embedding_type="rope" if family == "llama" else "learned_absolute",
        share_embeddings_and_output_weights=family == "gpt2",
    )
    model.train()
    # As in training: gradients are written into the buffers of the data-parallel wrapper.
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    tokens, labels = make_batch(z, batch, device)
    optimizer = _optimizer(model, optimizes)
    parameters = list(model.parameters())

    def step() -> float:
        wrapped.zero_grad_buffer()
        loss = wrapped(tokens, None, None, labels=labels).mean()
        loss.backward()
        finalize_model_grads([wrapped])
        if optimizer is not None:
            for parameter in parameters:
                parameter.grad = parameter.main_grad
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None
        return loss.item()

    return step


def plain(
    family: str, z: Sizes, batch: int, dtype: torch.dtype, device: torch.device, optimizes: bool
) -> Step:
    """The hand-written PyTorch model."""
    model = (PlainLlama if family == "llama" else PlainGPT2)(z).to(device=device, dtype=dtype)
    _shrink(model)
    tokens, labels = make_batch(z, batch, device)
    return _step(model, lambda: model(tokens, labels), _optimizer(model, optimizes))


def hugging_face(
    family: str, z: Sizes, batch: int, dtype: torch.dtype, device: torch.device, optimizes: bool
) -> Step:
    """Hugging Face's model of the same architecture, with its scaled_dot_product_attention."""
    transformers = require("transformers", purpose="the Hugging Face column of the benchmark")
    common = {"vocab_size": z.vocab_size, "attn_implementation": "sdpa", "use_cache": False}
    if family == "llama":
        config = transformers.LlamaConfig(
            hidden_size=z.hidden_size,
            intermediate_size=z.ffn_size,
            num_hidden_layers=z.num_layers,
            num_attention_heads=z.num_heads,
            num_key_value_heads=z.num_kv_heads,
            max_position_embeddings=z.sequence,
            rms_norm_eps=z.epsilon,
            tie_word_embeddings=False,
            **common,
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            n_embd=z.hidden_size,
            n_layer=z.num_layers,
            n_head=z.num_heads,
            n_inner=z.ffn_size,
            n_positions=z.sequence,
            layer_norm_epsilon=z.epsilon,
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            **common,
        )
        model = transformers.GPT2LMHeadModel(config)
    model = model.to(device=device, dtype=dtype).train()
    tokens, labels = make_batch(z, batch, device)

    def loss() -> Tensor:
        # `shift_labels`: the labels are shifted already.
        return model(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss

    return _step(model, loss, _optimizer(model, optimizes))


def _shrink(model: nn.Module) -> None:
    """Initialise small weights, as the other models do, to avoid denormals and infinities."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)


CANDIDATES: dict[str, Callable[..., Step]] = {"lattice": lattice, "plain torch": plain}
if has("transformers"):
    CANDIDATES["hugging face"] = hugging_face
