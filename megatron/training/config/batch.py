"""Flags of batch sizes, the length of a run, schedules, evaluation and exit."""

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
    """Samples of one optimizer step. Default: micro-batch-size * number of replicas."""
    rampup_batch_size: list[int] | None = flag(None, nargs=3)
    """Batch size ramp: start size, increment, and number of samples until the full size."""
    step_batch_size_schedule: str | None = None
    """Pairs TOKENS:SIZE, for example "0:16 2.4B:320 4.8B:1536": after TOKENS tokens, the global
    batch size becomes SIZE samples. Numbers of tokens may end in K, M, B or T."""
    decrease_batch_size_if_needed: bool = False
    """Round the global batch size down to a multiple of micro-batch-size * number of replicas."""
    train_iters: int = required()
    """Optimizer steps of the run."""
    train_samples: int = required()
    """Samples of the run; replaces train-iters."""
    lr_decay_style: str = flag(
        "linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    """Shape of the learning rate decay."""
    lr_decay_iters: int | None = None
    """Steps until the learning rate reaches its minimum. Default: train-iters."""
    lr_decay_samples: int | None = None
    """Samples until the learning rate reaches its minimum. Default: train-samples."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up."""
    lr_warmup_fraction: float | None = None
    """Length of the warm-up as a share of the decay length."""
    lr_warmup_init: float = 0.0
    """Learning rate at step 0."""
    lr_wsd_decay_style: str = flag(
        "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    """Shape of the decay phase of warmup-stable-decay (arXiv 2404.06395)."""
    lr_wsd_decay_iters: int | None = None
    """Steps of the decay phase of warmup-stable-decay."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the decay phase of warmup-stable-decay."""
    override_opt_param_scheduler: bool = False
    """On resume, use the schedule of the command line instead of the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = False
    """On resume, use the schedule of the checkpoint instead of the command line's."""
    seed: int = 1234
    """Seed of all random numbers: initial weights, dropout, order of samples."""
    eval_interval: int | None = None
    """Steps between evaluations. Default: never evaluate."""
    start_eval_at_iter: int | None = flag(None, part_of="eval_interval")
    """Do not evaluate before this step."""
    eval_iters: int = 100
    """Global batches of one evaluation."""
    eval_global_batch_size: int | None = None
    """Samples of one global batch of an evaluation. Default: global-batch-size."""
    eval_micro_batch_size: int | None = None
    """Samples of one micro batch of an evaluation. Default: micro-batch-size."""
    skip_train: bool = False
    """Evaluate without training."""
    full_validation: bool = False
    """Evaluate on the whole validation set each time."""
    phase_transition_iterations: str | None = None
    """Last step of each data phase but the last, separated by commas. Training saves and exits
    there; the command of the next phase names the next data."""
    exit_interval: int | None = None
    """Exit after a step that is a multiple of this."""
    exit_duration_in_mins: int | None = None
    """Exit after this many minutes."""
    exit_signal_handler: bool = False
    """On SIGTERM, finish the step, save and exit."""
    exit_signal: str = flag(
        "SIGTERM", choices=("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
    )
    """Signal that --exit-signal-handler handles in addition to SIGTERM; SIGINT is Ctrl-C."""
    iterations_to_skip: list[int] = flag([], nargs="+")
    """Steps that consume their samples without updating the weights."""
    manual_gc: bool = False
    """Disable Python's automatic garbage collection and collect at the same step on all ranks."""
    manual_gc_interval: int = 0
    """Steps between manual garbage collections. 0 disables them."""
    manual_gc_eval: bool = flag(
        True,
        part_of="manual_gc",
        help="With --manual-gc, do not collect garbage before and after an evaluation.",
    )
    """With --manual-gc, collect garbage before and after each evaluation as well."""
    check_for_spiky_loss: bool = False
    """Detect losses that are far above the recent losses (spikes)."""
    on_spike: str = flag("warn", choices=("warn", "skip", "rollback", "stop"))
    """Reaction to a spike found by --check-for-spiky-loss or --check-for-large-grads: warn, skip
    the update, roll back to the newest saved state, or stop the run."""
    rollback_iterations_to_skip: int = flag(200, part_of="on_spike")
    """After a rollback, skip the samples of this many steps, or of all steps up to the spike if
    these are more. PaLM skipped 200 to 500 (arXiv 2204.02311, section 5.1)."""
    max_rollbacks: int = flag(3, part_of="on_spike")
    """Maximum number of rollbacks for the same place; the next spike stops the run. Spikes have the
    same place if they follow the skipped steps within --rollback-iterations-to-skip steps."""
    check_for_nan_in_loss_and_grad: bool = flag(True, "--no-check-for-nan-in-loss-and-grad")
    """Update the weights even if the loss is not finite."""
    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Steps between comparisons of the copies of weights and optimizer state on different ranks;
    every save compares them too. A difference in any bit stops the run. Default: never compare."""
    rerun_mode: str = flag(
        "validate_results",
        choices=("disabled", "validate_results", "report_stats"),
        note_values={
            "report_stats": "the same as validate_results: no step is run twice for statistics"
        },
    )
    """validate_results reruns a step whose loss or gradient is not finite: with the same samples,
    on all replicas, and with other samples. This distinguishes a transient hardware error (training
    continues), a persistent hardware error, bad samples and bad weights."""
    on_nonfinite: str = flag("stop", choices=("stop", "skip"), part_of="rerun_mode")
    """If the samples make a loss or gradient not finite: stop the run, or skip the step."""
    error_injection_rate: int = flag(0, part_of="rerun_mode")
    """Make the losses of a replica NaN in one of this many steps, to test reruns. 0 disables it."""
    error_injection_type: str = flag(
        "transient_error",
        choices=("correct_result", "transient_error", "persistent_error"),
        part_of="error_injection_rate",
    )
    """When a rerun reproduces the injected NaN: correct_result with the same samples on any rank,
    transient_error never, persistent_error on the same rank with any samples."""
    result_rejected_tracker_filename: str | None = flag(None, part_of="rerun_mode")
    """Append a line of JSON to this file for every rerun: the cause, the hosts and the evidence."""
    quarantine_file: str | None = flag(None, part_of="rerun_mode")
    """Append the host names of faulty machines to this file: machines whose results differ from the
    other machines' results on the same samples. Launchers skip these hosts."""

    is_sample_based: bool = no_flag(False, is_arg=True)
    """Whether the flags give the length of the run in samples."""
    lr_decay_steps: int = no_flag(0, is_arg=True)
    """Length of the learning rate decay in samples."""
    lr_warmup_steps: int = no_flag(0, is_arg=True)
    """Length of the warm-up in samples."""
    wsd_decay_steps: int | None = no_flag(None, is_arg=True)
    """Length of the decay phase of warmup-stable-decay in samples."""
    wd_incr_steps: int = no_flag(0, is_arg=True)
    """Length of the change of weight decay in samples."""

    def calculator_settings(
        self, data_parallel_size: int, seq_length: int | None
    ) -> dict[str, Any]:
        """Return the arguments of a micro batch calculator."""
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
        """Global batch size and micro batch size of an evaluation, in samples."""
        return (
            self.eval_global_batch_size or self.global_batch_size,
            self.eval_micro_batch_size or self.micro_batch_size,
        )
