"""Parameters of other projects' signatures that are accepted and have no effect here, and why.

Every other parameter acts, or is refused when it is given a value that would change the result.
A test holds this table against all signatures: what is not read is here, and nothing else.
"""

_CORE = "megatron.core"
_PARALLEL = f"{_CORE}.tensor_parallel"
_MOE = f"{_CORE}.transformer.moe"
_HERE = "megatron.compatibility"
_SAVING = f"{_CORE}.dist_checkpointing.serialization"
_DEEPSPEED = "megatron_lattice.deepspeed"
_CHECKPOINTS = "megatron.training.checkpointing.megatron_functions"

IGNORED: dict[str, tuple[str, ...]] = {
    "routers keep means over micro batches from the first step on, and know their layers": (
        f"{_HERE}.transformer:track_moe_metrics"
        " loss_scale force_initialize moe_layer_freq mtp_num_layers",
    ),
    "there is one random tracker, which serves graphs and inference and is reset by each seed": (
        f"{_PARALLEL}.random:initialize_rng_tracker"
        " use_te_rng_tracker inference_rng_tracker use_cudagraphable_rng",
        f"{_PARALLEL}.random:get_cuda_rng_tracker"
        " use_te_rng_tracker inference_rng_tracker use_cudagraphable_rng",
        f"{_PARALLEL}.random:model_parallel_cuda_manual_seed"
        " te_rng_tracker inference_rng_tracker use_cudagraphable_rng force_reset_rng",
        "megatron.training.initialize:_set_random_seed"
        " te_rng_tracker inference_rng_tracker use_cudagraphable_rng",
    ),
    "the angles of rotary embeddings are always on the step's device": (
        f"{_CORE}.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.__init__"
        " use_cpu_initialization",
        f"{_HERE}.transformer:YarnRotaryEmbedding.__init__ use_cpu_initialization",
    ),
    "draws are keyed by what they are for: a seed needs no groups": (
        "megatron.training.initialize:_set_random_seed pp_group dp_group",
    ),
    "hashes and the coverage of every tensor are always checked": (
        f"{_SAVING}:save validate_access_integrity verify_integrity",
        f"{_SAVING}:load validate_access_integrity verify_integrity",
    ),
    "plain values are those of the first rank: there is nothing to compare": (
        f"{_SAVING}:save preprocess_common_before_consistancy_check",
        f"{_CHECKPOINTS}:save_checkpoint preprocess_common_state_dict_fn",
    ),
    "one format is written, by a thread if asynchronous, with the work shared by all replicas": (
        f"{_SAVING}:save async_strategy",
        f"{_CORE}.optimizer.optimizer:MegatronOptimizer.sharded_state_dict"
        " is_loading sharding_type metadata",
        f"{_CHECKPOINTS}:save_checkpoint checkpointing_context",
        f"{_CHECKPOINTS}:load_checkpoint checkpointing_context",
        "megatron.training.setup.third_party:setup_model_and_optimizer checkpointing_context",
        f"{_HERE}.dist_checkpointing:_Strategy.__new__ args options",
        f"{_HERE}.dist_checkpointing:AsyncCallsQueue.__init__ persistent",
        f"{_HERE}.dist_checkpointing:AsyncCallsQueue.maybe_finalize_async_calls no_dist",
        f"{_HERE}.dist_checkpointing:AsyncCallsQueue.close abort",
    ),
    "a checkpoint is one directory for all ranks: its name says nothing of the layout": (
        f"{_CHECKPOINTS}:save_checkpoint pipeline_parallel expert_parallel",
        f"{_HERE}.dist_checkpointing:get_checkpoint_name args options",
    ),
    "a run continues at its number of consumed samples, whatever the iterator says": (
        f"{_CHECKPOINTS}:save_checkpoint train_data_iterator",
    ),
    "checkpoints need no groups of their own": (
        f"{_CORE}.optimizer.factory:get_megatron_optimizer use_gloo_process_groups",
        f"{_CORE}.parallel_state:initialize_model_parallel create_gloo_process_groups",
    ),
    "the priority of a stream changes no result": (
        f"{_CORE}.parallel_state:initialize_model_parallel high_priority_stream_groups",
    ),
    "gradients outside of buffers are always dropped, not filled with zeros": (
        f"{_CORE}.optimizer.optimizer:MegatronOptimizer.zero_grad set_to_none",
    ),
    "a norm is computed tensor by tensor, without a kernel that takes chunks of many": (
        f"{_HERE}.core_utils:local_multi_tensor_l2_norm chunk_size noop_flag",
    ),
    "the buckets of the wrapper are those of the messages": (
        f"{_CORE}.distributed.torch_fully_sharded_data_parallel:"
        "TorchFullyShardedDataParallel.__init__ disable_bucketing",
    ),
    "hooks of modules call it with arguments of their own": (
        f"{_CORE}.distributed.distributed_data_parallel:"
        "DistributedDataParallel.start_grad_sync unused",
        f"{_CORE}.distributed.distributed_data_parallel:"
        "DistributedDataParallel.start_param_sync unused",
    ),
    "a label for logs and buffers of other backends": (
        f"{_CORE}.extensions.transformer_engine:_TEParallelLinear.__init__ tp_comm_buffer_name",
        f"{_CORE}.transformer.attention:Attention.__init__ name",
        f"{_CORE}.transformer.mlp:MLP.__init__ name",
        f"{_MOE}.experts:SequentialMLP.__init__ name",
        f"{_MOE}.experts:GroupedMLP.__init__ name",
        f"{_MOE}.moe_layer:MoELayer.__init__ name",
        f"{_MOE}.shared_experts:SharedExpertMLP.__init__ name",
        f"{_CORE}.transformer.transformer_layer:TransformerLayer.__init__ name",
        f"{_HERE}.core_utils:nvtx_range_pop suffix",
        f"{_HERE}.core_utils:nvtx_decorator color",
    ),
    "a cache of keys and values is found by the number of the layer in the model": (
        f"{_CORE}.transformer.attention:Attention.__init__ pp_layer_offset",
    ),
    "two products of all experts have no parts to choose": (),
    "every module is called as the function that it is": (
        f"{_HERE}.core_utils:apply_module check_subclass",
    ),
    "the log of a run has the padded vocabulary with all other derived settings": (
        f"{_HERE}.training:calculate_padded_vocab_size logging_enabled",
    ),
    "it takes the place of any part, with the arguments of that part": (
        f"{_CORE}.transformer.identity_op:IdentityOp.__init__ args kwargs",
        f"{_CORE}.transformer.identity_op:IdentityOp.forward args kwargs",
        f"{_CORE}.transformer.identity_op:IdentityFuncOp.forward args kwargs",
        f"{_CORE}.transformer.replicated_linear:LinearPart.__init__ layer_number",
        f"{_CORE}.transformer.replicated_linear:LinearPart.forward options",
    ),
    "there is one implementation, which gives the same result": (
        f"{_CORE}.fusions.fused_bias_dropout:get_bias_dropout_add fused",
        f"{_CORE}.fusions.fused_softmax:FusedScaleMaskSoftmax.__init__"
        " input_in_fp16 input_in_bf16 scaled_masked_softmax_fusion mask_func",
        f"{_CORE}.transformer.torch_norm:WrappedTorchNorm.__new__ persist_layer_norm",
        f"{_CORE}.models.gpt.gpt_model:GPTModel.__init__ fp16_lm_cross_entropy",
        f"{_CORE}.models.bert.bert_model:BertModel.__init__ fp16_lm_cross_entropy",
        f"{_CORE}.models.T5.t5_model:T5Model.__init__ fp16_lm_cross_entropy",
        f"{_HERE}.transformer:sort_chunks_by_idxs fused",
        f"{_CORE}.transformer.torch_norm:L2Norm.__init__ options",
    ),
    "where memory is changes no result": (
        f"{_CORE}.fusions.fused_bias_swiglu:bias_swiglu_impl cpu_offload_input",
        f"{_PARALLEL}.mappings:gather_from_sequence_parallel_region use_global_buffer",
        f"{_PARALLEL}.mappings:reduce_scatter_to_sequence_parallel_region use_global_buffer",
        f"{_HERE}.transformer:fused_apply_rotary_pos_emb transpose_output_memory",
        f"{_HERE}.parallel_state:GlobalMemoryBuffer.get_tensor mem_alloc_context",
    ),
    "weights are drawn by name: no rank keeps a full one": (
        f"{_PARALLEL}.layers:ColumnParallelLinear.__init__ keep_master_weight_for_test",
        f"{_PARALLEL}.layers:RowParallelLinear.__init__ keep_master_weight_for_test",
    ),
    "it acts only together with an argument that is refused": (
        f"{_PARALLEL}.linear_with_overlap:linear_with_grad_accumulation_and_async_allreduce"
        " wgrad_deferral_limit",
        f"{_CORE}.models.common.embeddings.rotary_pos_embedding:apply_rotary_pos_emb cp_group",
        f"{_HERE}.core_utils:get_fp8_context config layer_no is_init",
        f"{_HERE}.rerun_state_machine:RerunErrorInjector.__init__ error_injection_type",
        f"{_HERE}.rerun_state_machine:RerunStateMachine.validate_result comparison_func tolerance",
    ),
    "the rank and the size of a part say where it begins": (
        f"{_PARALLEL}.utils:VocabUtility.vocab_range_from_per_partition_vocab_size world_size",
    ),
    "positions of packed documents and of a cache come from tables of their own": (
        f"{_CORE}.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.get_rotary_seq_len"
        " inference_context packed_seq_params",
    ),
    "the config of the model decides": (
        f"{_CORE}.models.gpt.gpt_layer_specs:get_gpt_layer_local_submodules"
        " normalization qk_l2_norm",
        f"{_CORE}.models.gpt.gpt_layer_specs:get_gpt_layer_with_transformer_engine_submodules"
        " qk_l2_norm",
        "megatron.training.setup.model:get_model config",
        f"{_HERE}.optimizer:get_standard_config_overrides config",
    ),
    "every stage gets the same: the model knows which stage has it": (
        f"{_CORE}.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec vp_stage pp_rank",
        f"{_HERE}.training:get_batch_on_this_tp_rank mtp_on_this_rank vp_stage",
        f"{_HERE}.parallel_state:is_pipeline_stage_before_split rank",
    ),
    "a machine without GPUs computes on its CPU": (
        "megatron.training.initialize:initialize_megatron allow_no_cuda",
    ),
    "the current groups answer, before they exist as well: axes of size 1": (
        f"{_HERE}.core_utils:get_tensor_model_parallel_group_if_none check_initialized",
        f"{_HERE}.parallel_state:get_tensor_and_expert_parallel_group check_initialized",
    ),
    "any iterable can be iterated": (
        "megatron.resilience.rerun:RerunDataIterator.__init__ make_iterable",
    ),
    "slow ranks are not searched for, and the search cannot be switched on": (
        f"{_HERE}.core_utils:StragglerDetector.__call__ bdata",
    ),
}
"""Reason -> "module:function parameter parameter ..."."""


