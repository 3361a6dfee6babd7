"""Flags of reinforcement learning and distillation inside the training program."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flag_rows import FlagTable

_ROWS = """
refused: training here learns from a corpus; a trainer with rewards calls megatron.core itself
--perform-rl-step on
of perform_rl_step
--langrl-env-config str
--grpo-clamp-eps-lower float = 0.01
--grpo-clamp-eps-upper float = 0.01
--grpo-entropy-term-weight float = 0.0
--grpo-filter-groups-with-same-reward on
--grpo-group-size int = 2
--grpo-iterations int = 2
--grpo-kl-beta float = 0.001
--grpo-prompts-per-step int = 32
--refit-method str: nccl/gloo/nvshmem = gloo
--rl-consumption-granularity str: R/G/B = B
--rl-submission-granularity str: R/G/B = B
--rl-default-temperature float = 1.0
--rl-default-top-k int = -1
--rl-default-top-p float = 0
--rl-durable-rollout-bank on
--rl-generation-lag float
--rl-importance-sampling-truncation-coef float
--rl-inference-expert-model-parallel-size int
--rl-inference-expert-tensor-model-parallel-size int
--rl-inference-logprobs-is-correction str x? = False
--rl-inference-model-unified-memory-level int: 0/1 = 0
--rl-inference-parsers str x* = []
--rl-inference-pipeline-model-parallel-size int
--rl-inference-tensor-model-parallel-size int
--rl-kv-cache-management-mode str: persist/offload/recompute = persist
--rl-max-inflight-requests int
--rl-offload-inference-model-weights-when-idle on
--rl-offload-optimizer-during-inference on
--rl-partial-rollouts on
--rl-persist-cuda-graphs str x? = False
--rl-profile on
--rl-profile-dir str
--rl-prompts-per-eval int = 32
--rl-rollout-bank-dir str
--rl-rollout-bank-max-bytes int = 0
--rl-sequence-packing-algo str: fifo/round-robin = fifo
--rl-sequence-packing-max-sequences-per-bin int = 50
--rl-skip-bos-token str x? = False
--rl-training-cuda-graphs str x? = False
--rl-use-sequence-packing str x? = False
--rl-verify-model-weights-swap on

refused: train without the logits of a teacher
--logits-load-dir str
--logits-save-dir str
of logits_load_dir
--logits-load-decode-threads int = 4
--logits-load-ignore-errors on
--logits-load-kd-loss-alpha float = 1.0
--logits-load-msc-prefetch-depth int = 2
--logits-load-prefetch-factor int = 3
of logits_save_dir
--logits-save-dtype str: fp16/bf16/fp32 = fp16
--logits-save-top-k int
--logits-save-top-p float
--logits-save-top-p-min-k int = 1
"""


@dataclass(frozen=True, kw_only=True)
class RewardSettings(FlagTable, rows=_ROWS):
    """Reinforcement learning and distillation inside the training program."""
