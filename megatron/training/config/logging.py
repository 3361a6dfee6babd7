"""Flags of logs, scalars, profiles and resilience."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import flag


@dataclass(frozen=True, kw_only=True)
class LoggingSettings:
    """Logs, scalars, profiles, stragglers, watchdog and in-process restart."""

    log_interval: int = 100
    """Steps between log lines."""
    log_rank: int = flag(-1, choices=(-1, 0))
    """Rank that prints losses: -1 is the last rank, as in Megatron; 0 is the rank that prints the
    set-up."""
    log_throughput: bool = False
    """Report TFLOP/s per device and the share of the device's peak."""
    log_params_norm: bool = False
    """Report the norm of the weights."""
    log_digest_interval: int | None = None
    """Print a digest of all weights every this number of steps. With --layout-invariant-mode it is
    equal in all layouts."""
    log_progress: bool = False
    """Append progress and cost of the run to progress.txt in the save directory."""
    metrics_jsonl: str | None = None
    """Write every logged step to this file, as one line of JSON with exact numbers."""
    progress_bar: bool = True
    """Show no progress bar on a terminal."""
    timing_log_level: int = flag(0, choices=(0, 1, 2))
    """Detail of the timers in the log. 0 logs no timers."""
    timing_log_option: str = flag("minmax", choices=("max", "minmax", "all"))
    """Log each timer's maximum over ranks, its minimum and maximum, or its time on all ranks."""
    tensorboard_dir: str | None = None
    """Write TensorBoard scalars to this directory."""
    tensorboard_log_interval: int = 1
    """Steps between scalars."""
    tensorboard_queue_size: int = 1000
    """Number of scalars that the TensorBoard writer buffers."""
    log_timers_to_tensorboard: bool = False
    """Write timers as scalars."""
    log_memory_to_tensorboard: bool = False
    """Write memory as scalars."""
    log_validation_ppl_to_tensorboard: bool = False
    """Write the validation perplexity as a scalar."""
    log_learning_rate_to_tensorboard: bool = True
    """Do not write the learning rate as a scalar."""
    log_loss_scale_to_tensorboard: bool = True
    """Do not write the loss scale as a scalar."""
    wandb_project: str | None = None
    """Project of Weights & Biases; scalars are logged to it."""
    wandb_entity: str | None = None
    """Owner of the Weights & Biases project."""
    wandb_exp_name: str | None = None
    """Name of the Weights & Biases run."""
    wandb_save_dir: str | None = None
    """Local directory of the Weights & Biases files."""
    mlflow_experiment: str | None = None
    """MLflow experiment; the run and its scalars are logged to it."""
    mlflow_run_name: str | None = None
    """Name of the MLflow run. Default: MLflow chooses a name."""
    mlflow_tracking_uri: str | None = None
    """Address of the MLflow server, or sqlite:///FILE with the full package mlflow. Default: the
    variable MLFLOW_TRACKING_URI."""
    otel_enabled: bool = False
    """Export scalars as gauges to an OpenTelemetry collector by OTLP over HTTP. The variables
    OTEL_EXPORTER_OTLP_* set its address and the export interval."""
    otel_service_name: str | None = flag(None, part_of="otel_enabled")
    """service.name of the OpenTelemetry gauges. Default: megatron-lattice."""
    prometheus_port: int | None = None
    """Serve the newest scalars to Prometheus at this port of the last rank's machine."""
    prometheus_host: str = flag("127.0.0.1", part_of="prometheus_port")
    """Address for the Prometheus port; 0.0.0.0 accepts other machines."""
    profile: bool = False
    """Profile some steps. The trace is written to --tensorboard-dir, --save or the working
    directory, and the log contains its path."""
    profile_step_start: int = 10
    """First profiled step."""
    profile_step_end: int = 12
    """First step after profiling."""
    profile_ranks: list[int] = flag([], nargs="+")
    """Profiled ranks. Default: rank 0."""
    use_pytorch_profiler: bool = False
    """Write a chrome trace with torch.profiler instead of marking the range for nsys. On CPUs a
    trace is always written."""
    record_memory_history: bool = flag(
        False, only_on_gpu="only allocations of a GPU can be recorded"
    )
    """Record all allocations of GPU memory."""
    memory_snapshot_path: str = flag("snapshot.pickle", part_of="record_memory_history")
    """File for the record of allocations."""
    log_straggler: bool = False
    """Report ranks that are persistently slower than their peers, with the cause: compute, loader,
    link or processor. Each log line also reports the slowest and the fastest ranks."""
    straggler_minmax_count: int = flag(1, part_of="log_straggler")
    """Number of slowest and of fastest ranks to report."""
    disable_straggler_on_startup: bool = flag(False, part_of="log_straggler")
    """Start with straggler detection off; a request to --straggler-ctrlr-port switches it on."""
    straggler_ctrlr_port: int = flag(65535, part_of="log_straggler")
    """Port on the loopback address of the first rank's machine. Each request (`curl
    127.0.0.1:65535`) switches straggler detection on or off."""
    ft_rank_heartbeat_timeout: float = 7.0
    """Watchdog timeout in seconds. If a rank is stopped, holds the GIL or is in a deadlock for this
    long, the watchdog prints what every rank is doing and ends the job. 0 disables the watchdog."""
    inprocess_restart: bool = False
    """If a rank is lost, replace only its process and continue from copies in memory. Start with
    `python -m megatron.resilience.inprocess_restart` instead of torchrun."""
    inprocess_copy_interval: int = flag(1, part_of="inprocess_restart")
    """Steps between copies of the training state to the memory of the rank and of a neighbour."""
    calibrate_planner: list[str] | None = flag(None, nargs="+", metavar="RUN")
    """Directories of earlier runs on these machines, each with the files of --metrics-jsonl and
    --save. The log line then shows the step time that the planner predicts from these runs. On GPUs
    in the planner's table it shows a prediction without this flag."""
    logging_level: int | None = None
    """Lowest level of Python's logging that is shown, for example 20 for INFO."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Settings files, dry run and layout search."""

    yaml_cfg: str | None = None
    """YAML file with the names of the flags; the command line takes precedence."""
    deepspeed: bool = False
    """Take settings from --deepspeed-config."""
    deepspeed_config: str | None = flag(None, "--deepspeed_config", "--deepspeed-config")
    """JSON file of DeepSpeed. Its keys set the flags of the same meaning; a flag with another value
    on the command line is an error."""
    dry_run: bool = False
    """Print the resolved settings, stages, schedule, kernels, memory and FLOPs; do not train."""
    dry_run_world_size: int | None = None
    """Number of ranks of a dry run. Default: the launched ranks, or the fewest that fit."""
    auto_parallel: str | None = None
    """Search the fastest layout on GPUs of this kind (A100, H100, B200 ...) for
    --dry-run-world-size ranks or the launched ranks, print it with its command line, and exit."""
