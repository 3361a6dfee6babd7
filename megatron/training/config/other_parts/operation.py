"""Flags of checkpoints, data, logs and restarts that have another form here."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flag_rows import FlagTable

_ROWS = """
no effect: threads of the process write, and each rank writes what it holds
--async-ckpt-cpu-priority int = 10
--async-ckpt-io-priority int = 3
--async-ckpt-use-cpu-shm on
--async-strategy str: nvrx/mcore = nvrx
--ckpt-fully-parallel-save-process-group str: dp/ep_dp = dp
--dist-ckpt-save-pre-mcore-014 on
--dist-ckpt-workers int = 1
--distrib-optim-fully-reshardable-mem-efficient on
no effect: each rank reads only the slices that it needs
--ckpt-fully-parallel-load-exchange-algo str: broadcast/gather_rounds/gather_object = broadcast
--ckpt-fully-parallel-load-per-rank-objects on
--ckpt-fully-parallel-load-process-group str: dp/ep_dp = dp
--ckpt-pg-tensors-cache-create on
--ckpt-pg-tensors-cache-path str
no effect: every file is compared with its checksum, and every shard with its tensor, in any case
--ckpt-drop-redundant-extra-state on
--no-ckpt-load-validate-sharding-integrity off-switch
--no-strict-fsdp-dtensor-load off-switch
--verify-integrity on
no effect: checkpoints name the tokenizer's files and hold none
--no-save-tokenizer-assets off-switch
refused: use tools/checkpoint export, or convert
--ckpt-convert-format str: torch/torch_dist
--ckpt-convert-save str
of ckpt_convert_format
--ckpt-convert-update-legacy-dist-opt-format on
refused: use --ckpt-step
--override-ckpt-iteration int
refused: drop --no-load-optim: main weights come with the optimizer
--load-main-params-from-ckpt on
refused: give the sizes on the command line: any layout loads the checkpoint
--use-mp-args-from-checkpoint-args on
refused: read them in a callback of pretrain()
--save-activations-interval int
--save-dgrads-interval int
--save-params-interval int
--save-tokens-per-expert-interval int
--save-wgrads-interval int
--moe-routing-trace-path str
of moe_routing_trace_path
--moe-routing-trace-capture-hidden-states on
--moe-routing-trace-capture-logits on
--moe-routing-trace-dump-weights on
--moe-routing-trace-max-training-iters int

no effect: the index of a corpus is opened without being read
--dataloader-defer-npy-index-mmap on
--dataloader-fast-cache-load on
--per-dataset-sequences-path str
no effect: URLs are opened by fsspec
--disable-msc on
--enable-msc on
no effect: the mask of a packed conversation is made by tools/preprocess_data.py --sft
--allow-ambiguous-pad-tokens on
--sft-tokenizer-prompt-format str = nemotron-h-aligned
no effect: training reads ids and leaves the splitting of text to tools/preprocess_data.py
--tokenizer-hf-no-use-fast on
--tokenizer-metadata str
--tokenizer-sentencepiece-legacy on
--no-tokenizer-sentencepiece-ignore-extra-whitespaces off-switch
--null-tokenizer-pad-id int = -1
--use-gigatoken on
refused: put them into the tokenizer's own files
--tokenizer-special-tokens str x+
refused: choose --vocab-size: its last id ends a document
--null-tokenizer-eod-id int
refused: use --make-vocab-size-divisible-by 1
--no-pad-vocab-size off-switch

refused: use torchrun --max-restarts with --load
--adlr-autoresume on
of adlr_autoresume
--adlr-autoresume-interval int = 1000
refused: give --max-restarts, --spares and --nproc-per-node to megatron.resilience.inprocess_restart
--inprocess-max-iterations int
--inprocess-active-world-size int
no effect: the launcher sees which process has ended, and a watchdog which one is stuck
--inprocess-barrier-timeout float = 120
--inprocess-completion-timeout float = 120
--inprocess-empty-cuda-cache on
--inprocess-granularity str: node/rank = node
--inprocess-hard-timeout float = 90
--inprocess-heartbeat-interval float = 30
--inprocess-heartbeat-timeout float = 60
--inprocess-last-call-wait float = 1
--inprocess-monitor-process-interval float = 1.0
--inprocess-monitor-thread-interval float = 1.0
--inprocess-progress-watchdog-interval float = 1.0
--inprocess-soft-timeout float = 60
--inprocess-termination-grace-time float = 1
of enable_ft_package
--calc-ft-timeouts on
--ft-num-warmup-iters int = 5
refused: drop it: faults are not injected into a training run
--fault-injector-fault-types str
of fault_injector_fault_types
--fault-injector-delay-start-iteration int
--fault-injector-fault-delay float
--fault-injector-fault-probabilities str
--fault-injector-mtti-seconds float
--fault-injector-num-ranks int
--fault-injector-offset-seconds float
--fault-injector-ranks str
--fault-injector-seed int
refused: use --exit-signal-handler
--exit-signal-handler-for-training on
no effect: processes that prepare batches end with the training process
--exit-signal-handler-for-dataloader on
no effect: a rank that waits too long says for whom, in the log
--flight-recorder-dump-path str
--flight-recorder-include-stack-trace on
--flight-recorder-trace-buffer-size int = 2000
--no-flight-recorder-dump-on-timeout off-switch
--no-flight-recorder-extra-dump-on-exec off-switch
--no-flight-recorder-include-only-active off-switch

no effect: OpenTelemetry gets scalars, no spans; --profile writes a trace
--otel-span-groups str
no effect: nothing is sent to that service; --metrics-jsonl, TensorBoard and W&B get the scalars
--app-tag-run-name str
--app-tag-run-version str = 0.0.0
--no-one-logger off-switch
--one-logger-async on
--one-logger-project str = megatron-lm
--one-logger-run-name str
--run-workload-inspector-server on
no effect: memory is in the log, and with --log-memory-to-tensorboard a scalar
--log-device-memory-used on
--log-memory-interval int
no effect: settings are in the log, and with --dry-run on the terminal
--dump-param-to-param-group-map str
no effect: a trace of --use-pytorch-profiler has the operations, and no shapes or call stacks
--nvtx-ranges on
--pytorch-profiler-collect-callstack on
--pytorch-profiler-collect-chakra on
--pytorch-profiler-collect-shapes on
--record-shapes on
no effect: devices are not tested between steps; tools/doctor tests a machine before a run
--gpu-sniff-test-interval int
refused: name the files of --valid-data-path: losses are reported by their names
--validation-set-names str x+

refused: use --micro-batch-size
--batch-size int
refused: use --lr-warmup-fraction
--warmup int
refused: use --tensor-model-parallel-size
--model-parallel-size int
refused: use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--checkpoint-activations on
"""


@dataclass(frozen=True, kw_only=True)
class OperationSettings(FlagTable, rows=_ROWS):
    """Checkpoints, data, logs and restarts that have another form here."""
