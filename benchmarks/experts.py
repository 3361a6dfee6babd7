"""Cost of a mixture-of-experts layer, against a plain loop over experts and Mixtral's block.

    python -m benchmarks.experts                          # one thread, processor time
    python -m benchmarks.experts --experts 64 --topk 8 --width 176

All candidates compute the same function of the same weights, which is checked first. They alternate
on one thread, forward and backward; figures are medians. "matrix products alone" is the lower
bound: the products of all tokens and experts, without routing, permuting or activation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tensor_parallel import Call, backward_of, take_turns
from megatron.core.foundation.optional_imports import has, require
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.parameters.initialization import canonical_names
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


class PlainExperts(nn.Module):
    """A plain loop: select each expert's tokens, compute, add the outputs at their positions."""

    def __init__(self, hidden: int, width: int, experts: int, topk: int) -> None:
        super().__init__()
        self.topk = topk
        self.router = nn.Linear(hidden, experts, bias=False)
        self.fc1 = nn.ModuleList(nn.Linear(hidden, 2 * width, bias=False) for _ in range(experts))
        self.fc2 = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        tokens = x.reshape(-1, x.shape[-1])
        best, chosen = self.router(tokens).topk(self.topk)
        weights = best.softmax(-1)
        out = torch.zeros_like(tokens)
        for expert, (fc1, fc2) in enumerate(zip(self.fc1, self.fc2, strict=True)):
            token, place = torch.where(chosen == expert)
            gate, up = fc1(tokens[token]).chunk(2, -1)
            y = fc2(F.silu(gate) * up) * weights[token, place, None]
            out.index_add_(0, token, y)
        return out.view(x.shape)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    tokens: int = 1024
    hidden: int = 512
    width: int = 704
    """Width of an expert's MLP."""
    experts: int = 8
    topk: int = 2
    """Number of experts per token."""
    rounds: int = 9


def ours(sizes: Flags, plain: PlainExperts, *, grouped: bool) -> nn.Module:
    """Return our layer with the weights of `plain`."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=sizes.hidden,
        num_attention_heads=8,
        num_moe_experts=sizes.experts,
        moe_router_topk=sizes.topk,
        moe_ffn_hidden_size=sizes.width,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        moe_grouped_gemm=grouped,
    )
    parts = get_gpt_layer_local_spec(num_experts=sizes.experts, moe_grouped_gemm=grouped).submodules
    layer = build_module(parts.mlp, config=config, pg_collection=ProcessGroupCollection.single())
    values = {"router.weight": plain.router.weight}
    for expert in range(sizes.experts):
        name = f"experts.local_experts.{expert}"
        values[f"{name}.linear_fc1.weight"] = plain.fc1[expert].weight
        values[f"{name}.linear_fc2.weight"] = plain.fc2[expert].weight
    names = canonical_names(layer)
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(values[names[name]].detach())
    return layer


def mixtral(sizes: Flags, plain: PlainExperts) -> nn.Module | None:
    """Return Transformers' block with the weights of `plain`; None without Transformers."""
    if not has("transformers"):
        return None
    transformers = require("transformers", purpose="the comparison with Mixtral's block")
    modeling = __import__(
        "transformers.models.mixtral.modeling_mixtral", fromlist=["MixtralSparseMoeBlock"]
    )
    config = transformers.MixtralConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.width,
        num_local_experts=sizes.experts,
        num_experts_per_tok=sizes.topk,
    )
    config._experts_implementation = "eager"
    block: nn.Module = modeling.MixtralSparseMoeBlock(config)
    fc1 = torch.stack([layer.weight.detach() for layer in plain.fc1])
    fc2 = torch.stack([layer.weight.detach() for layer in plain.fc2])
    named = dict(block.named_parameters())
    named["gate.weight"].data.copy_(plain.router.weight.detach())
    if "experts.gate_up_proj" in named:
        named["experts.gate_up_proj"].data.copy_(fc1)
        named["experts.down_proj"].data.copy_(fc2)
        return block
    for expert in range(sizes.experts):
        gate, up = fc1[expert].chunk(2)
        named[f"experts.{expert}.w1.weight"].data.copy_(gate)
        named[f"experts.{expert}.w3.weight"].data.copy_(up)
        named[f"experts.{expert}.w2.weight"].data.copy_(fc2[expert])
    return block


def with_main_grads(layer: nn.Module, x: Tensor) -> Call:
    """Return forward and backward as in training: weight gradients are added to fp32 buffers."""
    upstream: list[Tensor] = []
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)

    def call() -> None:
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad, parameter.main_grad_is_fresh = None, True
        out = layer(x)[0]
        if not upstream:
            upstream.append(torch.ones_like(out))
        out.backward(upstream[0])

    return call


def forgetting(layer: nn.Module, x: Tensor, function: Callable[[Tensor], Tensor]) -> Call:
    """Return forward and backward with gradients that start at None."""
    return backward_of(lambda leaf, *_: function(leaf), x, *layer.parameters())


def products_alone(sizes: Flags, x: Tensor) -> Call:
    """Return only the matrix products of evenly distributed tokens, forward and backward."""
    rows = sizes.tokens * sizes.topk // sizes.experts
    fc1 = [torch.randn(2 * sizes.width, sizes.hidden) for _ in range(sizes.experts)]
    fc2 = [torch.randn(sizes.hidden, sizes.width) for _ in range(sizes.experts)]
    wide, narrow = torch.randn(rows, 2 * sizes.width), torch.randn(rows, sizes.width)
    tokens = torch.randn(rows, sizes.hidden)

    def call() -> None:
        for first, second in zip(fc1, fc2, strict=True):
            tokens @ first.t()
            narrow @ second.t()
            tokens @ second
            wide @ first
            tokens.t() @ narrow
            wide.t() @ tokens

    return call


def main() -> int:
    sizes = read_command_line(Flags, description=__doc__.splitlines()[0])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    plain = PlainExperts(sizes.hidden, sizes.width, sizes.experts, sizes.topk)
    x = torch.randn(sizes.tokens // 2, 2, sizes.hidden).requires_grad_()
    expected = plain(x)
    calls: dict[str, Call] = {
        "matrix products alone": products_alone(sizes, x),
        "plain loop": forgetting(plain, x, plain),
    }
    block = mixtral(sizes, plain)
    if block is not None:

        def mixtral_block(leaf: Tensor) -> Tensor:
            out = block(leaf)
            return out[0] if isinstance(out, tuple) else out

        torch.testing.assert_close(mixtral_block(x), expected, rtol=1e-4, atol=1e-5)
        calls["Transformers' Mixtral"] = forgetting(block, x, mixtral_block)
    for name, grouped in (("one by one", False), ("grouped", True)):
        layer = ours(sizes, plain, grouped=grouped)
        torch.testing.assert_close(layer(x)[0], expected, rtol=1e-4, atol=1e-5)
        calls[f"ours, {name}"] = forgetting(layer, x, lambda leaf, layer=layer: layer(leaf)[0])
        calls[f"ours, {name}, main gradients"] = with_main_grads(
            ours(sizes, plain, grouped=grouped), x
        )
    print(
        f"{sizes.tokens} tokens, width {sizes.hidden}, {sizes.experts} experts of {sizes.width},"
        f" {sizes.topk} for each token; forward and backward, median of {sizes.rounds}"
    )
    seconds = take_turns(calls, sizes.rounds, time.process_time)
    for name, value in seconds.items():
        shown = value / seconds["plain loop"]
        print(f"{name:<36}{1e3 * value:>9.1f} ms{shown:>8.2f} of the plain loop")
    return 0


if __name__ == "__main__":
    sys.exit(main())
