"""Derive every setting that the user did not give. Settings are derived only here.

The log of a run shows each derived value with its formula. Derivation never fails: a value that
cannot be derived stays None, and the rules (`megatron.training.rules`) report it. `resolve` is a
pure function of its arguments, which include the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.model_settings import LatentAttentionSettings, ModelSettings
from megatron.core.pipeline_parallel.layout import virtual_stages_of
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.settings.flag_expressions import expand_layer_pattern
from megatron.core.transformer.yarn import yarn_softmax_scale
from megatron.training.config.checkpoint import CheckpointSettings
from megatron.training.config.data import DataSettings, TokenizerSettings
from megatron.training.config.optimizer import OptimizerSettings, PrecisionSettings
from megatron.training.config.parallelism import DataParallelSettings, ParallelismSettings
from megatron.training.config.resolve_batch import resolve_batch, resolve_lengths
from megatron.training.config.resolved import DerivationLog, Machine, ResolvedRun, Topology
from megatron.training.config.run import GROUP_CLASSES, RunConfig


def resolve(
    config: RunConfig,
    *,
    world_size: int,
    machine: Machine | None = None,
    extra: Mapping[str, object] | None = None,
    notes: tuple[str, ...] = (),
) -> ResolvedRun:
    """Derive the settings of a run on `world_size` ranks, except the size of the vocabulary.

    Args:
        machine: machine of this rank. Default: rank 0 on a machine without GPUs.
        extra: arguments that a script added to the parser.
        notes: log lines on settings in the user's files that have no effect.
    """
    log = DerivationLog()
    machine = machine or Machine()
    config = _stacks(_hybrid(config, log), log)
    topology = _topology(config.parallelism, world_size, machine.rank, log)
    parallelism = _parallelism(config.parallelism, config.model.num_layers, log)
    log.is_of_training = True
    ddp = _sharding(config.ddp, config.optimizer.optimizer, log)
    log.is_of_training = False
    model = _model(config.model, config.latent_attention, log)
    precision = _recompute(config.precision, log)
    model = _softmax(model, log)
    optimizer = config.optimizer
    if optimizer.optimizer == "dist_muon":
        formula = "dist_muon is muon with its work distributed over replicas"
        optimizer = log.derived(optimizer, replace(optimizer, optimizer="muon"), formula)
    optimizer = _decayed_norms(optimizer, log)
    precision = _dtype(precision, log)
    ddp = _gradient_dtype(ddp, optimizer, precision, log)
    log.is_of_training = True
    schedule = resolve_batch(config.schedule, model.seq_length, topology.data_parallel_size, log)
    schedule = resolve_lengths(schedule, optimizer.weight_decay_incr_style, log)
    if optimizer.weight_decay_incr_style == "constant":
        decay = optimizer.weight_decay
        optimizer = replace(optimizer, start_weight_decay=decay, end_weight_decay=decay)
    data = _data(config.data, log)
    log.is_of_training = False
    tokenizer = _tokenizer(config.tokenizer, data.mock_data, log)
    checkpoint = _checkpoint(config.checkpoint, log)
    parallelism = _backend(parallelism, machine, log)
    model = _layers(model, config.latent_attention.multi_latent_attention, machine, log)
    derived: dict[str, Any] = {
        "model": model,
        "parallelism": parallelism,
        "ddp": ddp,
        "schedule": schedule,
        "optimizer": optimizer,
        "precision": precision,
        "data": data,
        "tokenizer": tokenizer,
        "checkpoint": checkpoint,
    }
    return ResolvedRun(
        **{group: getattr(config, group) for group in GROUP_CLASSES} | derived,
        config=config,
        topology=topology,
        derivations=tuple(log.derivations),
        extra=dict(extra or {}),
        notes=notes,
    )


def _hybrid(config: RunConfig, log: DerivationLog) -> RunConfig:
    """Return the config with the settings that follow from --hybrid-layer-pattern."""
    try:
        pattern = config.model.pattern
    except ConfigError:
        return config  # the model's own check reports it
    if pattern is None:
        return config
    formula = "--hybrid-layer-pattern"
    model, experts, parallelism = config.model, config.experts, config.parallelism
    if not model.num_layers:
        model = log.derived(model, replace(model, num_layers=len(pattern.layers)), formula)
    if any(pattern.layers_with_experts):
        freq = pattern.layers_with_experts
        experts = log.derived(experts, replace(experts, moe_layer_freq=freq), formula)
    layout = pattern.pipeline_layout
    if layout is not None and parallelism.pipeline_model_parallel_layout is None:
        after = replace(parallelism, pipeline_model_parallel_layout=layout)
        parallelism = log.derived(parallelism, after, formula)
    latent = config.latent_attention
    if pattern.later and latent.mtp_num_layers is None:
        latent = log.derived(latent, replace(latent, mtp_num_layers=len(pattern.later)), formula)
    return replace(
        config, model=model, experts=experts, parallelism=parallelism, latent_attention=latent
    )


def _stacks(config: RunConfig, log: DerivationLog) -> RunConfig:
    """Return the config with `num_layers` counting the layers of encoder and decoder."""
    model, asked_of_decoder = config.model, config.encoders.decoder_num_layers
    num_layers, num_encoder = model.num_layers or 0, model.encoder_num_layers or 0
    if config.encoders.traits.has_two_stacks:
        num_encoder = num_encoder or num_layers
        if num_layers > num_encoder:
            return config  # a checkpoint or a Hugging Face model has set the sum
        num_decoder = num_encoder if asked_of_decoder is None else asked_of_decoder
        after = replace(model, num_layers=num_encoder + num_decoder, encoder_num_layers=num_encoder)
        formula = f"{num_encoder} of the encoder + {num_decoder} of the decoder"
    elif num_encoder and num_layers in (0, num_encoder):
        after = replace(model, num_layers=num_encoder, encoder_num_layers=None)
        formula = "--encoder-num-layers"
    else:
        return config
    return replace(config, model=log.derived(model, after, formula))


def _topology(
    asked: ParallelismSettings, world_size: int, rank: int, log: DerivationLog
) -> Topology:
    tp, pp = asked.tensor_model_parallel_size, asked.pipeline_model_parallel_size
    cp = asked.context_parallel_size
    replicas = max(world_size // max(tp * pp * cp, 1), 1)
    log.note("data_parallel_size", replicas, f"{world_size} ranks / (tp {tp} * pp {pp} * cp {cp})")
    return Topology(
        world_size=world_size,
        rank=rank,
        data_parallel_size=replicas,
        total_model_size=tp * pp,
        model_parallel_size=tp * pp,
        rank_order="tp-cp-ep-pp-dp" if asked.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )


def _parallelism(
    asked: ParallelismSettings, num_layers: int, log: DerivationLog
) -> ParallelismSettings:
    tp, pp = asked.tensor_model_parallel_size, asked.pipeline_model_parallel_size
    found = asked
    if found.sequence_parallel and tp == 1:
        after = replace(found, sequence_parallel=False)
        found = log.derived(found, after, "tp 1 splits no sequence")
    if found.expert_tensor_parallel_size is None:
        found = replace(found, expert_tensor_parallel_size=tp)
    chunks, formula = _virtual_stages(found, num_layers)
    if chunks is not None and chunks > 1:
        found = log.derived(
            found, replace(found, virtual_pipeline_model_parallel_size=chunks), formula
        )
    if found.microbatch_group_size_per_vp_stage is None:
        found = replace(found, microbatch_group_size_per_vp_stage=pp)
    return found


def _virtual_stages(asked: ParallelismSettings, num_layers: int) -> tuple[int | None, str]:
    """Return the number of model chunks per rank, and its formula."""
    pp, layout = asked.pipeline_model_parallel_size, asked.pipeline_model_parallel_layout
    if layout is not None:
        return virtual_stages_of(layout, pp), "stages of the layout / pp"
    decided = schedule_named(asked.pipeline_schedule).num_chunks
    if decided is not None and pp > 1:
        chunks = decided if decided > 1 else None
        return chunks, f"--pipeline-schedule {asked.pipeline_schedule}"
    if asked.num_virtual_stages_per_pipeline_rank is not None:
        return asked.num_virtual_stages_per_pipeline_rank, "--num-virtual-stages-per-pipeline-rank"
    per_chunk = asked.num_layers_per_virtual_pipeline_stage
    if not per_chunk or not num_layers:
        return None, ""
    counted = (
        num_layers
        + asked.account_for_embedding_in_pipeline_split
        + asked.account_for_loss_in_pipeline_split
    )
    return counted // pp // per_chunk, f"{counted} layers / pp {pp} / {per_chunk} layers a chunk"


def _sharding(
    asked: DataParallelSettings, optimizer: str, log: DerivationLog
) -> DataParallelSettings:
    """Derive the sharding strategy from the flags that imply it."""
    strategy: str | None = asked.data_parallel_sharding_strategy
    formula = "--data-parallel-sharding-strategy"
    if strategy is None and asked.use_megatron_fsdp:
        strategy, formula = "optim_grads_params", "--use-megatron-fsdp"
    elif strategy is None and asked.use_distributed_optimizer:
        strategy, formula = "optim", "--use-distributed-optimizer"
    elif strategy is None and optimizer == "dist_muon":
        strategy, formula = "optim", "--optimizer dist_muon"
    found = log.derived(
        asked,
        replace(asked, data_parallel_sharding_strategy=strategy or "no_shard"),
        formula if strategy else "default",
    )
    if asked.use_megatron_fsdp and strategy == "no_shard":
        return log.derived(
            found,
            replace(found, use_distributed_optimizer=False, overlap_param_gather=False),
            f"{formula} {strategy}",
        )
    if found.data_parallel_sharding_strategy != "no_shard":
        found = log.derived(
            found, replace(found, use_distributed_optimizer=True), f"{formula} {strategy}"
        )
    return found


def ffn_width(hidden_size: int, *, is_gated: bool) -> tuple[int, str]:
    """Return the default MLP width and its formula."""
    if is_gated:
        # A gated MLP has three matrices instead of two: 2/3 of the width keeps the size.
        width = int(4 * hidden_size * 2 / 3) // 64 * 64
        return width, f"2/3 of 4 * hidden {hidden_size}, rounded down to a multiple of 64"
    return 4 * hidden_size, f"4 * hidden {hidden_size}"


def _model(
    asked: ModelSettings, latent: LatentAttentionSettings, log: DerivationLog
) -> ModelSettings:
    hidden, heads, found = asked.hidden_size, asked.num_attention_heads, asked
    if found.ffn_hidden_size is None and hidden:
        width, formula = ffn_width(hidden, is_gated=found.swiglu)
        found = log.derived(found, replace(found, ffn_hidden_size=width), formula)
    if found.kv_channels is None and hidden and heads and hidden % heads == 0:
        found = log.derived(
            found, replace(found, kv_channels=hidden // heads), f"hidden {hidden} / {heads} heads"
        )
    if not found.group_query_attention and heads:
        after = replace(found, num_query_groups=heads)
        found = log.derived(found, after, "one per query head without --group-query-attention")
    if found.max_position_embeddings is None and found.seq_length:
        found = log.derived(
            found, replace(found, max_position_embeddings=found.seq_length), "--seq-length"
        )
    found = _positions(found, latent, log)
    is_yarn = found.position_embedding_type == "yarn" and not latent.multi_latent_attention
    if is_yarn and found.softmax_scale is None and found.kv_channels:
        scale = yarn_softmax_scale(found.kv_channels, latent.rotary_scaling_factor, latent.mscale)
        formula = "YaRN's temperature over sqrt(kv-channels)"
        if found.use_mup:
            scale *= found.attention_scale(found.kv_channels) * found.kv_channels**0.5
            formula = "YaRN's temperature times muP's scale of attention"
        found = log.derived(found, replace(found, softmax_scale=scale), formula)
    if found.no_rope_freq is not None and found.num_layers:
        pattern = expand_layer_pattern(found.no_rope_freq, found.num_layers)
        found = log.derived(found, replace(found, no_rope_freq=pattern), "one 0/1 per layer")
    return found


def _positions(
    asked: ModelSettings, latent: LatentAttentionSettings, log: DerivationLog
) -> ModelSettings:
    found = asked
    for kind, applies, formula in (
        (
            "rope",
            found.use_rotary_position_embeddings
            and found.position_embedding_type not in ("rope", "mrope"),
            "--use-rotary-position-embeddings",
        ),
        (
            "rope",
            latent.multi_latent_attention and found.position_embedding_type == "learned_absolute",
            "latent attention rotates part of each head",
        ),
        (
            "none",
            not found.add_position_embedding
            and found.position_embedding_type == "learned_absolute",
            "--no-position-embedding",
        ),
    ):
        if applies:
            return log.derived(found, replace(found, position_embedding_type=kind), formula)
    return found


def _recompute(asked: PrecisionSettings, log: DerivationLog) -> PrecisionSettings:
    if not asked.recompute_activations or asked.recompute_granularity is not None:
        return asked
    after = replace(asked, recompute_granularity="selective")
    return log.derived(asked, after, "--recompute-activations")


def _softmax(asked: ModelSettings, log: DerivationLog) -> ModelSettings:
    if not asked.apply_query_key_layer_scaling:
        return asked
    after = replace(asked, attention_softmax_in_fp32=True)
    return log.derived(asked, after, "--apply-query-key-layer-scaling")


def _decayed_norms(asked: OptimizerSettings, log: DerivationLog) -> OptimizerSettings:
    if asked.no_weight_decay_cond_type is None:
        return asked
    after = replace(asked, apply_wd_to_qk_layernorm=True)
    return log.derived(asked, after, "--no-weight-decay-cond-type")


def _dtype(asked: PrecisionSettings, log: DerivationLog) -> PrecisionSettings:
    half = {(True, False): torch.bfloat16, (False, True): torch.float16}
    dtype = half.get((asked.bf16, asked.fp16), torch.float32)
    after = replace(asked, params_dtype=dtype)
    return log.derived(asked, after, "--bf16" if asked.bf16 else "--fp16")


def _gradient_dtype(
    asked: DataParallelSettings,
    optimizer: OptimizerSettings,
    precision: PrecisionSettings,
    log: DerivationLog,
) -> DataParallelSettings:
    found = asked
    if precision.bf16:
        for flag, wanted in (
            ("--main-grads-dtype", optimizer.main_grads_dtype == torch.bfloat16),
            ("--megatron-fsdp-main-grads-dtype", asked.megatron_fsdp_main_grads_dtype == "bf16"),
            ("--megatron-fsdp-grad-comm-dtype", asked.megatron_fsdp_grad_comm_dtype == "bf16"),
        ):
            if wanted:
                after = replace(found, grad_reduce_in_bf16=True)
                found = log.derived(found, after, f"{flag} bf16")
    if precision.bf16 and not found.grad_reduce_in_bf16:
        found = log.derived(
            found,
            replace(found, accumulate_allreduce_grads_in_fp32=True),
            "bf16 sums lose bits; --grad-reduce-in-bf16 switches fp32 off",
        )
    if found.grad_reduce_in_bf16 and found.accumulate_allreduce_grads_in_fp32:
        after = replace(found, accumulate_allreduce_grads_in_fp32=False)
        found = log.derived(found, after, "--grad-reduce-in-bf16 takes precedence")
    # fp32 weights have fp32 gradients anyway.
    return replace(found, grad_reduce_in_fp32=found.accumulate_allreduce_grads_in_fp32)


def _data(asked: DataSettings, log: DerivationLog) -> DataSettings:
    found = replace(asked, dataloader_type=asked.dataloader_type or "single")
    per_split = (
        asked.per_split_data_args_path, asked.train_data_path, asked.valid_data_path,
        asked.test_data_path,
    )  # fmt: skip
    if not asked.mock_data and not any((asked.data_path, asked.data_args_path, *per_split)):
        found = log.derived(found, replace(found, mock_data=True), "no flag names a corpus")
    if asked.split is None and not any(per_split):
        formula = "Megatron's default shares of train, validation and test"
        found = log.derived(found, replace(found, split="969,30,1"), formula)
    return found


def _tokenizer(asked: TokenizerSettings, mock_data: bool, log: DerivationLog) -> TokenizerSettings:
    if asked.tokenizer_type is None and asked.vocab_file and asked.merge_file:
        after = replace(asked, tokenizer_type="GPT2BPETokenizer")
        return log.derived(asked, after, "--vocab-file and --merge-file are given")
    if asked.tokenizer_type is not None or not (mock_data or asked.vocab_size is not None):
        return asked
    formula = "synthetic samples, or ids of --vocab-size"
    found = log.derived(asked, replace(asked, tokenizer_type="NullTokenizer"), formula)
    if found.vocab_size is None:
        after = replace(found, vocab_size=50257)
        found = log.derived(found, after, "size of GPT-2, as --vocab-size is not given")
    return found


def _checkpoint(asked: CheckpointSettings, log: DerivationLog) -> CheckpointSettings:
    if asked.save is not None or asked.save_interval is None:
        return asked
    after = replace(asked, save_interval=None)
    return log.derived(asked, after, "no checkpoint is written without --save")


def _backend(
    asked: ParallelismSettings, machine: Machine, log: DerivationLog
) -> ParallelismSettings:
    if asked.distributed_backend != "nccl":
        return asked
    after = replace(asked, distributed_backend=machine.communication_backend)
    return log.derived(asked, after, "there is no GPU here")


def _layers(
    asked: ModelSettings, multi_latent_attention: bool, machine: Machine, log: DerivationLog
) -> ModelSettings:
    local = replace(asked, transformer_impl="local")
    if asked.transformer_impl == "inference_optimized":
        return local
    if asked.transformer_impl == "local":
        return asked
    if not machine.has_engine_layers:
        return log.derived(asked, local, "Transformer Engine is not available")
    if multi_latent_attention:
        return log.derived(asked, local, "only local layers have latent attention")
    return asked
