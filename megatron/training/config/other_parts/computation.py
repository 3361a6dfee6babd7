"""Flags that pick how the same numbers are computed, by kernels and libraries that are not here."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.computation import (
    EveryComputation,
    LayerComputation,
    OptimizerComputation,
    ParallelComputation,
    ReplicaComputation,
    StateComputation,
    WeightGradientComputation,
)
from megatron.core.settings.flag_rows import FlagTable
from megatron.core.settings.flags import SettingsGroup

_ROWS = """
no effect: the optimizer's step is not captured
--optimizer-cuda-graph on

refused: drop it: the output layer keeps the dtype of the model
--fp8-output-proj on
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
--use-grouped-gemm-for-dense-mlp on
--use-grouped-gemm-for-shared-expert on
--use-transformer-engine-op-fuser on
--muon-use-syrk on
no effect: gate and up projections lie one after the other
--moe-mlp-glu-interleave-size int
--moe-shared-expert-glu-interleave-size int
no effect: an expert has weights of its own, and what computes them together reads them there
--moe-single-grouped-bias on
--moe-single-grouped-weight on
--moe-use-grouped-tensor on
of batch_invariant_mode
--batch-invariant-backend str: te_native/deepgemm/triton = te_native

no effect: tokens travel on the streams of their group
--high-priority-a2a-comm-stream on
no effect: the library decides it
--moe-hybridep-num-blocks-permute int
--moe-hybridep-num-blocks-unpermute int
--moe-hybridep-num-sms-preprocessing int = 108
--moe-hybridep-pad-uneven-dispatch-inputs on
--moe-ncclep-zero-copy on
--moe-permute-fusion-into-hybridep on
no effect: backward computes the gradients of a product together
--overlap-dispatch-backward-with-experts-wgrad on
no effect: buffers are as long as the tokens that arrive, so none is dropped for lack of space
--moe-paged-stash on
--moe-paged-stash-buffer-size-factor-cpu float = 0.0
--moe-paged-stash-buffer-size-factor-cuda float = 1.1
--moe-paged-stash-page-size int = 64

no effect: it tunes the network and changes no result
--create-all-gather-group on
--distributed-timeout-seconds-after-init int
--lazy-mpu-init on
--no-align-param-gather off-switch
--sharp-enabled-group str: dp/dp_replica

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
no effect: all that --offload-modules names is offloaded, as soon as it is saved
--activation-offload-fraction float = 1.0
--delay-offload-until-cuda-graph on
--delta-offload-bytes-across-pp-ranks int = 0
--fine-grained-offloading-max-inflight-offloads int
no effect: pinned memory is kept for the next copies
--cpu-offloading-retain-pinned-cpu-buffers on
"""


@dataclass(kw_only=True)
class _OtherComputation(FlagTable, rows=_ROWS):
    """What only the command line has."""


@dataclass(kw_only=True)
class ComputationSettings(
    _OtherComputation,
    ReplicaComputation,
    OptimizerComputation,
    StateComputation,
    LayerComputation,
    ParallelComputation,
    WeightGradientComputation,
    EveryComputation,
    SettingsGroup,
):
    """How the same numbers are computed, by kernels and libraries that are not here."""
