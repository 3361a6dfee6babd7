"""Flags of logs, scalars, profiles and resilience."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import flag


@dataclass(frozen=True, kw_only=True)
class LoggingSettings:
    """What is reported, where and how often."""

    log_interval: int = 100
    """Steps between log lines."""
    log_rank: int = flag(-1, choices=(-1, 0))
    """Rank that prints losses: the last one, as Megatron does, or 0, beside the set-up."""
    log_throughput: bool = False
    """Report TFLOP/s per device and the share of the peak that is reached."""
    log_params_norm: bool = False
    """Report the norm of the weights."""
    log_progress: bool = False
    """Append progress and cost of the run to progress.txt in the save directory."""
    metrics_jsonl: str | None = None
    """Write every logged step as one JSON line with exact numbers to this file."""
    progress_bar: bool = True
    """Show no progress bar on a terminal."""
    timing_log_level: int = flag(0, choices=(0, 1, 2))
    """How fine the timers are."""
    timing_log_option: str = flag("minmax", choices=("max", "minmax", "all"))
    """How timers of different ranks are shown."""
    tensorboard_dir: str | None = None
    """Directory of TensorBoard scalars."""
    tensorboard_log_interval: int = 1
    """Steps between scalars."""
    tensorboard_queue_size: int = 1000
    """Scalars held back before they are written."""
    log_timers_to_tensorboard: bool = False
    """Timers as scalars."""
    log_memory_to_tensorboard: bool = False
    """Memory as scalars."""
    log_validation_ppl_to_tensorboard: bool = False
    """Validation perplexity as a scalar."""
    log_learning_rate_to_tensorboard: bool = True
    """No learning rate among the scalars."""
    log_loss_scale_to_tensorboard: bool = True
    """No loss scale among the scalars."""
    wandb_project: str | None = None
    """Weights & Biases project."""
    wandb_entity: str | None = None
    """Its owner."""
    wandb_exp_name: str | None = None
    """Name of the run there."""
    wandb_save_dir: str | None = None
    """Local directory of its files."""
    mlflow_experiment: str | None = None
    """MLflow experiment; the run and its scalars are recorded in it."""
    mlflow_run_name: str | None = None
    """Name of the run there. Default one of MLflow's."""
    mlflow_tracking_uri: str | None = None
    """Address of the MLflow server; sqlite:///FILE with the whole package mlflow. Default what
    MLFLOW_TRACKING_URI says."""
    otel_enabled: bool = False
    """Scalars as gauges to an OpenTelemetry collector by OTLP over HTTP; the variables
    OTEL_EXPORTER_OTLP_* say where it is and how often it gets them."""
    otel_service_name: str | None = flag(None, part_of="otel_enabled")
    """service.name of these gauges. Default megatron-lattice."""
    prometheus_port: int | None = None
    """Serve the newest scalars to Prometheus at this port of the last rank's machine."""
    prometheus_host: str = flag("127.0.0.1", part_of="prometheus_port")
    """Address to listen at: 0.0.0.0 lets other machines read."""
    profile: bool = False
    """Profile some steps. The trace is in --tensorboard-dir, --save or the working directory, and
    its path is printed."""
    profile_step_start: int = 10
    """First profiled step."""
    profile_step_end: int = 12
    """Step before which profiling ends."""
    profile_ranks: list[int] = flag([], nargs="+")
    """Profiled ranks. Default rank 0."""
    use_pytorch_profiler: bool = False
    """Write a chrome trace with torch.profiler instead of marking the range for nsys. On CPUs a
    trace is always written."""
    record_memory_history: bool = flag(
        False, only_on_gpu="allocations of a device are recorded, and there is none"
    )
    """Record allocations of the device, on GPUs."""
    memory_snapshot_path: str = flag("snapshot.pickle", part_of="record_memory_history")
    """Where that record is written."""
    log_straggler: bool = False
    """Name ranks that are persistently slower than their peers, with what they are slow at:
    compute, loader, link, processor. Reports the slowest and the fastest at each log line."""
    straggler_minmax_count: int = flag(1, part_of="log_straggler")
    """How many of the slowest and of the fastest are reported."""
    disable_straggler_on_startup: bool = flag(False, part_of="log_straggler")
    """Begin without: a request to --straggler-ctrlr-port switches it on."""
    straggler_ctrlr_port: int = flag(65535, part_of="log_straggler")
    """Port on the loopback address of the first rank's machine: each request (`curl
    127.0.0.1:65535`) switches the search on or off."""
    ft_rank_heartbeat_timeout: float = 7.0
    """Watchdog timeout in seconds. If a rank is stopped, holds the GIL or is in a deadlock for this
    long, the watchdog prints what every rank is doing and ends the job. 0: no watchdog."""
    inprocess_restart: bool = False
    """If a rank is lost, replace its process alone, and continue from copies in memory. Start with
    `python -m megatron.resilience.inprocess_restart` instead of torchrun."""
    inprocess_copy_interval: int = flag(1, part_of="inprocess_restart")
    """Steps between copies of the state in the memory of its rank and of a neighbour."""
    calibrate_planner: list[str] | None = flag(None, nargs="+", metavar="RUN")
    """Directories of runs that were measured on these machines, each with --metrics-jsonl and
    --save in it: the log line shows the time of a step that is predicted from them. On GPUs that
    the planner knows it shows one without."""
    logging_level: int | None = None
    """Level of Python's logging from which messages are shown, for example 20 for information."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Where the settings come from, and whether anything is run."""

    yaml_cfg: str | None = None
    """YAML file with the same names as the flags; the command line wins."""
    deepspeed: bool = False
    """Take settings from the DeepSpeed configuration."""
    deepspeed_config: str | None = flag(None, "--deepspeed_config", "--deepspeed-config")
    """DeepSpeed's JSON file: what it says stands for flags, and flags may not contradict it."""
    dry_run: bool = False
    """Print the resolved settings, stages, schedule, kernels, memory and FLOPs; train nothing."""
    dry_run_world_size: int | None = None
    """Ranks to plan for in a dry run. Default what the launcher started, or the fewest that
    fit."""
    auto_parallel: str | None = None
    """Search the fastest layout on GPUs of this kind (A100, H100, B200 ...), as many as
    --dry-run-world-size says or were launched; print it with its command line; train nothing."""
