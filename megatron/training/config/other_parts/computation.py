"""Flags that pick how the same numbers are computed, by kernels and libraries that are not here."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flag_rows import FlagTable

_ROWS = """
no effect: steps run eagerly, and no CUDA graph is captured
--cuda-graph-warmup-steps int = 3
--cuda-graph-scope str x+
--enable-cuda-graph on
--external-cuda-graph on
--optimizer-cuda-graph on

no effect: scales of delayed scaling follow in every step
--fp8-interval int = 1
no effect: operands are rounded where they are multiplied, and parameters gathered in their dtype
--fp4-param-gather on
--keep-fp8-transpose-cache on
--reuse-grad-buf-for-mxfp8-param-ag on
refused: drop it: the output layer keeps the dtype of the model
--fp8-output-proj on
refused: use a recipe by its name: --fp8-recipe or --fp4-recipe
--fp4-quantizer-factory str
--fp8-quantizer-factory str
no effect: --fp8-format and --fp4-format say how matrix products are computed
--te-precision-config-file str
--kitchen-config-file str
--kitchen-recipe-number int
no effect: tokens travel to experts and back in the dtype of the model
--moe-combine-bwd-dtype str: bf16/mxfp8 = bf16
--moe-dispatch-fwd-dtype str: bf16/mxfp8 = bf16
no effect: the loss takes logits in fp32 in any case
--output-logit-dtype str: bf16/fp32

no effect: the kernels that are here compute the same
--disable-jit-fuser on
--flash-attention-version int: 2/3/4
--fused-residual-rmsnorm on
--mla-down-proj-fusion on
--use-fused-weighted-squared-relu on
--use-grouped-gemm-for-dense-mlp on
--use-grouped-gemm-for-shared-expert on
--use-kitchen-attention on
--kitchen-attention-backend str: sdpa/fa = sdpa
--use-te-activation-func on
--use-transformer-engine-op-fuser on
--muon-fp32-matmul-prec str: low/medium/high = medium
--muon-use-syrk on
no effect: gate and up projections lie one after the other
--moe-mlp-glu-interleave-size int
--moe-shared-expert-glu-interleave-size int
no effect: an expert has weights of its own, and what computes them together reads them there
--moe-single-grouped-bias on
--moe-single-grouped-weight on
--moe-use-grouped-tensor on
refused: use --deterministic-mode: a repeated run is equal to the bit
--batch-invariant-mode on
of batch_invariant_mode
--batch-invariant-backend str: te_native/deepgemm/triton = te_native

no effect: tokens travel by the collectives of torch.distributed
--high-priority-a2a-comm-stream on
--moe-deepep-num-sms int
--moe-flex-dispatcher-num-sms int
--moe-hybridep-num-blocks-permute int
--moe-hybridep-num-blocks-unpermute int
--moe-hybridep-num-sms int
--moe-hybridep-num-sms-preprocessing int = 108
--moe-hybridep-pad-uneven-dispatch-inputs on
--moe-ncclep-zero-copy on
--moe-permute-fusion-into-hybridep on
no effect: backward computes the gradients of a product together
--defer-embedding-wgrad-compute on
--wgrad-deferral-limit int = 0
--overlap-dispatch-backward-with-experts-wgrad on
no effect: buffers are as long as the tokens that arrive, so none is dropped for lack of space
--moe-paged-stash on
--moe-paged-stash-buffer-size-factor-cpu float = 0.0
--moe-paged-stash-buffer-size-factor-cuda float = 1.1
--moe-paged-stash-page-size int = 64
no effect: memory is released where backward has read it
--ep-overlap-early-attn-memory-release on
--no-clone-scatter-output-in-embedding off-switch

no effect: it tunes Transformer Engine and changes no result
--tp-comm-bootstrap-backend str: nccl/mpi/gloo = nccl
--tp-comm-overlap-rs-dgrad on
--no-tp-comm-bulk-dgrad off-switch
--no-tp-comm-bulk-wgrad off-switch
--no-tp-comm-overlap-ag off-switch
--no-tp-comm-overlap-rs off-switch
--no-tp-comm-split-ag off-switch
--no-tp-comm-split-rs off-switch
no effect: it tunes the network and changes no result
--create-all-gather-group on
--disable-symmetric-registration on
--distributed-timeout-seconds-after-init int
--lazy-mpu-init on
--no-align-param-gather off-switch
--no-gradient-reduce-div-fusion off-switch
--pipeline-model-parallel-comm-backend str: nccl/ucc
--sharp-enabled-group str: dp/dp_replica
--suggested-communication-unit-size int

refused: use --data-parallel-sharding-strategy optim_grads_params, which shards weights
--expert-tensor-parallel-num-weight-shards int
--tensor-parallel-num-weight-shards int
of tensor_parallel_num_weight_shards
--gtp-expert-remat-nccl-ub on
--gtp-remat-nccl-ub on
--gtp-remat-opt-in-modules str x+ = []
--gtp-remat-reduce-scatter-with-fp32-accumulation on
refused: drop --grad-reduce-in-bf16: gradients are then accumulated and reduced in fp32
--ddp-param-name-patterns-for-fp32-local-accumulation str x+ = []
--ddp-reduce-scatter-with-fp32-accumulation on
no effect: what is sharded, and when it is gathered, does not depend on it
--enable-full-sharding-in-hsdp on
--fsdp-db-use-persist-buf-on-alloc-fail on
--megatron-fsdp-enable-fine-grained-param-gather on
--megatron-fsdp-max-pool-double-buffer on
--megatron-fsdp-version int: 1/2 = 1
--no-use-layer-wise-param-layout off-switch
--torch-fsdp2-no-reshard-after-forward off-switch
no effect: memory of the host is used as the offload of state needs it
--no-pin-cpu-grads off-switch
--no-pin-cpu-params off-switch
--use-torch-optimizer-for-cpu-offload on
of fine_grained_activation_offloading
--activation-offload-fraction float = 1.0
--delay-offload-until-cuda-graph on
--delta-offload-bytes-across-pp-ranks int = 0
--fine-grained-offloading-max-inflight-offloads int
--min-offloaded-tensor-size int = 1048576
of cpu_offloading_num_layers
--cpu-offloading-retain-pinned-cpu-buffers on
"""


@dataclass(frozen=True, kw_only=True)
class ComputationSettings(FlagTable, rows=_ROWS):
    """How the same numbers are computed, by kernels and libraries that are not here."""
