"""Settings of Megatron that pick how the same numbers are computed, or ask for layers not here.

Configs inherit them, so that code which sets them finds them, and the command line does, so that
they are flags with the same answer. Nothing reads them: `support` says what becomes of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flag_rows import FlagTable

_EVERY_CONFIG = """
no effect: a timer waits for nobody, so it changes no result
barrier_with_L1_time --no-barrier-with-level-1-timing off-switch
no effect: settings are in the log, and with --dry-run on the terminal
--config-logger-dir str = ""
"""

_WEIGHT_GRADIENTS = """
no effect: the other micro batch hides communication; dualpipe-v puts weight gradients off
--delay-wgrad-compute on
"""

_STATE = """
no effect: operands are rounded where they are multiplied, and parameters gathered in their dtype
--reuse-grad-buf-for-mxfp8-param-ag on
"""

_PARALLEL = """
no effect: it tunes Transformer Engine and changes no result
--tp-comm-overlap on
--tp-comm-bootstrap-backend str: nccl/mpi/gloo = nccl
--tp-comm-overlap-rs-dgrad on
--no-tp-comm-bulk-dgrad off-switch
--no-tp-comm-bulk-wgrad off-switch
--no-tp-comm-overlap-ag off-switch
--no-tp-comm-overlap-rs off-switch
--no-tp-comm-split-ag off-switch
--no-tp-comm-split-rs off-switch
tp_comm_atomic_ag on
tp_comm_atomic_rs on
tp_comm_overlap_disable_fc1 on
tp_comm_overlap_disable_qkv on
no effect: it tunes the network and changes no result
--pipeline-model-parallel-comm-backend str: nccl/ucc
--use-ring-exchange-p2p on
no effect: a batch of sends and receives is one blocking call
batch_p2p_sync off-switch
no effect: receives are posted ahead in all phases of the pipeline
overlap_p2p_comm_warmup_flush --overlap-p2p-communication-warmup-flush on
no effect: random draws are keyed and need no tracker
use_te_rng_tracker:te_rng_tracker --te-rng-tracker on
no effect: backward computes the gradients of a product together
--defer-embedding-wgrad-compute on
--wgrad-deferral-limit int = 0
no effect: --cpu-offloading-num-layers says which layers, whose activations go to host memory
cpu_offloading on
cpu_offloading_activations off-switch
cpu_offloading_double_buffering on
no effect: --param-cpu-offload takes weights to host memory
cpu_offloading_weights on
no effect: each micro batch is recomputed as the others are
num_microbatches_with_partial_activation_checkpoints int
no effect: memory is released where backward has read it
--ep-overlap-early-attn-memory-release on
no effect: --pipeline-model-parallel-layout says which stage predicts later tokens
--mtp-standalone on
"""

_LAYERS = """
no effect: --cuda-graph-impl local captures layers
--external-cuda-graph on
of cuda_graph_impl
--cuda-graph-modules str x+ = []
--cuda-graph-scope str x+ = []
cuda_graph_retain_backward_graph on
cuda_graph_use_single_mempool on

no effect: operands are rounded where they are multiplied, and parameters kept in their dtype
activation_func_fp8_input_store on
disable_parameter_transpose_cache on
fp4_param on
fp8_param on
no effect: scales of delayed scaling follow in every step
--fp8-interval int = 1
no effect: the largest magnitude is taken over all ranks that multiply with the same scale
tp_only_amax_red on
no effect: --fp8-format and --fp4-format say how matrix products are computed
quant_recipe str
use_kitchen on

no effect: the kernels that are here compute the same
--use-fused-weighted-squared-relu on
--use-kitchen-attention on
--kitchen-attention-backend str: sdpa/fa = sdpa
--use-te-activation-func on
fused_single_qkv_rope on
moe_use_legacy_grouped_gemm on
no effect: there is one implementation of the router
--moe-router-fusion on
no effect: the fused kernel is taken where it runs
--moe-permute-fusion on
no effect: there is one implementation of Mamba-2
use_mamba_mem_eff_path --disable-mamba-mem-eff-path off-switch
no effect: products of 16 and 32 bits take any number of tokens
--moe-router-padding-for-fp8 on
--moe-router-padding-for-quantization on
no effect: routing is recorded and replayed through megatron.core, by the program that needs it
--moe-enable-routing-replay on

