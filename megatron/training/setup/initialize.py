"""Start a session: read and compare settings, connect the ranks, create process groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core import num_microbatches_calculator as calculator
from megatron.core.dist_checkpointing.object_store import is_url, storage_path
from megatron.core.foundation import optional_imports
from megatron.core.foundation.errors import MegatronError
from megatron.core.foundation.processes import name_fatal_signals
from megatron.core.foundation.rendezvous import START_TIMEOUT
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import control_group
from megatron.resilience.failure import end_by_verdict, set_earlier_failure_aside
from megatron.resilience.heartbeat import start_heartbeat
from megatron.resilience.process_watch import LocalPeers
from megatron.resilience.restart_loop import RestartAttempt
from megatron.resilience.signals import SignalFlag
from megatron.resilience.status import RunStatus
from megatron.training import global_vars
from megatron.training.checkpointing.checkpointer import claim_directory
from megatron.training.cli.parser import ParsedCommand
from megatron.training.config.resolved import ResolvedRun, resolve_vocabulary
from megatron.training.config.run import RunConfig, plain
from megatron.training.launch import rank_info
from megatron.training.launch.addresses import check_addresses
from megatron.training.launch.printing import is_last_rank, print_rank_0
from megatron.training.launch.rank_info import RankInfo
from megatron.training.rules import notes, resolve_and_check
from megatron.training.rules.settings_agreement import agree_on_settings, comparable
from megatron.training.setup.distributed import (
    create_groups,
    seed_everything,
    set_numerics,
    start_processes,
)


@dataclass
class Session:
    """State of a run before its model is built."""

    run: ResolvedRun
    groups: ProcessGroupCollection
    timers: Timers
    tokenizer: Any
    status: RunStatus
    signal: SignalFlag | None = None
    tensorboard: Any = None
    wandb: Any = None
    attempt: RestartAttempt | None = None
    """The attempt of a run with in-process restarts."""


ReadCommand = Callable[[], ParsedCommand]


def read_settings(read: ReadCommand, world_size: int, status: RunStatus) -> ResolvedRun:
    """Read, derive and check the settings, without starting processes.

    Args:
        status: receives the save directory, for the failure report.
    Raises:
        ConfigError: the settings are invalid; the error lists all problems.
    """

    def ranks(config: RunConfig) -> int:
        save = config.checkpoint.save
        if save is not None and not is_url(save):
            status.save_directory = save
        return world_size

    return resolve_and_check(read, ranks)


def start_session(
    read: ReadCommand,
    status: RunStatus,
    *,
    get_embedding_ranks: Callable[..., list[int]] | None = None,
    get_position_embedding_ranks: Callable[..., list[int]] | None = None,
    store: object = None,
    claims_save_directory: bool = False,
    attempt: RestartAttempt | None = None,
) -> Session:
    """Initialize this rank.

    Args:
        status: receives the rendezvous store and the rank's activity, for the failure report.
        store: an existing rendezvous store.
        attempt: the ranks of this attempt, and the process's copies of the state from earlier
            attempts.
        claims_save_directory: lock the save directory, or fail if another run saves into it.
    Communication:
        comparison of settings through the store; creation of the process groups.
    """
    name_fatal_signals()
    info = rank_info.read_rank_info()
    status.rank, status.activity = info.rank, "starting the processes"
    status.store = store if store is not None else rank_info.connect_store(info, START_TIMEOUT)

    run = agreed_settings(read, info, status)
    announce(run)
    watch_ranks(run, info, status, restarts=attempt is not None)
    connect_ranks(run, info, status, claims_save_directory=claims_save_directory)
    status.activity = "creating process groups"
    groups = create_groups(
        run,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
    )
    set_numerics(run)
    seed_everything(run.schedule.seed)
    run, tokenizer = with_tokenizer(run, status)
    session = open_writers(run, groups, tokenizer, status, attempt)
    publish(session)
    return session


def agreed_settings(read: ReadCommand, info: RankInfo, status: RunStatus) -> ResolvedRun:
    """Read the settings and compare them with the other ranks' settings.

    Raises:
        ConfigError: on all ranks, if the settings of any rank are invalid or differ.
    """
    status.activity = "reading the settings"
    run: ResolvedRun | None = None
    mine: dict[str, Any] | MegatronError
    try:
        run = read_settings(read, info.world_size, status)
        mine = comparable(run.config, run.extra)
    except MegatronError as error:
        mine = error
    agree_on_settings(status.store, info.rank, info.world_size, mine, timeout=START_TIMEOUT)
    assert run is not None
    status.has_begun = True
    return run


def watch_ranks(run: ResolvedRun, info: RankInfo, status: RunStatus, *, restarts: bool) -> None:
    """Start to watch the launcher, the ranks of this machine, and the progress of this rank.

    Without torchrun nobody ends the ranks that wait for a lost rank. With gloo their connections
    break; NCCL waits for its timeout, so that the watchdog has to end them.
    """
    store = status.store
    status.peers = LocalPeers.meet(store, info)
    if status.watch is not None:
        status.watch.follow(status.peers.peers)
    waits_for_lost = info.world_size > 1 and "gloo" not in run.parallelism.distributed_backend
    if status.watch is not None or waits_for_lost:
        status.heartbeat = start_heartbeat(
            store,
            info,
            timeout_s=run.logging.ft_rank_heartbeat_timeout,
            save_directory=status.save_directory,
            on_verdict=lambda code, text: end_by_verdict(code, text, store),
            restarts=restarts,
        )


def connect_ranks(
    run: ResolvedRun, info: RankInfo, status: RunStatus, *, claims_save_directory: bool
) -> None:
    """Create the world process group and claim the save directory."""
    status.activity = "connecting the ranks"
    if "gloo" in run.parallelism.distributed_backend:
        check_addresses(status.store, info.rank, info.world_size, START_TIMEOUT)
    start_processes(run, info, status.store)
    if claims_save_directory and run.checkpoint.save is not None and not run.schedule.skip_train:
        status.activity = "claiming the save directory"
        claim_directory(storage_path(run.checkpoint.save), control_group(torch_collectives.world()))
        status.has_claimed = True
        if info.rank == 0 and status.save_directory is not None:
            set_earlier_failure_aside(status.save_directory)


def with_tokenizer(run: ResolvedRun, status: RunStatus) -> tuple[ResolvedRun, Any]:
    """Build the tokenizer and derive the vocabulary size."""
    status.activity = "building the tokenizer"
    tokenizer = build_tokenizer(run.namespace())
    run = resolve_vocabulary(run, tokenizer.vocab_size)
    for derived in run.derivations[-2:]:
        if derived.name.endswith("vocab_size"):
            print_rank_0(f" > {derived}")
    return run, tokenizer


def open_writers(
    run: ResolvedRun,
    groups: ProcessGroupCollection,
    tokenizer: Any,
    status: RunStatus,
    attempt: RestartAttempt | None,
) -> Session:
    """Open TensorBoard and W&B, and return the session."""
    status.activity = "opening TensorBoard and W&B writers"
    return Session(
        run=run,
        groups=groups,
        timers=Timers(run.logging.timing_log_level, run.logging.timing_log_option),
        tokenizer=tokenizer,
        status=status,
        signal=SignalFlag("SIGTERM", run.schedule.exit_signal)
        if run.schedule.exit_signal_handler
        else None,
        tensorboard=open_tensorboard(run),
        wandb=open_wandb(run),
        attempt=attempt,
    )


def announce(run: ResolvedRun) -> None:
    """Print derived values, and flags without effect."""
    for line in (*notes(run.config), *run.notes):
        print_rank_0(f" note: {line}")
    only_uses_the_model = run.schedule.skip_train and not run.schedule.eval_iters
    for derived in run.derivations:
        if not (only_uses_the_model and derived.is_of_training):
            print_rank_0(f" > {derived}")


def publish(session: Session) -> None:
    """Set the global variables of Megatron that scripts read."""
    run = session.run
    global_vars.publish(
        args=run.namespace(),
        timers=session.timers,
        tokenizer=session.tokenizer,
        tensorboard_writer=session.tensorboard,
        wandb_writer=session.wandb,
        signal_handler=session.signal,
    )
    configure_num_microbatches(run)


def configure_num_microbatches(run: ResolvedRun) -> None:
    """Set the batch sizes of `run` in Megatron's calculator of micro batches."""
    sizes = run.schedule.calculator_settings(run.topology.data_parallel_size, run.model.seq_length)
    calculator.reconfigure_num_microbatches_calculator(run.topology.rank, **sizes)


