"""Flags of text generation inside the training program."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flag_rows import FlagTable

_ROWS = """
no effect: training generates no text; tools/run_text_generation_server.py is a program of its own
--inference-max-seq-length int = 2560
--inference-max-requests int = 8
--max-tokens-to-oom int = 12000
--inference-batch-times-seqlen-threshold int = -1
--inference-logging-step-interval int = 0
--inference-wandb-logging on
--inference-text-gen-server-logging on
--inference-coordinator-port int
--inference-disable-ep-consensus on
--inference-use-synchronous-zmq-collectives on
--inference-shards str
--use-same-sampling-seed-across-dp-ranks off-switch
--use-legacy-static-engine on
--num-speculative-tokens int = 0
--enable-chunked-prefill on
--cache-mla-latents on
--nccl-all-reduce-for-prefill on
--inference-disable-triton-nvls-kernels on
--inference-grouped-gemm-backend str: flashinfer/torch/vllm = vllm
--inference-moe-token-dispatcher-type str: nccl/nvls = nvls
--inference-moe-disable-fused-quant-kernels on
--moe-pad-experts-for-cuda-graph-inference on
--decode-only-cuda-graphs on
--inference-cuda-graph-scope str
--inference-cuda-graph-all-prefills on
--inference-cuda-graph-max-tokens int = 512
--inference-dynamic-batching on
--inference-dynamic-batching-block-size int = 256
--inference-dynamic-batching-buffer-size-gb float = 40.0
--inference-dynamic-batching-paused-buffer-size-gb float
--inference-dynamic-batching-mamba-memory-ratio float
--inference-dynamic-batching-max-requests int
--inference-dynamic-batching-max-tokens int
--inference-dynamic-batching-num-cuda-graphs int = 16
--inference-dynamic-batching-cuda-graph-sizing-distribution str: exponential/linear = exponential
--inference-dynamic-batching-cuda-graph-mixed-prefill-count int = 16
--inference-dynamic-batching-async-sched-mode str: legacy/async = legacy
--inference-dynamic-batching-logprobs-mode str: raw_logprobs/processed_logprobs = raw_logprobs
--inference-dynamic-batching-sampling-backend str: torch/flashinfer = torch
--inference-dynamic-batching-unified-memory-level int: 0/1 = 0
--inference-dynamic-batching-prefix-caching on
--inference-dynamic-batching-prefix-caching-coordinator-policy \
    str: longest_prefix/first_prefix_block/load_balanced = load_balanced
--inference-dynamic-batching-prefix-caching-eviction-policy str: ref_zero/lru = ref_zero
--inference-dynamic-batching-prefix-caching-mamba-gb float
--inference-dynamic-batching-prefix-caching-routing-alpha float = 0.5
--inference-dynamic-batching-track-generated-token-events on
--inference-dynamic-batching-track-paused-request-events on
--mamba-inference-conv-states-dtype str: bf16/fp16/fp32 = bf16
--mamba-inference-ssm-states-dtype str: bf16/fp16/fp32 = bf16
"""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(FlagTable, rows=_ROWS):
    """Text generation inside the training program."""