no effect: memory is released where backward has read it
--no-clone-scatter-output-in-embedding off-switch
no effect: weights are drawn by name and need no full copy of the model
--init-model-with-meta-device on

no effect: --hybrid-layer-pattern says it
--is-hybrid-model on
no effect: a checkpoint has a name for each tensor of each layer
hetereogenous_dist_checkpoint on
no effect: it changes what Megatron's own tests report
--test-mode on
no effect: training generates no text; tools/run_text_generation_server.py is a program of its own
--flash-decode on
--inference-fuse-tp-communication on
--inference-rng-tracker on
inference_sampling_seed int = 42
--mlp-chunks-for-prefill int = 1
--symmetric-ar-type str: two_shot/one_shot/multimem_all_reduce
use_inference_optimized_layers on
cache_mla_latents on
refused: use --deterministic-mode: a repeated run is equal to the bit
--batch-invariant-mode on
refused: use a recipe by its name: --fp8-recipe or --fp4-recipe
--fp4-quantizer-factory str
--fp8-quantizer-factory str
"""

_OTHER_LAYERS = """
refused: drop it: layers are the usual ones without it
--moe-apply-probs-on-input on
--qk-l2-norm on
refused: give all layers one size; --moe-layer-freq and --window-attn-skip-freq tell them apart
heterogeneous_block_specs on
refused: drop it: attention multiplies in the dtype of the model
fp8_dot_product_attention on
fp8_multi_head_attention on
refused: use --expert-tensor-parallel-size
moe_extended_tp on
refused: use --moe-expert-capacity-factor
moe_token_dropping on
refused: use --moe-router-num-groups and --moe-router-group-topk
moe_router_topk_limited_devices int
"""

_OPTIMIZER = """
no effect: the config of the model says how operands are scaled
fp8_recipe str
no effect: a model of 16 bits keeps what its weights lack of main weights, and nothing is lost
store_param_remainders off-switch
no effect: the kernels that are here compute the same
--muon-fp32-matmul-prec str: low/medium/high = medium
no effect: memory of the host is used as the offload of state needs it
--no-pin-cpu-grads off-switch
--no-pin-cpu-params off-switch
--use-torch-optimizer-for-cpu-offload on
"""

_REPLICAS = """
no effect: parameters are gathered in the dtype of the model and rounded where they multiply
--fp4-param-gather on
--keep-fp8-transpose-cache on
no effect: it tunes the network and changes no result
--disable-symmetric-registration on
--fsdp-manual-registration on
--no-gradient-reduce-div-fusion off-switch
--suggested-communication-unit-size int
nccl_ub:use_nccl_ub --use-nccl-ub on
no effect: one layer computes and one is gathered in any case, never more
--fsdp-double-buffer on
no effect: the copies of sharded state are whole
--outer-dp-sharding-strategy str: no_shard/optim = no_shard
no effect: main weights are fp32, or as --main-params-dtype says
preserve_fp32_weights off-switch
refused: use --use-megatron-fsdp
use_custom_fsdp on
"""


@dataclass
class EveryComputation(FlagTable, rows=_EVERY_CONFIG):
    """Of the model's config and the optimizer's."""


@dataclass
class WeightGradientComputation(FlagTable, rows=_WEIGHT_GRADIENTS):
    """Of the model's config and the data-parallel wrapper's."""


@dataclass
class StateComputation(FlagTable, rows=_STATE):
    """Of the optimizer's config and the data-parallel wrapper's."""


@dataclass
class ParallelComputation(FlagTable, rows=_PARALLEL):
    """Of the config of how a model is spread over ranks."""


@dataclass
class LayerComputation(FlagTable, rows=_LAYERS):
    """Of the config of a transformer."""


@dataclass
class OtherLayers(FlagTable, rows=_OTHER_LAYERS):
    """Of the config of a transformer: layers that are not here."""


@dataclass
class OptimizerComputation(FlagTable, rows=_OPTIMIZER):
    """Of the optimizer's config."""


@dataclass
class ReplicaComputation(FlagTable, rows=_REPLICAS):
    """Of the data-parallel wrapper's config."""
