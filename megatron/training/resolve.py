"""Derive every value that the user left open. The only place that derives; nothing changes later.

Each derived value is recorded with its formula, so that the log of a run answers "why is this
number what it is". Derivation never fails: what cannot be derived stays None, and the rules
(`megatron.training.rules`) say what is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron.core import device, optional_imports
from megatron.core.batch_size_phases import (
    Phases,
    parse_phases,
    samples_in_phases,
    steps_in_phases,
)
from megatron.core.flag_expressions import expand_layer_pattern
from megatron.core.pipeline_parallel.layout import virtual_stages_of
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.transformer.yarn import yarn_softmax_scale
from megatron.training.config.run import RunConfig
from megatron.training.ramp_up import samples_for_steps, steps_for_samples


@dataclass(frozen=True)
class Derivation:
    """One derived value and where it comes from."""

    name: str
    value: Any
    formula: str
    is_of_training: bool = False
    """Whether it says how a model is trained or evaluated: nothing to whoever only uses one."""

    def __str__(self) -> str:
        return f"{self.name} = {getattr(self.value, 'name', self.value)}  ({self.formula})"


@dataclass(frozen=True)
class ResolvedRun:
    """The settings of a run, complete.

    Attributes:
        config: what was asked for, unchanged.
        values: every setting by its Megatron name: the fields of `config`, overlaid with what
            was derived.
        derivations: what was derived, in order.
        extra: arguments that a script added to the parser.
    """

    config: RunConfig
    values: Mapping[str, Any]
    derivations: tuple[Derivation, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """Read a setting: `run.data_parallel_size`, `run.hidden_size`."""
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(f"no setting {name!r}") from None

    def namespace(self) -> Args:
        """Return all settings as Megatron's `args`. Changing it changes nothing in the run."""
        args = Args(**self.values, **self.extra)
        args.run = self
        return args

    def with_values(self, *derivations: Derivation) -> ResolvedRun:
        """Return a copy with more derived values."""
        return dataclasses.replace(
            self,
            values={**self.values, **{d.name: d.value for d in derivations}},
            derivations=(*self.derivations, *derivations),
        )


class Args(argparse.Namespace):
    """Megatron's `args`, which also knows what the settings in it were derived from.

    So settings that were derived once can be told from those that the user gave, when a script
    hands them back. `run` is a slot: it does not show up in `vars(args)`.
    """

    __slots__ = ("run",)

    run: ResolvedRun