DEEPSPEED_IGNORED: dict[str, tuple[str, ...]] = {
    "weights are written to one file, and tensors are read at once": (
        f"{_DEEPSPEED}.utils.zero_to_fp32:convert_zero_checkpoint_to_fp32_state_dict"
        " max_shard_size",
        f"{_DEEPSPEED}.utils.zero_to_fp32:get_fp32_state_dict_from_zero_checkpoint lazy_mode",
    ),
    "gradients outside of buffers are always dropped, not filled with zeros": (
        f"{_DEEPSPEED}.engine:DeepSpeedEngine.zero_grad set_to_none",
        f"{_DEEPSPEED}.ops:FusedAdam set_grad_none",
    ),
    "the buckets of the wrapper are those of the messages": (
        f"{_DEEPSPEED}.engine:DeepSpeedEngine.allreduce_gradients bucket_size",
    ),
    "where memory is changes no result": (f"{_DEEPSPEED}.zero:Init unused",),
    "a process has one device": (
        f"{_DEEPSPEED}.accelerator:Accelerator.synchronize device_index",
        f"{_DEEPSPEED}.accelerator:Accelerator.max_memory_allocated device_index",
    ),
    "the ranks are those of the launcher": (
        f"{_DEEPSPEED}.comm:init_distributed auto_mpi_discovery verbose config",
    ),
    "parameters are gathered by layers": (
        f"{_DEEPSPEED}.zero:GatheredParameters fwd_module",
        f"{_DEEPSPEED}.zero:set_z3_leaf_modules model leaf_module_classes",
    ),
}
"""Reason -> "module:function parameter parameter ..."."""


def ignored_arguments() -> dict[tuple[str, str], str]:
    """Return (function, parameter) -> reason, of both packages."""
    table: dict[tuple[str, str], str] = {}
    for reason, entries in (*IGNORED.items(), *DEEPSPEED_IGNORED.items()):
        for entry in entries:
            function, *names = entry.split()
            table |= {(function, name): reason for name in names}
    return table
