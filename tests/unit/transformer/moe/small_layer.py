"""A small mixture-of-experts layer for tests."""

import torch
import torch.nn.functional as F

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.parameters.initialization import deferred_initialization, initialize_parameters
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

H, E, K = 16, 4, 2


def layer(groups=None, seed=3, **options):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=H,
        num_attention_heads=2,
        num_moe_experts=E,
        moe_ffn_hidden_size=24,
        init_method_std=0.2,
        **{"gated_linear_unit": True, "activation_func": F.silu} | options,
    )
    spec = get_gpt_layer_local_spec(num_experts=E, moe_grouped_gemm=config.moe_grouped_gemm)
    groups = groups or ProcessGroupCollection.single()
    with deferred_initialization():
        built = build_module(spec.submodules.mlp, config=config, pg_collection=groups)
    place = {"expt_tp": groups.expt_tp.rank(), "tp": groups.tp.rank()}
    size = {"expt_tp": groups.expt_tp.size(), "tp": groups.tp.size()}
    initialize_parameters(built, seed=seed, axis_rank=place, axis_size=size)
    built.set_layer_number(1)
    for name, parameter in built.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    return built


def tokens(s=6, b=2):
    return torch.randn(s, b, H, generator=torch.Generator().manual_seed(5)).requires_grad_()
