"""Where names of Megatron are defined here: module -> name -> "module:attribute"."""

from __future__ import annotations

_OWN = "megatron.compatibility"
_TE = "megatron.core.extensions.transformer_engine"
_EMBEDDINGS = "megatron.core.models.common.embeddings.rotary_pos_embedding"
_TOKENIZER = "megatron.core.tokenizers.utils.build_tokenizer"
_NORM = "megatron.core.transformer.torch_norm:WrappedTorchNorm"


def _all(home: str, *names: str) -> dict[str, str]:
    """Return entries for names that are called the same in module `home`."""
    return {name: f"{home}:{name}" for name in names}


ELSEWHERE: dict[str, dict[str, str]] = {
    "megatron.core.config": _all(
        f"{_OWN}.functions", "set_experimental_flag", "is_experimental_enabled"
    ),
    "megatron.core.config_logger": _all(f"{_OWN}.functions", "has_config_logger_enabled"),
    "megatron.core.datasets.megatron_tokenizer": {
        "MegatronLegacyTokenizer": f"{_OWN}.tokenizers:MegatronLegacyTokenizer",
        "MegatronTokenizer": f"{_OWN}.tokenizers:MegatronLegacyTokenizer",
    },
    "megatron.core.dist_checkpointing.dict_utils": _all(f"{_OWN}.functions", "nested_values"),
    "megatron.core.dist_checkpointing.serialization": _all(
        f"{_OWN}.checkpoints",
        "get_default_load_sharded_strategy",
        "get_default_save_sharded_strategy",
    )
    | {"StateDict": "megatron.core.dist_checkpointing.mapping:ShardedStateDict"},
    "megatron.core.dist_checkpointing.strategies.async_utils": {
        "AsyncCallsQueue": f"{_OWN}.checkpoints:AsyncCallsQueue",
        "AsyncRequest": "megatron.core.dist_checkpointing.async_save:AsyncSave",
    },
    "megatron.core.dist_checkpointing.strategies.common": _all(
        f"{_OWN}.checkpoints", "COMMON_STATE_FNAME"
    ),
    "megatron.core.dist_checkpointing.strategies.filesystem_async": _all(
        f"{_OWN}.checkpoints", "_results_queue"
    ),
    "megatron.core.dist_checkpointing.strategies.fully_parallel": _all(
        f"{_OWN}.checkpoints",
        "FullyParallelLoadStrategyWrapper",
        "FullyParallelSaveStrategyWrapper",
    ),
    "megatron.core.dist_checkpointing.strategies.torch": _all(
        f"{_OWN}.checkpoints",
        "TorchDistLoadShardedStrategy",
        "TorchDistSaveShardedStrategy",
        "get_async_strategy",
    ),
    "megatron.core.dist_checkpointing.utils": _all(
        f"{_OWN}.checkpoints",
        "_clean_metadata_for_serialization",
        "add_prefix_for_sharding",
        "apply_prefix_mapping",
        "replace_prefix_for_sharding",
    ),
    _TE: _all(f"{_OWN}.layers", "SplitAlongDim", "fused_apply_rotary_pos_emb"),
    "megatron.core.extensions.transformer_engine_spec_provider": {
        "TESpecProvider": f"{_TE}:TransformerEngineBackend"
    },
    "megatron.core.fp8_utils": _all(
        f"{_OWN}.functions",
        "FP8_TENSOR_CLASS",
        "HAVE_TE_FP8_TENSOR_CLASS",
        "correct_amax_history_if_needed",
        "get_fp8_context",
    ),
    "megatron.core.full_cuda_graph": _all(f"{_OWN}.functions", "FullCudaGraphWrapper"),
    "megatron.core.fusions.fused_bias_dropout": _all(
        f"{_OWN}.layers", "bias_dropout_add_fused_inference", "bias_dropout_add_fused_train"
    ),
    "megatron.core.fusions.fused_bias_gelu": _all(f"{_OWN}.layers", "bias_gelu"),
    "megatron.core.fusions.fused_bias_swiglu": _all(f"{_OWN}.layers", "bias_swiglu"),
    "megatron.core.fusions.fused_cross_entropy": _all(
        f"{_OWN}.layers", "fused_vocab_parallel_cross_entropy"
    ),
    "megatron.core.fusions.fused_layer_norm": {"FusedLayerNorm": _NORM},
    "megatron.core.jit": _all(f"{_OWN}.functions", "disable_jit_fuser", "jit_fuser"),
    "megatron.core.models.backends": {
        "BackendSpecProvider": "megatron.core.transformer.backend:Backend",
        "LocalSpecProvider": "megatron.core.transformer.backend:LocalBackend",
    },
    "megatron.core.models.common.embeddings": _all(
        f"{_OWN}.layers", "YarnRotaryEmbedding", "_yarn_get_mscale"
    ),
    "megatron.core.models.common.embeddings.rope_utils": {
        "apply_rotary_pos_emb": f"{_EMBEDDINGS}:apply_rotary_pos_emb",
        **_all(f"{_OWN}.layers", "_apply_rotary_pos_emb_bshd", "get_pos_emb_on_this_cp_rank"),
    },
    _EMBEDDINGS: _all(f"{_OWN}.layers", "get_pos_emb_on_this_cp_rank"),
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding": _all(
        f"{_OWN}.layers", "YarnRotaryEmbedding", "_yarn_get_mscale"
    ),
    "megatron.core.models.gpt.gpt_layer_specs": _all(
        f"{_OWN}.layers", "_get_mlp_module_spec", "get_mlp_module_spec"
    ),
    "megatron.core.models.gpt.gpt_model": {"ModelType": "megatron.core.enums:ModelType"},
    "megatron.core.models.gpt.moe_module_specs": {
        "MLPSubmodules": "megatron.core.transformer.mlp:MLPSubmodules"
    },
    "megatron.core.models.multimodal.llava_model": _all(
        f"{_OWN}.functions", "DEFAULT_IMAGE_TOKEN_INDEX", "IGNORE_INDEX", "IMAGE_TOKEN"
    ),
    "megatron.core.msc_utils": _all(f"{_OWN}.functions", "MultiStorageClientFeature"),
    "megatron.core.num_microbatches_calculator": {
        "_GLOBAL_NUM_MICROBATCHES_CALCULATOR": f"{_OWN}.functions:CURRENT_CALCULATOR"
    },
    "megatron.core.optimizer": _all(
        f"{_OWN}.optimizers",
        "ChainedOptimizer",
        "DistributedOptimizer",
        "FP32Optimizer",
        "Float16OptimizerWithFloat16Params",
    ),
    "megatron.core.optimizer.distrib_optimizer": _all(f"{_OWN}.optimizers", "DistributedOptimizer"),
    "megatron.core.optimizer.optimizer": _all(
        f"{_OWN}.optimizers",
        "ChainedOptimizer",
        "FP32Optimizer",
        "Float16OptimizerWithFloat16Params",
    ),
    "megatron.core.package_info": _all(
        f"{_OWN}.functions", "__version__", "__package_name__", "__shortversion__"
    ),
    "megatron.core.parallel_state": _all(
        f"{_OWN}.groups",
        "GlobalMemoryBuffer",
        "RankGenerator",
        "_CONTEXT_PARALLEL_GROUP",
        "_DATA_PARALLEL_GROUP",
        "_DATA_PARALLEL_GROUP_WITH_CP",
        "_EXPERT_MODEL_PARALLEL_GROUP",
        "_EXPERT_TENSOR_PARALLEL_GROUP",
        "_MODEL_PARALLEL_GROUP",
        "_PIPELINE_MODEL_PARALLEL_GROUP",
        "_TENSOR_MODEL_PARALLEL_GROUP",
        "_set_global_memory_buffer",
        "destroy_global_memory_buffer",
        "get_all_ranks",
        "get_amax_reduction_group",
        "get_global_memory_buffer",
        "get_nccl_options",
        "get_pipeline_model_parallel_decoder_start",
        "get_pipeline_model_parallel_split_rank",
        "get_tensor_and_expert_parallel_group",
        "get_tensor_and_expert_parallel_rank",
        "get_tensor_and_expert_parallel_world_size",
        "is_inside_decoder",
        "is_inside_encoder",
        "is_pipeline_stage_after_split",
        "is_pipeline_stage_before_split",
        "set_context_parallel_rank",
        "set_context_parallel_world_size",
        "set_data_parallel_rank",
        "set_expert_model_parallel_rank",
        "set_expert_model_parallel_world_size",
        "set_pipeline_model_parallel_rank",
        "set_pipeline_model_parallel_world_size",
        "set_tensor_model_parallel_rank",
        "set_tensor_model_parallel_world_size",
        "update_pg_timeout",
    ),
    "megatron.core.pipeline_parallel.utils": _all(
        f"{_OWN}.functions", "set_ideal_affinity_for_current_gpu"
    ),
    "megatron.core.process_groups_config": {
        "ModelCommProcessGroups": "megatron.core.process_groups_config:ProcessGroupCollection"
    },
    "megatron.core.quantization.utils": _all(f"{_OWN}.functions", "get_quant_config_or_none"),
    "megatron.core.rerun_state_machine": _all(
        f"{_OWN}.rerun",
        "RerunDataIterator",
        "RerunDiagnostic",
        "RerunErrorInjector",
        "RerunMode",
        "RerunState",
        "RerunStateMachine",
        "RerunValidationStatus",
        "destroy_rerun_state_machine",
        "get_rerun_state_machine",
        "initialize_rerun_state_machine",
    ),
    "megatron.core.tokenizers.text.libraries": {
        "HuggingFaceTokenizer": "megatron.core.tokenizers.hugging_face:HuggingFaceTokenizer"
    },
    "megatron.core.transformer.custom_layers.transformer_engine": {
        **_all(
            _TE,
            "TEColumnParallelLinear",
            "TEDotProductAttention",
            "TELayerNormColumnParallelLinear",
            "TENorm",
            "TERowParallelLinear",
        ),
        "SplitAlongDim": f"{_OWN}.layers:SplitAlongDim",
    },
    "megatron.core.transformer.enums": {
        "CudaGraphScope": f"{_OWN}.functions:CudaGraphScope",
        "ModelType": "megatron.core.enums:ModelType",
    },
    "megatron.core.transformer.moe.moe_layer": {
        "BaseMoELayer": "megatron.core.transformer.moe.moe_layer:MoELayer"
    },
    "megatron.core.transformer.moe.moe_utils": {
        **_all(f"{_OWN}.layers", "sort_chunks_by_idxs"),
        **_all(f"{_OWN}.expert_metrics", "track_moe_metrics"),
    },
    "megatron.core.transformer.moe.router": {
        "MoEAuxLossAutoScaler": "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler"
    },
    "megatron.core.transformer.multi_token_prediction": {
        **_all(f"{_OWN}.layers", "roll_tensor"),
        **_all(f"{_OWN}.later_losses", "MTPLossLoggingHelper"),
    },
    "megatron.core.transformer.torch_layer_norm": {"WrappedTorchLayerNorm": _NORM},
    "megatron.core.transformer.torch_norm": _all(f"{_OWN}.layers", "L2Norm"),
    "megatron.core.transformer.transformer_layer": {
        "BaseTransformerLayer": "megatron.core.transformer.transformer_layer:TransformerLayer"
    },
    "megatron.core.transformer.utils": {
        "make_sharded_tensors_for_checkpoint": (
            f"{_OWN}.checkpoints:make_sharded_tensors_for_checkpoint"
        ),
        "ensure_metadata_has_dp_cp_group": f"{_OWN}.checkpoints:ensure_metadata_has_dp_cp_group",
        **_all(
            f"{_OWN}.layers",
            "attention_mask_func",
            "erf_gelu",
            "is_layer_window_attention",
            "openai_gelu",
        ),
    },
    "megatron.core.utils": {
        "GlobalMemoryBuffer": f"{_OWN}.groups:GlobalMemoryBuffer",
        "StragglerDetector": f"{_OWN}.straggler:StragglerDetector",
        "get_batch_on_this_cp_rank": f"{_OWN}.batches:get_batch_on_this_cp_rank",
        **_all(
            f"{_OWN}.checkpoints",
            "make_sharded_tensor_for_checkpoint",
            "make_tp_sharded_tensor_for_checkpoint",
        ),
        **_all(
            f"{_OWN}.functions",
            "WrappedTensor",
            "check_param_hashes_across_dp_replicas",
            "configure_nvtx_profiling",
            "deprecate_inference_params",
            "get_data_parallel_group_if_dtensor",
            "get_te_version",
            "get_tensor_model_parallel_group_if_none",
            "is_fa_min_version",
            "local_multi_tensor_applier",
            "local_multi_tensor_l2_norm",
            "log_on_each_pipeline_stage",
            "log_single_rank",
            "nvtx_decorator",
            "nvtx_range_pop",
            "nvtx_range_push",
            "to_local_if_dtensor",
        ),
    },
    "megatron.training.checkpointing": _all(
        f"{_OWN}.checkpoints",
        "get_checkpoint_name",
        "get_checkpoint_tracker_filename",
        "isfile",
        "read_metadata",
    ),
    "megatron.training.inprocess_restart": _all(
        f"{_OWN}.batches", "maybe_wrap_for_inprocess_restart"
    ),
    "megatron.training.datasets.sft_dataset": {
        "SFTDataset": "megatron.core.datasets.sft_dataset:SFTDataset"
    },
    "megatron.training.tokenizer": _all(_TOKENIZER, "build_tokenizer"),
    "megatron.training.tokenizer.tokenizer": {
        "build_tokenizer": f"{_TOKENIZER}:build_tokenizer",
        "MegatronTokenizer": "megatron.core.tokenizers:MegatronTokenizer",
        "_NullTokenizer": "megatron.core.tokenizers.null_and_byte:NullTokenizer",
    },
    "megatron.training.utils": _all(
        f"{_OWN}.batches",
        "append_to_progress_log",
        "get_batch_on_this_tp_rank",
        "get_blend_and_blend_per_split",
        "is_first_or_last_pipeline_stage",
        "get_ltor_masks_and_position_ids",
        "report_memory",
    ),
    "megatron.training.yaml_arguments": _all(
        f"{_OWN}.batches", "core_transformer_config_from_yaml"
    ),
}

_STAR = {
    "BaseInferenceContext": "megatron.core.inference.contexts:BaseInferenceContext",
    "Fp8Recipe": "megatron.core.enums:Fp8Recipe",
    "Optional": "typing:Optional",
    "PackedSeqParams": "megatron.core.packed_seq_params:PackedSeqParams",
    "Tensor": "torch:Tensor",
    "TransformerConfig": "megatron.core.transformer.transformer_config:TransformerConfig",
    "Tuple": "typing:Tuple",
    "Union": "typing:Union",
    "nullcontext": "contextlib:nullcontext",
    "parallel_state": "megatron.core.parallel_state",
    "tensor_parallel": "megatron.core.tensor_parallel",
    "torch": "torch",
    **_all(f"{_OWN}.functions", "WrappedTensor", "deprecate_inference_params", "get_fp8_context"),
    "make_viewless_tensor": "megatron.core.utils:make_viewless_tensor",
}
STAR_NAMES: dict[str, dict[str, str]] = {
    "megatron.core.models.common.embeddings.rope_utils": _STAR,
    "megatron.core.transformer.attention": _STAR,
    "megatron.core.transformer.transformer_block": _STAR,
}
"""What `from module import *` gives besides the names that the module defines."""