def open_tensorboard(run: ResolvedRun) -> Any:
    """Return a `SummaryWriter` with the settings of the run as text, or None."""
    if run.logging.tensorboard_dir is None or not is_last_rank():
        return None
    optional_imports.require("tensorboard", purpose="--tensorboard-dir")
    module = optional_imports.require("torch.utils.tensorboard", purpose="--tensorboard-dir")
    writer = module.SummaryWriter(
        log_dir=run.logging.tensorboard_dir, max_queue=run.logging.tensorboard_queue_size
    )
    for name, value in {**run.values, **run.extra}.items():
        writer.add_text(name, str(plain(value)))
    return writer


def open_wandb(run: ResolvedRun) -> Any:
    """Return the wandb module with an open run, offline if the login fails, or None."""
    if not run.logging.wandb_project or not is_last_rank():
        return None
    wandb = optional_imports.require("wandb", purpose="--wandb-project")
    settings = {
        "project": run.logging.wandb_project,
        "entity": run.logging.wandb_entity,
        "name": run.logging.wandb_exp_name,
        "dir": run.logging.wandb_save_dir,
        "config": {name: plain(value) for name, value in run.config.flat().items()},
    }
    try:
        wandb.init(**settings)
    except wandb.Error as error:  # an error on this rank only must not end the run
        print(
            f"wandb: {error}\nwandb: the run is recorded offline; upload it with `wandb sync`, or "
            "run `wandb login` first. WANDB_MODE=offline or WANDB_MODE=disabled avoids the login.",
            flush=True,
        )
        wandb.init(**settings, mode="offline")
    return wandb
