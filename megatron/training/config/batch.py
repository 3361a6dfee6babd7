"""Flags of batch sizes, the length of the run, schedules, and what ends a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.settings.flags import flag, no_flag, required


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Batches, learning rate and weight decay over time, evaluation, exit."""

    micro_batch_size: int = required()
    """Samples of one forward pass of one replica."""
    global_batch_size: int = required()
    """Samples of one optimizer step. Default micro-batch-size * number of replicas."""
    rampup_batch_size: list[int] | None = flag(None, nargs=3)
    """Start size, increment, and the samples over which the batch grows to its full size."""
    step_batch_size_schedule: str | None = None
    """Pairs TOKENS:SIZE, for example "0:16 2.4B:320 4.8B:1536": from so many tokens on, a step has
    so many samples. Numbers of tokens may end in K, M, B or T."""
    decrease_batch_size_if_needed: bool = False
    """Shrink the global batch to the nearest size that the replicas can share."""
    train_iters: int = required()
    """Optimizer steps of the run."""
    train_samples: int = required()
    """Samples of the run, instead of steps."""
    lr_decay_style: str = flag(
        "linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    """Shape of the decay."""
    lr_decay_iters: int | None = None
    """Steps until the lowest rate. Default train-iters."""
    lr_decay_samples: int | None = None
    """The same in samples. Default train-samples."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""
    lr_warmup_samples: int = 0
    """The same in samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of the decay length."""
    lr_warmup_init: float = 0.0
    """Learning rate at step 0."""
    lr_wsd_decay_style: str = flag(
        "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    """Shape of the last phase of warmup-stable-decay (arXiv 2404.06395)."""
    lr_wsd_decay_iters: int | None = None
    """Steps of that phase."""
    lr_wsd_decay_samples: int | None = None
    """The same in samples."""
    override_opt_param_scheduler: bool = False
    """On resume the command line's schedule replaces the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = False
    """On resume the checkpoint's schedule replaces the command line's."""
    seed: int = 1234
    """Base of every random draw: weights, dropout, order of samples."""
    eval_interval: int | None = None
    """Steps between evaluations; none if not given."""
    start_eval_at_iter: int | None = flag(None, part_of="eval_interval")
    """First step after which there may be an evaluation."""
    eval_iters: int = 100
    """Batches of one evaluation."""
    eval_global_batch_size: int | None = None
    """Samples of one batch of an evaluation. Default global-batch-size."""
    eval_micro_batch_size: int | None = None
    """Samples of one forward pass of an evaluation. Default micro-batch-size."""
    skip_train: bool = False
    """Evaluate only."""
    full_validation: bool = False
    """Evaluate on the whole validation set each time."""
    phase_transition_iterations: str | None = None
    """Iterations, separated by commas, after which training saves and leaves; the command for the
    next phase names the data of that phase."""
    exit_interval: int | None = None
    """Leave after a step that this divides."""
    exit_duration_in_mins: int | None = None
    """Leave after this many minutes."""
    exit_signal_handler: bool = False
    """On SIGTERM finish the step, save and leave."""
    exit_signal: str = flag(
        "SIGTERM", choices=("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
    )
    """Another signal that --exit-signal-handler answers besides SIGTERM: SIGINT for Ctrl-C."""
    iterations_to_skip: list[int] = flag([], nargs="+")
    """Steps whose samples are passed over without an update."""
    manual_gc: bool = False
    """Collect garbage at the same step on all ranks, not whenever Python likes."""
    manual_gc_interval: int = 0
    """Steps between such collections; 0 collects never."""
    manual_gc_eval: bool = flag(
        True,
        part_of="manual_gc",
        help="With --manual-gc, do not collect garbage before and after an evaluation.",
    )
    """With --manual-gc, collect garbage before and after each evaluation as well."""
    check_for_spiky_loss: bool = False
    """Look for losses that are far above the recent ones."""
    on_spike: str = flag("warn", choices=("warn", "skip", "rollback", "stop"))
    """What happens then, and where --check-for-large-grads finds a gradient norm: a warning, no
    update in this step, the return to the newest state that was kept, or the end of the run."""
    rollback_iterations_to_skip: int = flag(200, part_of="on_spike")
    """With rollback, steps from that state on whose samples are passed over; at least up to the
    spike. PaLM skipped 200 to 500 (arXiv 2204.02311, section 5.1)."""
    max_rollbacks: int = flag(3, part_of="on_spike")
    """With rollback, how often for the same place, which are spikes within as many steps after
    the last ones that were passed over; the next one stops the run."""
    check_for_nan_in_loss_and_grad: bool = flag(True, "--no-check-for-nan-in-loss-and-grad")
    """Update the weights even from a loss that is not finite."""
    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Steps between comparisons of what ranks hold as copies (weights, optimizer state), which
    also precede every checkpoint. A difference in any bit stops the run. Default: never."""
    rerun_mode: str = flag(
        "validate_results",
        choices=("disabled", "validate_results", "report_stats"),
        note_values={
            "report_stats": "the same as validate_results: no step is run twice for figures"
        },
    )
    """What happens to a step whose loss or gradient is not finite: with validate_results it is run
    again, with the same samples, on all replicas, and with other samples, to tell hardware that was
    wrong once (the step is taken), hardware that is wrong again, samples and weights apart."""
    on_nonfinite: str = flag("stop", choices=("stop", "skip"), part_of="rerun_mode")
    """What happens if it is the samples that make a loss or gradient not finite: stop the run, or
    skip the step."""
    error_injection_rate: int = flag(0, part_of="rerun_mode")
    """Make the losses of a replica NaN in one of so many steps, to test the reruns; 0 never."""
    error_injection_type: str = flag(
        "transient_error",
        choices=("correct_result", "transient_error", "persistent_error"),
        part_of="error_injection_rate",
    )
    """Where that happens again: with its samples anywhere, nowhere, or with any samples there."""
    result_rejected_tracker_filename: str | None = flag(None, part_of="rerun_mode")
    """File to which a line of JSON is added for every step that was run again: the cause, hosts and
    evidence."""
    quarantine_file: str | None = flag(None, part_of="rerun_mode")
    """File to which the host names of machines are added that compute something else than others
    from the same samples. Launchers leave these out."""

    is_sample_based: bool = no_flag(False, is_arg=True)
    """Whether the length of the run was given in samples."""
    lr_decay_steps: int = no_flag(0, is_arg=True)
    """Length of the decay, in samples like the following ones."""
    lr_warmup_steps: int = no_flag(0, is_arg=True)
    """Length of the warm-up."""
    wsd_decay_steps: int | None = no_flag(None, is_arg=True)
    """Length of the last phase of warmup-stable-decay."""
    wd_incr_steps: int = no_flag(0, is_arg=True)
    """Length of the change of weight decay."""

    def calculator_settings(
        self, data_parallel_size: int, seq_length: int | None
    ) -> dict[str, Any]:
        """Return the arguments of a micro batch calculator for these sizes."""
        return {
            "rampup_batch_size": self.rampup_batch_size,
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "data_parallel_size": data_parallel_size,
            "decrease_batch_size_if_needed": self.decrease_batch_size_if_needed,
            "step_batch_size_schedule": self.step_batch_size_schedule,
            "seq_length": seq_length,
        }

    @property
    def eval_batch(self) -> tuple[int, int]:
        """Samples of one batch of an evaluation, and of one of its micro batches."""
        return (
            self.eval_global_batch_size or self.global_batch_size,
            self.eval_micro_batch_size or self.micro_batch_size,
        )
