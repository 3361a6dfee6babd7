"""The kernels that the layers of a model use on a device, computed from its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from megatron.core.kernels import attention
from megatron.core.kernels.attention import ASKED, ATTENTION
from megatron.core.kernels.gated_activation import GATED, Gate
from megatron.core.kernels.grouped_products import GROUPED_PRODUCTS
from megatron.core.kernels.norms import TRAINING, WEIGHT_DTYPE
from megatron.core.kernels.registry import Choice, Request, dtype_name
from megatron.core.kernels.weight_gradient import WEIGHT_GRADIENT
from megatron.core.low_precision.quantized_linear import BLOCK_SCALES, LOW_PRECISION_PRODUCTS
from megatron.core.low_precision.recipes import Operand
from megatron.core.low_precision.scaling import TensorScaling
from megatron.core.models.common.language_module.language_module import LOSS, asked_loss, loss_needs
from megatron.core.transformer.config.layer_kinds import GATED_DELTA_NET, KIMI, MAMBA, SHORT_CONV
from megatron.core.transformer.config.stages import cp_comm_type_of_layer
from megatron.core.transformer.dot_product_attention import asked_backend
from megatron.core.transformer.low_precision_layers import recipe_of
from megatron.core.transformer.moe.dispatchers import EXCHANGE, choose_exchange
from megatron.core.transformer.norm import NORMS
from megatron.core.transformer.transformer_config import TransformerConfig

_RECURRENCES = {
    GATED_DELTA_NET: "gated delta rule",
    KIMI: "delta rule of channels",
    MAMBA: "state-space dual",
    SHORT_CONV: "short convolution",
}


@dataclass(frozen=True)
class KernelLine:
    """The kernel of an operation, such as "attention, layers 1-3" and "sdpa", with the reasons."""

    operation: str
    kernel: str
    reasons: str = ""

    def __str__(self) -> str:
        shown = f"{self.operation}: {self.kernel}"
        return f"{shown} ({self.reasons})" if self.reasons else shown


def kernel_choices(
    config: TransformerConfig,
    device: str,
    *,
    has_documents: bool = False,
    has_bias: bool = False,
    is_planned: bool = False,
    backend: str = "local",
) -> list[KernelLine]:
    """Return the kernel of each operation of a training step, and why other kernels do not apply.

    Args:
        device: torch's name of the device type.
        has_documents: attention stays within documents.
        has_bias: self-attention has a bias of its scores.
        is_planned: the device is on another machine; ignore libraries that are missing here.
        backend: library of the layers; a library other than "local" has its own attention and
            norms.
    """
    dtype = dtype_name(config.params_dtype)

    def request(needs: Iterable[str]) -> Request:
        return Request(device, dtype, frozenset(needs), is_planned)

    lines = []
    in_blocks = [
        layer
        for layer, kind in enumerate(config.layer_kinds(), 1)
        if kind.is_sparse or kind.compress_ratio
    ]
    if backend == "local":
        attention_backend = asked_backend(config)
        asked = ASKED[attention_backend]
        given = {attention.DOCUMENTS: has_documents, attention.BIAS: has_bias}
        of_all = {need for need, is_given in given.items() if is_given}
        chosen = {
            layer: ATTENTION.choose(
                request(
                    of_all.union(_attention_needs(config.of_layer(layer), layer, attention_backend))
                ),
                asked,
            )
            for layer, kind in enumerate(config.layer_kinds(), 1)
            if kind.attends and layer not in in_blocks
        }
        lines += [
            _line(f"attention{layers}", choice, _dropout_note(config, choice, device))
            for layers, choice in _runs(chosen)
        ]
        if config.encoder_num_layers:
            needs = {
                attention.MASK,
                attention.LENGTHS,
                *_needs_of_dropout(config, attention_backend),
            }
            choice = ATTENTION.choose(request(needs), asked)
            note = _dropout_note(config, choice, device)
            lines.append(_line("attention to the encoder", choice, note))
        lines.append(_line(config.normalization, _norm(config, device, dtype, is_planned)))
    else:
        note = _dropout_note(config, None, device)
        lines.append(KernelLine(f"attention, {config.normalization}", backend, note))
    if in_blocks:
        where = f"layers {_ranges(in_blocks)}"
        lines.append(KernelLine(f"sparse attention, {where}", "blocks of queries"))
    by_mixer: dict[str, list[int]] = {}
    for layer, kind in enumerate(config.layer_kinds(), 1):
        if kind.recurrence:
            by_mixer.setdefault(kind.recurrence, []).append(layer)
    for mixer, layers in by_mixer.items():
        kernel = "taps" if mixer == SHORT_CONV else "chunks"
        lines.append(KernelLine(f"{_RECURRENCES[mixer]}, layers {_ranges(layers)}", kernel))
    if config.gated_linear_unit:
        clamp, clamps_after = config.activation_func_clamp_value, config.activation_func_clamp_after
        gate = Gate(config.activation_func, clamp, config.glu_linear_offset, clamps_after)
        fuses = config.bias_activation_fusion
        chosen_gate = GATED.choose(request(gate.needs()), () if fuses else ("plain",))
        lines.append(_line("gated activation", chosen_gate))
    recipe = recipe_of(config)
    if recipe is not None:
        has_blocks = not isinstance(recipe.scalings[Operand.INPUT], TensorScaling)
        products = LOW_PRECISION_PRODUCTS.choose(request([BLOCK_SCALES] if has_blocks else []))
        lines.append(_line(LOW_PRECISION_PRODUCTS.operation, products))
    if config.num_moe_experts and config.moe_grouped_gemm:
        lines.append(_line("grouped products", GROUPED_PRODUCTS.choose(request(()))))
    if config.num_moe_experts and config.moe_token_dispatcher_type == "flex":
        exchange = choose_exchange(config, device, is_planned=is_planned)
        lines.append(_line(EXCHANGE.operation, exchange))
    if config.gradient_accumulation_fusion and dtype != "float32":
        lines.append(_line(WEIGHT_GRADIENT.operation, WEIGHT_GRADIENT.choose(request(()))))
    lines.append(_line("loss", LOSS.choose(request(loss_needs(config)), asked_loss(config))))
    return lines


def _line(operation: str, choice: Choice, note: str = "") -> KernelLine:
    reasons = "; ".join(filter(None, (choice.reasons, note)))
    return KernelLine(operation, choice.name, reasons)


def _dropout_note(config: TransformerConfig, choice: Choice | None, device: str) -> str:
    """Return a note about attention dropout; `choice` is None for the attention of a library."""
    if not config.attention_dropout:
        return ""
    if choice is None or attention.DROPOUT not in choice.kernel.supports:
        return "the kernel draws dropout: the dropped elements depend on the layout"
    passed_over = {name for name, _ in choice.passed_over}
    drawing = [k for k in ATTENTION.of_device(device) if attention.OWN_DROPOUT in k.supports]
    if any(k.name in passed_over and attention.DROPOUT not in k.supports for k in drawing):
        return "with --attention-backend flash or fused the kernel draws dropout, by the layout"
    return ""


def _attention_needs(config: TransformerConfig, layer_number: int, backend: str) -> Iterator[str]:
    widths = [config.kv_channels or 0, config.v_channels or config.kv_channels or 0]
    if config.multi_latent_attention:
        widths = [config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim]
    given = {
        attention.WINDOW: (config.window_of(layer_number) or (-1, 0))[0] >= 0,
        attention.DOCUMENTS: config.chunk_of(layer_number) is not None,
        attention.MASK: layer_number <= (config.encoder_num_layers or 0),  # of padding
        attention.WIDTHS: len(set(widths)) > 1,
        attention.WIDE_HEADS: max(widths) > attention.WIDEST_FLASH,
        attention.SOFTCAP: config.attn_logit_softcapping is not None,
        attention.SINK: config.softmax_type != "vanilla",
        attention.MAX_LOGITS: config.records_max_logits,
    }
    yield from (need for need, is_given in given.items() if is_given)
    yield from _needs_of_dropout(config, backend)
    yield from attention.context_parallel_need(cp_comm_type_of_layer(config, layer_number))


def _needs_of_dropout(config: TransformerConfig, backend: str) -> list[str]:
    return [attention.dropout_need(backend)] if config.attention_dropout > 0.0 else []


def _norm(config: TransformerConfig, device: str, dtype: str, is_planned: bool) -> Choice:
    needs, stream = {TRAINING}, "float32" if config.fp32_residual_connection else dtype
    weight = "float32" if config.layernorm_zero_centered_gamma else dtype
    if weight != stream:
        needs.add(WEIGHT_DTYPE)
    request = Request(device, stream, frozenset(needs), is_planned)
    return NORMS[config.normalization].kernels.choose(request)


def _runs(choices: dict[int, Choice]) -> Iterator[tuple[str, Choice]]:
    """Yield (text naming the layers, their choice) for each different choice."""
    by_choice: dict[Choice, list[int]] = {}
    for layer, choice in choices.items():
        by_choice.setdefault(choice, []).append(layer)
    for choice, layers in by_choice.items():
        yield ("" if len(by_choice) == 1 else f", layers {_ranges(layers)}"), choice


def _ranges(numbers: list[int]) -> str:
    """Return "1-3, 5" for 1, 2, 3, 5."""
    runs = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return ", ".join(runs)