class _Derived(dict):
    """Settings while they are being derived; `note` records a value with its formula."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config.flat())
        self.log: list[Derivation] = []
        self.is_of_training = False

    def note(self, name: str, value: Any, formula: str) -> None:
        if self.get(name) != value or name not in self:
            self.log.append(Derivation(name, value, formula, self.is_of_training))
        self[name] = value


def resolve(
    config: RunConfig, *, world_size: int, extra: Mapping[str, Any] | None = None
) -> ResolvedRun:
    """Derive the settings of a run on `world_size` ranks, all but the vocabulary."""
    v = _Derived(config)
    for derive, is_of_training in (
        (partial(_topology, world_size=world_size), False),
        (_replication, True),
        (_model, False),
        (_precision, False),
        (_batch, True),
        (_schedule, True),
        (_data, True),
        (_tokenizer, False),
        (_machine, False),
    ):
        v.is_of_training = is_of_training
        derive(v)
    return ResolvedRun(config, dict(v), tuple(v.log), dict(extra or {}))


def _topology(v: _Derived, world_size: int) -> None:
    v["world_size"] = world_size
    v["rank"] = int(os.environ.get("RANK", "0"))
    tp, pp, cp = (
        v["tensor_model_parallel_size"],
        v["pipeline_model_parallel_size"],
        v["context_parallel_size"],
    )
    model = max(tp * pp * cp, 1)
    v.note(
        "data_parallel_size",
        max(world_size // model, 1),
        f"{world_size} ranks / (tp {tp} * pp {pp} * cp {cp})",
    )
    v["total_model_size"] = v["model_parallel_size"] = tp * pp
    v["rank_order"] = "tp-cp-ep-pp-dp" if v["use_tp_pp_dp_mapping"] else "tp-cp-ep-dp-pp"
    if v["sequence_parallel"] and tp == 1:
        v.note("sequence_parallel", False, "there is nothing to split over with tp 1")
    if v["expert_tensor_parallel_size"] is None:
        v["expert_tensor_parallel_size"] = tp
    v["virtual_pipeline_model_parallel_size"] = None
    chunks, formula = _virtual_stages(v, pp)
    if chunks is not None and chunks > 1:
        v.note("virtual_pipeline_model_parallel_size", chunks, formula)
    if v["microbatch_group_size_per_vp_stage"] is None:
        v["microbatch_group_size_per_vp_stage"] = pp


def _replication(v: _Derived) -> None:
    """One rung of the ladder, whichever flag names it."""
    rung, formula = v["data_parallel_sharding_strategy"], "--data-parallel-sharding-strategy"
    if rung is None and v["use_megatron_fsdp"]:
        rung, formula = "optim_grads_params", "--use-megatron-fsdp"
    elif rung is None and v["use_distributed_optimizer"]:
        rung, formula = "optim", "--use-distributed-optimizer"
    v.note("data_parallel_sharding_strategy", rung or "no_shard", formula if rung else "default")
    if v["data_parallel_sharding_strategy"] != "no_shard":
        v.note("use_distributed_optimizer", True, f"{formula} {rung}")


def _virtual_stages(v: _Derived, pp: int) -> tuple[int | None, str]:
    """Return the number of model chunks per rank, from whichever flag says it."""
    if v["pipeline_model_parallel_layout"] is not None:
        return virtual_stages_of(
            v["pipeline_model_parallel_layout"], pp
        ), "stages of the layout / pp"
    decided = schedule_named(v["pipeline_schedule"]).num_chunks
    if decided is not None and pp > 1:
        return decided if decided > 1 else None, f"--pipeline-schedule {v['pipeline_schedule']}"
    if v["num_virtual_stages_per_pipeline_rank"] is not None:
        return v["num_virtual_stages_per_pipeline_rank"], "--num-virtual-stages-per-pipeline-rank"
    per_chunk, layers = v["num_layers_per_virtual_pipeline_stage"], v["num_layers"]
    if not per_chunk or not layers:
        return None, ""
    counted = (
        layers
        + v["account_for_embedding_in_pipeline_split"]
        + v["account_for_loss_in_pipeline_split"]
    )
    return counted // pp // per_chunk, f"{counted} layers / pp {pp} / {per_chunk} layers a chunk"


def ffn_width(hidden_size: int, *, is_gated: bool) -> tuple[int, str]:
    """Return the default MLP width and its formula."""
    if is_gated:
        # A gated MLP has three matrices instead of two: 2/3 of the width keeps the size.
        width = int(4 * hidden_size * 2 / 3) // 64 * 64
        return width, f"2/3 of 4 * hidden {hidden_size}, rounded down to a multiple of 64"
    return 4 * hidden_size, f"4 * hidden {hidden_size}"


def _model(v: _Derived) -> None:
    hidden, heads = v["hidden_size"], v["num_attention_heads"]
    if v["ffn_hidden_size"] is None and hidden:
        v.note("ffn_hidden_size", *ffn_width(hidden, is_gated=v["swiglu"]))
    if v["kv_channels"] is None and hidden and heads and hidden % heads == 0:
        v.note("kv_channels", hidden // heads, f"hidden {hidden} / {heads} heads")
    if not v["group_query_attention"] and heads:
        v.note("num_query_groups", heads, "one per query head without --group-query-attention")
    if v["max_position_embeddings"] is None and v["seq_length"]:
        v.note("max_position_embeddings", v["seq_length"], "--seq-length")
    v["encoder_seq_length"] = v["seq_length"]
    if v["use_rotary_position_embeddings"] and v["position_embedding_type"] != "rope":
        v.note("position_embedding_type", "rope", "--use-rotary-position-embeddings")
    if v["multi_latent_attention"] and v["position_embedding_type"] == "learned_absolute":
        v.note("position_embedding_type", "rope", "part of each head of latent attention rotates")
    if not v["add_position_embedding"] and v["position_embedding_type"] == "learned_absolute":
        v.note("position_embedding_type", "none", "--no-position-embedding")
    if _scales_scores_by_yarn(v):
        scale = yarn_softmax_scale(v["kv_channels"], v["rotary_scaling_factor"], v["mscale"])
        v.note("softmax_scale", scale, "YaRN's temperature over sqrt(kv-channels)")
    if v["no_rope_freq"] is not None and v["num_layers"]:
        pattern = expand_layer_pattern(v["no_rope_freq"], v["num_layers"])
        v.note("no_rope_freq", pattern, "one 0/1 per layer")
    if v["recompute_activations"] and v["recompute_granularity"] is None:
        v.note("recompute_granularity", "selective", "--recompute-activations")
    if v["apply_query_key_layer_scaling"] and not v["attention_softmax_in_fp32"]:
        v.note("attention_softmax_in_fp32", True, "--apply-query-key-layer-scaling")


def _scales_scores_by_yarn(v: _Derived) -> bool:
    is_yarn = v["position_embedding_type"] == "yarn" and not v["multi_latent_attention"]
    return is_yarn and v["softmax_scale"] is None and bool(v["kv_channels"])


def _precision(v: _Derived) -> None:
    import torch

    if v["no_weight_decay_cond_type"] is not None:
        v.note("apply_wd_to_qk_layernorm", True, "--no-weight-decay-cond-type")
    half = {(True, False): torch.bfloat16, (False, True): torch.float16}
    dtype = half.get((v["bf16"], v["fp16"]), torch.float32)
    if dtype == torch.float32:
        v["params_dtype"] = dtype
    else:
        v.note("params_dtype", dtype, "--bf16" if v["bf16"] else "--fp16")
    if v["main_grads_dtype"] == "bf16" and v["bf16"] and not v["grad_reduce_in_bf16"]:
        v.note("grad_reduce_in_bf16", True, "--main-grads-dtype bf16")
    if v["bf16"] and not v["grad_reduce_in_bf16"]:
        v.note(
            "accumulate_allreduce_grads_in_fp32",
            True,
            "bf16 sums lose bits; --grad-reduce-in-bf16 turns it off",
        )
    # fp32 weights have fp32 gradients anyway.
    v["grad_reduce_in_fp32"] = bool(v["accumulate_allreduce_grads_in_fp32"])


def _batch(v: _Derived) -> None:
    micro, dp = v["micro_batch_size"], v["data_parallel_size"]
    phases = batch_size_phases(v)
    if v["global_batch_size"] is None and phases:
        v.note("global_batch_size", phases[-1][1], "the last of --step-batch-size-schedule")
    if v["global_batch_size"] is None and micro:
        v.note("global_batch_size", micro * dp, f"micro batch {micro} * {dp} replicas")
    size, ramp = v["global_batch_size"], v["rampup_batch_size"]
    if v["decrease_batch_size_if_needed"] and size and micro and size >= micro * dp:
        shared = size // (micro * dp) * micro * dp
        if shared != size:
            v.note(
                "global_batch_size", shared, f"{size} rounded down to a multiple of {micro * dp}"
            )
            size = shared
    ramp_works = ramp is None or (min(ramp) > 0 and size and ramp[0] <= size)
    if size and size > 0 and ramp_works:
        if v["train_iters"] is None and v["train_samples"] is not None:
            v["is_sample_based"] = True
            asked = v["train_samples"]
            steps = (
                steps_in_phases(asked, phases) if phases else steps_for_samples(asked, ramp, size)
            )
            v.note("train_iters", steps, f"{asked} samples in batches of {size}")
        elif v["train_iters"] is not None and v["train_samples"] is None:
            v["is_sample_based"] = False
            asked = v["train_iters"]
            samples = (
                samples_in_phases(asked, phases) if phases else samples_for_steps(asked, ramp, size)
            )
            v.note("train_samples", samples, f"{asked} steps of {size} samples")
    v.setdefault("is_sample_based", v["train_samples"] is not None)


def batch_size_phases(values: Mapping[str, Any]) -> Phases | None:
    """Return the phases of --step-batch-size-schedule; None without it, or where it is wrong."""
    text, length = values["step_batch_size_schedule"], values["seq_length"]
    if text is None or not length:
        return None
    try:
        return parse_phases(text, length)
    except ValueError:
        return None


def _schedule(v: _Derived) -> None:
    """Learning rate and weight decay count samples, so that a growing batch does not bend them."""
    size = v["global_batch_size"] or 0
    if v["is_sample_based"]:
        decay = v["lr_decay_samples"] or v["train_samples"] or 0
        warmup, wsd = v["lr_warmup_samples"], v["lr_wsd_decay_samples"]
        unit = "samples"
    else:
        decay = (v["lr_decay_iters"] or v["train_iters"] or 0) * size
        warmup = v["lr_warmup_iters"] * size
        wsd = v["lr_wsd_decay_iters"] * size if v["lr_wsd_decay_iters"] is not None else None
        unit = f"steps * {size} samples"
    v.note("lr_decay_steps", decay, f"decay length in samples, from {unit}")
    if v["lr_warmup_fraction"] is not None:
        warmup = int(v["lr_warmup_fraction"] * decay)
        v.note("lr_warmup_steps", warmup, f"{v['lr_warmup_fraction']} of the decay length")
    else:
        v["lr_warmup_steps"] = warmup
    v["wsd_decay_steps"] = wsd
    changes = v["weight_decay_incr_style"] != "constant"
    v["wd_incr_steps"] = (v["train_samples"] or 0) if changes else 0
    for name in ("start_weight_decay", "end_weight_decay"):
        if v["weight_decay_incr_style"] == "constant":
            v[name] = v["weight_decay"]


def _data(v: _Derived) -> None:
    v["dataloader_type"] = v["dataloader_type"] or "single"
    sources = ("data_path", "data_args_path", "per_split_data_args_path", "train_data_path",
               "valid_data_path", "test_data_path")  # fmt: skip
    if not v["mock_data"] and not any(v[name] for name in sources):
        v.note("mock_data", True, "no flag names a corpus")
    per_split = ("per_split_data_args_path", *sources[3:])
    if v["split"] is None and not any(v[name] for name in per_split):
        v.note("split", "969,30,1", "Megatron's default shares of train, validation and test")


def _tokenizer(v: _Derived) -> None:
    if v["tokenizer_type"] is None and (v["mock_data"] or v["vocab_size"] is not None):
        v.note("tokenizer_type", "NullTokenizer", "synthetic samples, or ids of --vocab-size")
        if v["vocab_size"] is None:
            v.note("vocab_size", 50257, "that of GPT-2, as none is given")


def _machine(v: _Derived) -> None:
    backend = device.communication_backend()
    if v["distributed_backend"] == "nccl" and backend != "nccl":
        v.note("distributed_backend", backend, "there is no GPU here")
    if v["transformer_impl"] == "transformer_engine" and not _has_engine_layers():
        v.note("transformer_impl", "local", "there are no layers of Transformer Engine here")
    elif v["transformer_impl"] == "transformer_engine" and v["multi_latent_attention"]:
        v.note("transformer_impl", "local", "only local layers have latent attention")
    v["iteration"] = 0
    v["consumed_train_samples"] = v["consumed_valid_samples"] = 0


def _has_engine_layers() -> bool:
    """Return whether Transformer Engine is installed, and the backend that builds layers of it."""
    return (
        device.device_type() == "cuda"
        and optional_imports.has("transformer_engine")
        and optional_imports.has("megatron.core.extensions")
        and optional_imports.has("megatron.core.extensions.transformer_engine")
    )


def pad_vocabulary(size: int, *, multiple: int, tp: int) -> int:
    """Return `size` rounded up so that each tensor-parallel rank owns equal, aligned rows."""
    step = multiple * tp
    return -(-size // step) * step


def resolve_vocabulary(run: ResolvedRun, tokenizer_size: int) -> ResolvedRun:
    """Derive the embedding's rows from the tokenizer's number of ids."""
    size, formula = tokenizer_size, "the tokenizer's number of ids"
    derived = []
    if run.load_hf is not None and run.vocab_size is not None and run.vocab_size < size:
        # Rows that the model has not would be further classes of its loss.
        formula = (
            f"the model of --load-hf; the tokenizer has {size} ids, of which those from"
            f" {run.vocab_size} on stop the run"
        )
        size = run.vocab_size
    elif run.vocab_size is not None and run.vocab_size > size:
        size, formula = run.vocab_size, "--vocab-size"
    derived.append(Derivation("unpadded_vocab_size", size, formula))
    if run.padded_vocab_size is None:
        tp, multiple = run.tensor_model_parallel_size, run.make_vocab_size_divisible_by
        padded = pad_vocabulary(size, multiple=multiple, tp=tp)
        derived.append(
            Derivation(
                "padded_vocab_size",
                padded,
                f"{size} rounded up to a multiple of {multiple} * tp {tp}",
            )
        )
    return run.with_values(*derived)
