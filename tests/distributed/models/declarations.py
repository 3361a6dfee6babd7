"""Gradients as backward leaves them on each rank, and what declarations make of them.

A parameter declares how it is split and over which axes its gradient is a partial sum. The job here
computes the gradients of tiny models in a layout, without any sum after backward. `problem_of` sums
them over the declared axes, over data-parallel ranks and over the declared copies of other stages,
and compares the sum with the shard of one process's gradient. It is a function of gradients and
declarations, so a test can try other declarations without another run.

The job can also leave out the collectives of one call site: each rank keeps its own tensor.
"""

import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parameters.initialization import canonical_names
from megatron.core.parameters.param_meta import ParamMeta, full_shape, get_param_meta, shard_of
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.add_adapters import add_adapters
from megatron.core.transformer.low_rank_adapter import EXPERT_TARGETS, LoraConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.xielu import XIELU
from megatron.core.transport import collectives
from megatron.core.transport.work import Work
from megatron.core.utils import get_model_config
from tests.harness.precision import precision
from tests.harness.tolerances import FP64_REORDERED_SUM
from tests.parity import encoder_case, training_case
from tests.parity.layouts import LayoutCase

AXES = ("pp", "tp", "cp", "ep", "expt_tp", "dp_cp", "expt_dp")
SAMPLES = 2
LAYOUTS = {
    name: LayoutCase(samples=SAMPLES, **axes)
    for name, axes in {
        "one process": dict(),
        "ring": dict(tp=2, sp=True, cp=2, ep=2, expt_tp=2),
        "heads": dict(tp=2, cp=2, cp_kind="a2a"),
        "gathered": dict(cp=2, cp_kind="all_gather", dp=2, ep=2),
        "sequence": dict(tp=2, sp=True, dp=2, ep=2),
        "plain": dict(tp=2, dp=2),
        "stages": dict(tp=2, sp=True, pp=2, schedule="zb-h1"),
    }.items()
}

