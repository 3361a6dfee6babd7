"""Derive every setting that the user did not give. Settings are derived only here.

The log of a run shows each derived value with its formula. Derivation never fails: a value that
cannot be derived stays None, and the rules (`megatron.training.rules`) report it. `resolve` is a
pure function of its arguments, which include the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.pipeline_parallel.layout import virtual_stages_of
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.settings.flag_expressions import expand_layer_pattern
from megatron.core.transformer.config.layer_sizes import PATH_FLAG, read_file
from megatron.core.transformer.yarn import yarn_softmax_scale
from megatron.training.config.resolve_batch import resolve_batch, resolve_lengths
from megatron.training.config.resolved import Draft, Machine, ResolvedRun, Topology
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
    machine = machine or Machine()
    groups = {group: getattr(config, group) for group in GROUP_CLASSES}
    draft = Draft(ResolvedRun(**groups, extra=dict(extra or {}), notes=notes))
    _hybrid(draft)
    _stacks(draft)
    asked = RunConfig(**{group: getattr(draft.run, group) for group in GROUP_CLASSES})
    draft.run = replace(draft.run, config=asked)
    _topology(draft, world_size, machine.rank)
    _parallelism(draft)
    draft.is_of_training = True
    _sharding(draft)
    draft.is_of_training = False
    _model(draft)
    _precision(draft)
    draft.is_of_training = True
    resolve_batch(draft)
    resolve_lengths(draft)
    optimizer = draft.run.optimizer
    if optimizer.weight_decay_incr_style == "constant":
        decay = optimizer.weight_decay
        draft.set(start_weight_decay=decay, end_weight_decay=decay)
    _data(draft)
    draft.is_of_training = False
    _tokenizer(draft)
    if draft.run.checkpoint.save is None:
        draft.set("no checkpoint is written without --save", save_interval=None)
    if draft.run.parallelism.distributed_backend == "nccl":
        draft.set("there is no GPU here", distributed_backend=machine.communication_backend)
    _layers(draft, machine)
    return replace(draft.run, derivations=tuple(draft.derivations))


def _hybrid(draft: Draft) -> None:
    """Derive the settings that follow from --hybrid-layer-pattern."""
    run = draft.run
    try:
        pattern = run.model.pattern
    except ConfigError:
        return  # the model's own check reports it
    if pattern is None:
        return
    formula = "--hybrid-layer-pattern"
    if not run.model.num_layers:
        draft.set(formula, num_layers=len(pattern.kinds))
    if any(pattern.layers_with_experts):
        draft.set(formula, moe_layer_freq=pattern.layers_with_experts)
    layout = pattern.pipeline_layout
    if layout is not None and run.parallelism.pipeline_model_parallel_layout is None:
        draft.set(formula, pipeline_model_parallel_layout=layout)
    if pattern.later and run.latent_attention.mtp_num_layers is None:
        draft.set(formula, mtp_num_layers=len(pattern.later))


def _stacks(draft: Draft) -> None:
    """Make `num_layers` count the layers of encoder and decoder."""
    model, encoders = draft.run.model, draft.run.encoders
    num_layers, num_encoder = model.num_layers or 0, model.encoder_num_layers or 0
    if encoders.traits.has_two_stacks:
        num_encoder = num_encoder or num_layers
        if num_layers > num_encoder:
            return  # a checkpoint or a Hugging Face model has set the sum
        asked = encoders.decoder_num_layers
        num_decoder = num_encoder if asked is None else asked
        formula = f"{num_encoder} of the encoder + {num_decoder} of the decoder"
        total = num_encoder + num_decoder
        draft.set(formula, num_layers=total, encoder_num_layers=num_encoder)
    elif num_encoder and num_layers in (0, num_encoder):
        draft.set("--encoder-num-layers", num_layers=num_encoder, encoder_num_layers=None)


def _topology(draft: Draft, world_size: int, rank: int) -> None:
    sizes = draft.run.parallelism
    tp, pp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    cp = sizes.context_parallel_size
    replicas = max(world_size // max(tp * pp * cp, 1), 1)
    formula = f"{world_size} ranks / (tp {tp} * pp {pp} * cp {cp})"
    draft.note("data_parallel_size", replicas, formula)
    topology = Topology(
        world_size=world_size,
        rank=rank,
        data_parallel_size=replicas,
        total_model_size=tp * pp,
        model_parallel_size=tp * pp,
        rank_order="tp-cp-ep-pp-dp" if sizes.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )
    draft.run = replace(draft.run, topology=topology)


def _parallelism(draft: Draft) -> None:
    asked = draft.run.parallelism
    tp = asked.tensor_model_parallel_size
    if tp == 1:
        draft.set("tp 1 splits no sequence", sequence_parallel=False)
    if asked.batch_invariant_mode:
        draft.set("--batch-invariant-mode", layout_invariant_mode=True)
    if asked.expert_tensor_parallel_size is None:
        draft.set(expert_tensor_parallel_size=tp)
    chunks, formula = _virtual_stages(draft.run)
    if chunks is not None and chunks > 1:
        draft.set(formula, virtual_pipeline_model_parallel_size=chunks)
    if asked.microbatch_group_size_per_vp_stage is None:
        draft.set(microbatch_group_size_per_vp_stage=asked.pipeline_model_parallel_size)


def _virtual_stages(run: ResolvedRun) -> tuple[int | None, str]:
    """Return the number of model chunks per rank, and its formula."""
    asked = run.parallelism
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
    if not per_chunk or not run.model.num_layers:
        return None, ""
    counted = (
        run.model.num_layers
        + asked.account_for_embedding_in_pipeline_split
        + asked.account_for_loss_in_pipeline_split
    )
    return counted // pp // per_chunk, f"{counted} layers / pp {pp} / {per_chunk} layers a chunk"


def _sharding(draft: Draft) -> None:
    """Derive the sharding strategy from the flags that imply it."""
    asked = draft.run.ddp
    strategy: str | None = asked.data_parallel_sharding_strategy
    formula = "--data-parallel-sharding-strategy"
    if strategy is None and asked.use_megatron_fsdp:
        strategy, formula = "optim_grads_params", "--use-megatron-fsdp"
    elif strategy is None and asked.use_distributed_optimizer:
        strategy, formula = "optim", "--use-distributed-optimizer"
    elif strategy is None and draft.run.optimizer.optimizer == "dist_muon":
        strategy, formula = "optim", "--optimizer dist_muon"
    cause = formula if strategy else "default"
    draft.set(cause, data_parallel_sharding_strategy=strategy or "no_shard")
    formula = f"{formula} {strategy}"
    if asked.use_megatron_fsdp and strategy == "no_shard":
        draft.set(formula, use_distributed_optimizer=False, overlap_param_gather=False)
    elif strategy not in (None, "no_shard"):
        draft.set(formula, use_distributed_optimizer=True)


def ffn_width(hidden_size: int, *, is_gated: bool) -> tuple[int, str]:
    """Return the default MLP width and its formula."""
    if is_gated:
        # A gated MLP has three matrices instead of two: 2/3 of the width keeps the size.
        width = int(4 * hidden_size * 2 / 3) // 64 * 64
        return width, f"2/3 of 4 * hidden {hidden_size}, rounded down to a multiple of 64"
    return 4 * hidden_size, f"4 * hidden {hidden_size}"


def _model(draft: Draft) -> None:
    asked, latent = draft.run.model, draft.run.latent_attention
    hidden, heads = asked.hidden_size, asked.num_attention_heads
    if asked.ffn_hidden_size is None and hidden:
        width, formula = ffn_width(hidden, is_gated=asked.swiglu)
        draft.set(formula, ffn_hidden_size=width)
    if asked.kv_channels is None and hidden and heads and hidden % heads == 0:
        draft.set(f"hidden {hidden} / {heads} heads", kv_channels=hidden // heads)
    if not asked.group_query_attention and heads:
        draft.set("one per query head without --group-query-attention", num_query_groups=heads)
    if asked.max_position_embeddings is None and asked.seq_length:
        draft.set("--seq-length", max_position_embeddings=asked.seq_length)
    kind = asked.position_embedding_type
    if asked.use_rotary_position_embeddings and kind not in ("rope", "mrope"):
        draft.set("--use-rotary-position-embeddings", position_embedding_type="rope")
    elif latent.multi_latent_attention and kind == "learned_absolute":
        formula = "latent attention rotates part of each head"
        draft.set(formula, position_embedding_type="rope")
    elif not asked.add_position_embedding and kind == "learned_absolute":
        draft.set("--no-position-embedding", position_embedding_type="none")
    model = draft.run.model
    is_yarn = model.position_embedding_type == "yarn" and not latent.multi_latent_attention
    if is_yarn and model.softmax_scale is None and model.kv_channels:
        scale = yarn_softmax_scale(
            model.kv_channels,
            latent.rotary_scaling_factor,
            latent.mscale,
            latent.mscale_all_dim,
        )
        plain = model.attention_scale(model.kv_channels)
        formula = "YaRN's temperature over sqrt(kv-channels)"
        if model.use_mup:
            scale *= plain * model.kv_channels**0.5
            formula = "YaRN's temperature times muP's scale of attention"
        draft.set(formula, softmax_scale=scale)
        if model.rotary_base_local is not None and model.softmax_scale_local is None:
            # Layers with a window have positions without YaRN, so their scores have no temperature.
            draft.set("1 / sqrt(kv-channels), without YaRN", softmax_scale_local=plain)
    path = model.heterogeneous_layers_config_path
    if path and not model.heterogeneous_layers_config_encoded_json:
        draft.set(PATH_FLAG, heterogeneous_layers_config_encoded_json=read_file(path))
    if model.no_rope_freq is not None and model.num_layers:
        pattern = expand_layer_pattern(model.no_rope_freq, model.num_layers)
        draft.set("one 0/1 per layer", no_rope_freq=pattern)


def _precision(draft: Draft) -> None:
    """Derive recomputation, decayed weights, and the dtypes of weights and gradients."""
    precision, optimizer, ddp = draft.run.precision, draft.run.optimizer, draft.run.ddp
    if precision.recompute_activations and precision.recompute_granularity is None:
        draft.set("--recompute-activations", recompute_granularity="selective")
    if draft.run.model.apply_query_key_layer_scaling:
        draft.set("--apply-query-key-layer-scaling", attention_softmax_in_fp32=True)
    if optimizer.optimizer == "dist_muon":
        draft.set("dist_muon is muon with its work distributed over replicas", optimizer="muon")
    if optimizer.no_weight_decay_cond_type is not None:
        draft.set("--no-weight-decay-cond-type", apply_wd_to_qk_layernorm=True)
    half = {(True, False): torch.bfloat16, (False, True): torch.float16}
    dtype = half.get((precision.bf16, precision.fp16), torch.float32)
    draft.set("--bf16" if precision.bf16 else "--fp16", params_dtype=dtype)
    if precision.bf16:
        for flag, wanted in (
            ("--main-grads-dtype", optimizer.main_grads_dtype == torch.bfloat16),
            ("--megatron-fsdp-main-grads-dtype", ddp.megatron_fsdp_main_grads_dtype == "bf16"),
            ("--megatron-fsdp-grad-comm-dtype", ddp.megatron_fsdp_grad_comm_dtype == "bf16"),
        ):
            if wanted:
                draft.set(f"{flag} bf16", grad_reduce_in_bf16=True)
        if not draft.run.ddp.grad_reduce_in_bf16:
            formula = "bf16 sums lose bits; --grad-reduce-in-bf16 switches fp32 off"
            draft.set(formula, accumulate_allreduce_grads_in_fp32=True)
    if draft.run.ddp.grad_reduce_in_bf16:
        formula = "--grad-reduce-in-bf16 takes precedence"
        draft.set(formula, accumulate_allreduce_grads_in_fp32=False)
    # fp32 weights have fp32 gradients anyway.
    draft.set(grad_reduce_in_fp32=draft.run.ddp.accumulate_allreduce_grads_in_fp32)


def _data(draft: Draft) -> None:
    asked = draft.run.data
    draft.set(dataloader_type=asked.dataloader_type or "single")
    per_split = (
        asked.per_split_data_args_path, asked.train_data_path, asked.valid_data_path,
        asked.test_data_path,
    )  # fmt: skip
    if not any((asked.data_path, asked.data_args_path, *per_split)):
        draft.set("no flag names a corpus", mock_data=True)
    if asked.split is None and not any(per_split):
        formula = "Megatron's default shares of train, validation and test"
        draft.set(formula, split="969,30,1")


def _tokenizer(draft: Draft) -> None:
    asked = draft.run.tokenizer
    if asked.tokenizer_type is not None:
        return
    if asked.vocab_file and asked.merge_file:
        draft.set("--vocab-file and --merge-file are given", tokenizer_type="GPT2BPETokenizer")
    elif draft.run.data.mock_data or asked.vocab_size is not None:
        draft.set("synthetic samples, or ids of --vocab-size", tokenizer_type="NullTokenizer")
        if asked.vocab_size is None:
            draft.set("size of GPT-2, as --vocab-size is not given", vocab_size=50257)


def _layers(draft: Draft, machine: Machine) -> None:
    if draft.run.model.transformer_impl == "inference_optimized":
        draft.set(transformer_impl="local")
    elif not machine.has_engine_layers:
        draft.set("Transformer Engine is not available", transformer_impl="local")
    elif draft.run.latent_attention.multi_latent_attention:
        draft.set("only local layers have latent attention", transformer_impl="local")