_RMS = dict(normalization="RMSNorm", add_bias_linear=False)
_GATED = dict(_RMS, gated_linear_unit=True, activation_func=F.silu)
_EXPERTS = dict(
    num_moe_experts=4, moe_ffn_hidden_size=24, moe_token_dispatcher_type="alltoall",
    moe_grouped_gemm=True, moe_z_loss_coeff=0.01,
    moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"],
    moe_aux_loss_coeff=[0.1, 0.05, 0.2],
)  # fmt: skip
_LATENT = dict(
    multi_latent_attention=True, rope_type="rope", qk_layernorm=True, q_lora_rank=12,
    kv_lora_rank=10, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=5,
)  # fmt: skip
_DELTA = dict(
    linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=6,
    linear_value_head_dim=5,
)  # fmt: skip
_MAMBA = dict(mamba_num_groups=4, mamba_num_heads=8, mamba_head_dim=6, mamba_state_dim=5)
_SIZES_BY_LAYER = json.dumps({"block_configs": [
    {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
    {"attention": {"replace_with_linear": True}, "ffn": {"intermediate_size": 24}},
]})  # fmt: skip
_SHAPE = (
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--init-method-std",
    "0.1", "--hidden-dropout", "0", "--attention-dropout", "0",
)  # fmt: skip
_READS_IMAGES = (
    "--seq-length", "48", "--position-embedding-type", "mrope", "--mrope-section", "2", "1", "1",
    "--image-token-id", "90", "--vision-num-layers", "2", "--vision-hidden-size", "32",
    "--vision-num-attention-heads", "4", "--vision-ffn-hidden-size", "48", "--patch-dim", "4",
    "--normalization", "RMSNorm", "--swiglu", "--untie-embeddings-and-output-weights",
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A tiny model. `fields` are of the config of a GPT, `words` flags of an `encoder`."""

    layouts: tuple[str, ...]
    fields: dict[str, Any] | None = None
    encoder: str = ""
    words: tuple[str, ...] = ()
    tied: bool = False
    positions: str = "rope"
    engine: bool = False
    """Build the layers that `--transformer-impl transformer_engine` builds."""
    adapters: LoraConfig | None = None
    is_packed: bool = False
    """A row holds several documents, and ends with padding."""


_ALL = ("ring", "heads", "gathered", "sequence", "plain")
MODELS: dict[str, Model] = {
    "gpt2": Model((*_ALL, "stages"), {}, tied=True, positions="learned_absolute"),
    "later tokens": Model(("stages",), {**_GATED, "mtp_num_layers": 1}, tied=True),
    "later tokens, untied": Model(("stages",), {**_GATED, "mtp_num_layers": 1}),
    "llama": Model(
        _ALL, {**_GATED, "num_query_groups": 4, "qk_layernorm": True, "add_qkv_bias": True,
               "attention_output_gate": True, "softmax_type": "learnable"},
    ),
    "a gate for each head": Model(
        ("ring", "sequence", "plain"),
        {**_GATED, "num_query_groups": 2, "attention_output_gate": True,
         "attention_gate_by_head": True, "attention_gate_activation": "softplus"},
    ),
    "xIELU and normed embeddings": Model(
        ("ring", "sequence", "plain", "stages"),
        {**_RMS, "activation_func": XIELU, "embed_layernorm": True}, tied=True,
    ),
    "norms without weights": Model(
        ("sequence", "plain"),
        {"normalization": "RMSNormWithoutWeight", "qk_layernorm": True, "embed_layernorm": True},
        positions="learned_absolute",
    ),
    "fewer key heads than ranks": Model(
        ("sequence", "plain"), {**_RMS, "num_query_groups": 1, "qk_layernorm": True}
    ),
    "keys and values of an earlier layer": Model(
        _ALL, {**_GATED, "num_query_groups": 4, "qk_layernorm": True, "v_l2_norm": True,
               "attention_k_eq_v": True, "num_kv_shared_layers": 1, "per_layer_embed_dim": 6,
               "layer_scalar": True, "sandwich_norm": True},
    ),
    "keys and values of an earlier layer, fewer than ranks": Model(
        ("sequence", "plain"), {**_RMS, "num_query_groups": 1, "num_kv_shared_layers": 1}
    ),
    "norms across heads": Model(
        ("ring", "heads", "plain"),
        {**_RMS, "num_query_groups": 4, "qk_layernorm": True, "qk_layernorm_across_heads": True},
    ),
    "norms across heads, fewer key heads than ranks": Model(
        ("sequence", "plain"),
        {**_RMS, "num_query_groups": 1, "qk_layernorm": True, "qk_layernorm_across_heads": True},
    ),
    "fused loss": Model(
        ("ring", "heads"),
        {"cross_entropy_loss_fusion": True, "normalization": "LayerNormWithoutBias"},
    ),
    "engine": Model(("ring", "plain"), {"qk_layernorm": True, **_RMS}, engine=True),
    "experts": Model(
        ("ring", "gathered", "sequence"),
        {**_GATED, **_EXPERTS, "moe_shared_expert_intermediate_size": 16,
         "moe_shared_expert_gate": True, "mtp_num_layers": 1, "moe_latent_size": 12},
    ),
    "experts beside an MLP": Model(
        ("ring", "gathered", "sequence", "plain"),
        {**_GATED, **_EXPERTS, "moe_shared_expert_intermediate_size": 16, "moe_branch_norms": True,
         "moe_router_scales": True, "moe_router_topk": 3, "sandwich_norm": True},
    ),
    "experts one by one": Model(
        ("ring", "gathered"),
        {**_EXPERTS, "moe_grouped_gemm": False, "moe_token_dispatcher_type": "allgather"},
    ),
    "sinkhorn": Model(
        ("ring", "gathered", "sequence"),
        {**_EXPERTS, "moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0,
         "moe_router_topk": 1, "moe_expert_capacity_factor": 1.0},
    ),
    "latents": Model(_ALL, {**_GATED, **_LATENT, "attention_output_gate": True}),
    "sparse attention": Model(
        ("ring", "gathered", "sequence", "plain"),
        {**_RMS, **_LATENT, "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 6,
         "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 5, "dsa_indexer_loss_coeff": 2.0},
        is_packed=True,
    ),
    "shared keys": Model(
        ("ring", "gathered", "sequence"),
        {**_RMS, **_LATENT, "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 6,
         "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 5, "dsa_indexer_loss_coeff": 2.0,
         "dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 1},
        is_packed=True,
    ),
    "latents of an earlier layer": Model(
        ("ring", "gathered", "sequence", "plain"),
        {**_RMS, **_LATENT, "q_lora_rank": None, "kv_source_layers": [0, 0],
         "scalable_softmax": True, "rotary_exponents": True,
         "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 6,
         "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 5, "dsa_indexer_loss_coeff": 2.0},
        is_packed=True,
    ),
    "latents without a shared key": Model(
        ("ring", "sequence", "plain", "stages"),
        {**_RMS, **_LATENT, "no_rope_freq": [0, 1], "no_rope_latent_keys": True,
         "scalable_softmax": True},
    ),
    "pools of keys": Model(
        ("ring", "gathered", "sequence", "plain"),
        {**_RMS, **_LATENT, "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 6,
         "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 6, "dsa_indexer_block_size": 3,
         "qk_pos_emb_head_dim": 0},
        is_packed=True,
    ),
    "blocks of keys": Model(
        ("ring", "heads", "gathered", "sequence", "plain"),
        {**_RMS, "num_query_groups": 2, "qk_layernorm": True, "dsa_indexer_n_heads": 2,
         "experimental_attention_variant": "dsa", "dsa_indexer_head_dim": 8,
         "dsa_indexer_topk": 6, "dsa_indexer_block_size": 3, "dsa_indexer_local_blocks": 1},
        is_packed=True,
    ),
    "compressed attention": Model(
        ("ring", "gathered", "sequence", "plain"),
        {**_RMS, **_LATENT, "kv_lora_rank": 10, "v_head_dim": 10, "window_size": (4, 0),
         "experimental_attention_variant": "dsv4_hybrid", "csa_compress_ratios": [2, 3],
         "csa_indexed_ratio": 2, "o_groups": 2, "o_lora_rank": 6, "dsa_indexer_n_heads": 6,
         "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 3, "dsa_indexer_loss_coeff": 2.0},
        is_packed=True,
    ),
    "hyper-connections": Model(
        ("ring", "sequence", "plain", "stages"),
        {**_GATED, "enable_mhc_connections": True, "mhc_learned_contraction": True,
         "mtp_num_layers": 1},
    ),
    "alternating updates": Model(
        ("ring", "sequence", "plain", "stages"),
        {**_GATED, "altup_num_inputs": 3, "altup_active_idx": 1, "altup_coef_clip": 0.1,
         "laurel_rank": 4, "activation_sparsity": 0.5, "mtp_num_layers": 1},
    ),
    "alternating updates, vectors by layer": Model(
        ("ring", "sequence", "plain"),
        {**_GATED, "altup_num_inputs": 2, "per_layer_embed_dim": 6, "per_layer_vocab_size": 60},
    ),
    "sizes by layer": Model(
        ("ring", "heads", "sequence", "plain", "stages"),
        {**_GATED, "num_query_groups": 4, "qk_l2_norm": True,
         "heterogeneous_layers_config_encoded_json": _SIZES_BY_LAYER},
    ),
    "mixers": Model(
        _ALL, {**_RMS, **_DELTA, **_MAMBA, "hybrid_layer_pattern": "MGKS-/*-"}, positions="none",
        is_packed=True,
    ),
    "attention and mamba": Model(
        _ALL,
        {**_GATED, **_MAMBA, "experimental_attention_variant": "attention_and_mamba2",
         "mamba_factors": [0.9, 1.1, 0.8, 1.2, 0.7, 1.3, 0.6], "mlp_factors": [0.9, 0.6],
         "attention_factors": [1.2, 0.8, 0.7], "mamba_gated_norm": False},
        is_packed=True,
    ),
    "recomputed": Model(
        ("heads", "plain"),
        {"recompute_granularity": "full", "recompute_method": "uniform",
         "recompute_num_layers": 1, "distribute_saved_activations": True},
    ),
    "recomputed by module": Model(
        ("ring", "plain"),
        {**_LATENT, "recompute_granularity": "selective",
         "recompute_modules": ["core_attn", "mlp", "layernorm", "mla_up_proj"]},
    ),
    "adapters": Model(
        ("ring", "plain"), _GATED, adapters=LoraConfig(lora_rank=4, lora_alpha=8, use_dora=True)
    ),
    "adapters of experts": Model(
        ("ring", "gathered"), {**_GATED, **_EXPERTS},
        adapters=LoraConfig(lora_rank=4, lora_alpha=8, lora_target_modules=EXPERT_TARGETS),
    ),
    "adapters of experts one by one": Model(
        ("ring", "gathered"), {**_EXPERTS, "moe_grouped_gemm": False},
        adapters=LoraConfig(lora_rank=4, lora_alpha=8, lora_target_modules=EXPERT_TARGETS),
    ),
    "bert": Model(("ring", "plain", "stages"), encoder="bert", words=_SHAPE),
    "t5": Model(
        ("sequence", "plain", "stages"), encoder="t5",
        words=(*_SHAPE, "--encoder-num-layers", "1", "--decoder-num-layers", "1",
               "--decoder-seq-length", "16", "--position-embedding-type", "relative",
               "--relative-attention-num-buckets", "8", "--relative-attention-max-distance", "16"),
    ),
    "vlm": Model(("sequence", "plain"), encoder="vlm", words=(*_SHAPE, *_READS_IMAGES)),
    "vlm, states added": Model(
        ("sequence", "plain"), encoder="vlm",
        words=(*_SHAPE, *_READS_IMAGES, "--vision-model-type", "qwen3_vl",
               "--vision-num-position-embeddings", "16", "--deepstack-layers", "0",
               "--qk-layernorm"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Held:
    """A parameter on one rank: its gradient after backward, and the class that owns it."""

    grad: Tensor
    meta: ParamMeta
    owner: str


@dataclass(frozen=True)
class Report:
    """One model on one rank.

    Attributes:
        places: axis -> (rank in the group, global ranks of the group).
        held: canonical name -> parameter.
        modules: names of all classes of `megatron` that modules of the model are instances of.
        sites: call sites of collectives of floating-point tensors.
    """

    places: dict[str, tuple[int, list[int]]]
    held: dict[str, Held]
    modules: frozenset[str]
    sites: frozenset[str]


def problem_of(name: str, reports: Sequence[Report], whole: Tensor, meta: ParamMeta) -> str | None:
    """Return how the gradients that ranks hold break the declaration `meta`; None if they do not.

    Args:
        whole: the gradient of one process.
    """
    copies = {rank: copies_of(name, report) for rank, report in enumerate(reports)}
    grads = {rank: sum(copy.grad for copy in found) for rank, found in copies.items() if found}
    for rank in grads:
        stages = reports[rank].places["pp"][1]
        originals = [c for peer in stages for c in copies[peer] if c.meta.tied_to is None]
        if len(originals) != 1:
            return f"{len(originals)} stages hold it as the original"
    for axis in (*meta.partial_grad_axes, "expt_dp" if meta.is_expert else "dp_cp"):
        members = {rank: reports[rank].places[axis][1] for rank in grads}
        if not all(peer in grads for peers in members.values() for peer in peers):
            return f"some ranks of {axis} do not hold it"
        grads = {rank: sum(grads[peer] for peer in peers) for rank, peers in members.items()}
    grads = {
        rank: sum(grads[peer] for peer in reports[rank].places["pp"][1] if peer in grads)
        for rank in grads
    }
    for rank, grad in grads.items():
        place, peers = reports[rank].places[meta.split_axis or "tp"]
        size = len(peers) if meta.split_dim is not None else 1
        dim = meta.split_dim
        if full_shape(grad.shape, meta, size) != whole.shape:
            return f"its shards of {list(grad.shape)} do not make up {list(whole.shape)}"
        if dim is not None and whole.shape[dim] % (meta.stride * size):
            return f"{whole.shape[dim]} rows do not split into {meta.stride} x {size}"
        num_replicas = len(reports[rank].places["dp_cp"][1])
        expected = shard_of(whole, meta, place, size)
        limit = FP64_REORDERED_SUM
        allowed = limit.atol + limit.rtol * expected.abs().clamp(min=_rms(whole))
        excess = ((grad / num_replicas - expected).abs() / allowed).max()
        if not excess <= 1:
            return f"rank {rank} is {float(excess):.2g} times the tolerance away from one process"
    return None


def copies_of(name: str, report: Report) -> list[Held]:
    """Return what a rank holds of a parameter: itself, and what is declared to be tied to it."""
    return [held for own, held in report.held.items() if (held.meta.tied_to or own) == name]


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


# What runs on each rank -----------------------------------------------------------------------


def report_models(
    groups: ProcessGroupCollection,
    layout_name: str,
    runs: Sequence[tuple[str, str | None]],
    vocab_file: Path,
) -> list[Report]:
    """Run (model, call site whose collectives are left out) one after the other, in fp64."""
    with precision(torch.float64):
        return [_report(groups, LAYOUTS[layout_name], MODELS[m], s, vocab_file) for m, s in runs]


def _report(groups, layout, model, left_out, vocab_file) -> Report:
    rng_state().set_seed(training_case.SEED)
    seq_length, decoder_seq_length = training_case.SEQUENCE, None
    if model.encoder:
        chunk, forward_step, batches, seq_length, decoder_seq_length = _encoder(
            groups, layout, model, vocab_file
        )
    else:
        chunk = _gpt(groups, layout, model)
        forward_step = training_case.forward_step
        batches = training_case.local_micro_batches(
            0, layout, groups.dp.rank(), is_packed=model.is_packed, is_padded=model.is_packed
        )
    if model.adapters is not None:
        add_adapters([chunk], model.adapters, groups)
    chunk.double()
    get_model_config(chunk).pipeline_dtype = torch.float64
    names = canonical_names(chunk)
    for name, parameter in chunk.named_parameters():
        _add_noise(names[name], parameter, groups)
    rng_state().begin_step(0, micro_batch_size=1, dp_rank=groups.dp.rank(), dp_size=layout.dp)
    with _call_sites(left_out) as sites:
        get_forward_backward_func(pp_size=layout.pp, vp_size=1)(
            forward_step_func=forward_step, data_iterator=iter(batches), model=chunk,
            num_microbatches=layout.num_microbatches, seq_length=seq_length,
            decoder_seq_length=decoder_seq_length, micro_batch_size=1, pg_collection=groups,
        )  # fmt: skip
    held = {
        names[name]: Held(
            parameter.grad if parameter.grad is not None else torch.zeros_like(parameter),
            replace(get_param_meta(parameter), init_method=None),
            type(chunk.get_submodule(name.rpartition(".")[0])).__qualname__,
        )
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }
    kinds = {kind for module in chunk.modules() for kind in type(module).__mro__}
    places = {axis: _place(getattr(groups, axis)) for axis in AXES}
    return Report(places, held, frozenset(map(_class_name, kinds)), frozenset(sites))


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _place(group) -> tuple[int, list[int]]:
    if group.size() == 1:
        return 0, [dist.get_rank()]
    return group.rank(), dist.get_process_group_ranks(group)


@torch.no_grad()
def _add_noise(name: str, parameter: nn.Parameter, groups: ProcessGroupCollection) -> None:
    """Move a parameter away from zero and one, where wrong gradients may vanish."""
    meta = get_param_meta(parameter)
    name = meta.tied_to or name
    group = getattr(groups, meta.split_axis or "tp")
    size = group.size() if meta.split_dim is not None else 1
    shape = full_shape(parameter.shape, meta, size)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    parameter.add_(0.1 * shard_of(noise, meta, group.rank(), size))


def _gpt(groups: ProcessGroupCollection, layout: LayoutCase, model: Model) -> GPTModel:
    fields = {"num_layers": 2, **model.fields}
    if letters := fields.get("hybrid_layer_pattern"):
        fields |= {"num_layers": len(letters.partition("/")[0]), "mtp_num_layers": 1}
    if "num_moe_experts" in fields:
        fields |= {
            "expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": layout.expt_tp,
        }  # fmt: skip
    config = TransformerConfig(
        hidden_size=32, num_attention_heads=8, ffn_hidden_size=48, init_method_std=0.1,
        hidden_dropout=0.0, attention_dropout=0.0, unpadded_vocab_size=training_case.VOCABULARY,
        tensor_model_parallel_size=layout.tp, sequence_parallel=layout.sp,
        context_parallel_size=layout.cp, cp_comm_type=layout.cp_kind,
        pipeline_model_parallel_size=layout.pp, pipeline_schedule=layout.schedule, **fields,
    )  # fmt: skip
    stage, stages = groups.pp.rank(), pipeline_layout(config)
    layers = get_gpt_decoder_block_spec(config, model.engine, pp_rank=stage)
    return GPTModel(
        config,
        layers,
        vocab_size=96,
        max_sequence_length=training_case.SEQUENCE,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, model.engine),
        pre_process=stages.has_embedding(stage, 0),
        post_process=stages.has_loss(stage, 0),
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type=model.positions,
        pg_collection=groups,
    )


def _encoder(groups, layout, model, vocab_file) -> tuple[nn.Module, Any, list[Any], int, int]:
    case = encoder_case.case_of(model.encoder)
    run = encoder_case.resolved(layout, model.words, model.encoder)
    samples = case.dataset(vocab_file, run.encoders.bert_binary_head)
    collate = getattr(samples, "collate", torch.utils.data.default_collate)
    rows = range(groups.dp.rank(), SAMPLES, layout.dp)
    (chunk,) = case.build_chunks(run, groups)
    batches = [collate([samples[row]]) for row in rows]
    lengths = run.model.seq_length, run.encoders.decoder_seq_length
    return chunk, case.forward_step, batches, *lengths


# Call sites of collectives --------------------------------------------------------------------


@contextmanager
def _call_sites(left_out: str | None) -> Iterator[set[str]]:
    """Note the call sites of collectives of floating-point tensors; leave out those of one."""
    seen: set[str] = set()

    def observed(name: str, real: Any, x: Tensor, group: Any, *sizes: Any, **named: Any) -> Any:
        site = _site(name)
        if site is None or group.size() == 1 or not x.is_floating_point():
            return real(x, group, *sizes, **named)
        seen.add(site)
        if site != left_out:
            return real(x, group, *sizes, **named)
        kept = _kept(name.removeprefix("start_"), x, group, *sizes, **named)
        return Work.of([], kept) if name.startswith("start_") else kept

    with mock.patch.multiple(
        collectives,
        **{name: partial(observed, name, getattr(collectives, name)) for name in _COLLECTIVES},
    ):
        yield seen


_COLLECTIVES = tuple(
    start + name
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring_shift")
    for start in ("", "start_")
    if hasattr(collectives, start + name)
)


def _site(name: str) -> str | None:
    """Return the functions of the model that led to a collective; None inside of collectives.

    They end with a method: `all_gather in megatron.core.a.b:gathered of Layer.forward`.
    """
    frame, found = sys._getframe(2), []
    if frame.f_globals["__name__"] == collectives.__name__:
        return None
    module = frame.f_globals["__name__"]
    while frame is not None and not (found and "." in found[-1]):
        if frame.f_globals["__name__"].startswith("megatron."):
            found.append(frame.f_code.co_qualname.partition(".<locals>")[0])
        frame = frame.f_back
    return f"{name.removeprefix('start_')} in {module}:{' of '.join(found)}"


def _kept(name, x, group, output_sizes=None, input_sizes=None) -> Tensor:
    """Return what a rank has if it neither sends nor receives."""
    rank, size = group.rank(), group.size()
    if name == "all_gather":
        sizes = output_sizes or [x.shape[0]] * size
        gathered = x.new_zeros((sum(sizes), *x.shape[1:]))
        gathered.split(list(sizes))[rank].copy_(x)
        return gathered
    if name == "reduce_scatter":
        return x.split(list(output_sizes or [x.shape[0] // size] * size))[rank].clone()
    if name == "all_to_all" and output_sizes is not None:
        received = x.new_zeros((sum(output_sizes), *x.shape[1:]))
        count = min(len(received), len(x))
        received[:count] = x[:count]
        return received
    return x.clone() if name != "all_reduce" else x
