"""Names of `megatron.training.utils` and its neighbours, for training scripts."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import distributed, parallel_state
from megatron.core.context_parallel import partition
from megatron.core.datasets.gpt_dataset import attention_mask, document_starts
from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.flags import from_args
from megatron.core.tensor_parallel.data import broadcast_data
from megatron.core.topology.group import Group
from megatron.core.transport import collectives, torch_collectives
from megatron.core.utils import get_model_config, get_pg_rank, get_pg_size
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.config.data import DataSettings
from megatron.training.config.resolved import pad_vocabulary
from megatron.training.datasets.blends import blends_of
from megatron.training.global_vars import get_args
from megatron.training.launch.printing import print_rank_0

BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
_DTYPES = (torch.int64, torch.float32, torch.bool)
_ABSENT, _NO_DATA, _OTHER_DTYPE = -1, -2, -3


def get_batch_on_this_tp_rank(
    data_iterator: Any, mtp_on_this_rank: bool = False, vp_stage: int | None = None
) -> dict[str, Tensor | None]:
    """Read the next micro batch on the first tensor-parallel rank and broadcast it to all ranks.

    Args:
        data_iterator: yields batches with some of the entries `BATCH`; only the first rank of the
            tensor-parallel group reads it. If it is None there (a stage without data), all entries
            are None.
        mtp_on_this_rank, vp_stage: ignored: every stage receives all entries.
    Returns:
        the entries in the order of `BATCH`, on this rank's device; None for entries that the batch
        lacks.
    Communication:
        one broadcast of five numbers over `tp`, and two for each dtype among the entries.
    Raises:
        DataError: on every rank, if an entry is neither int64 nor fp32 nor bool.
    """
    group = ProcessGroupCollection.current().tp
    batch: dict[str, Any] = {}
    kinds = torch.full((len(BATCH),), _ABSENT, dtype=torch.int64)
    if get_pg_rank(group) == 0:
        if data_iterator is None:
            kinds.fill_(_NO_DATA)
        else:
            batch = {n: v for n, v in next(data_iterator).items() if n in BATCH and v is not None}
            for place, name in enumerate(BATCH):
                if name in batch:
                    dtype = batch[name].dtype
                    kinds[place] = _DTYPES.index(dtype) if dtype in _DTYPES else _OTHER_DTYPE
    if get_pg_size(group) > 1:
        kinds = collectives.broadcast(kinds.to(device.current_device()), group)
    kind_of = dict(zip(BATCH, kinds.tolist(), strict=True))
    wrong = [name for name, kind in kind_of.items() if kind == _OTHER_DTYPE]
    if wrong:
        raise DataError(
            f"the entries {', '.join(wrong)} of a micro batch have a dtype that cannot be sent.",
            rule="tokens, labels, position_ids are int64, loss_mask is fp32, attention_mask bool",
            fix="convert them in the dataset's __getitem__",
        )
    sent: dict[str, Tensor] = {}
    for number, dtype in enumerate(_DTYPES):
        names = [name for name, kind in kind_of.items() if kind == number]
        if names:
            sent.update(broadcast_data(names, batch, dtype))
    return {name: sent.get(name) for name in BATCH}


def get_batch_on_this_cp_rank(
    batch: Mapping[str, Any],
    *options: Any,
    cp_group: Group | None = None,
    is_hybrid_cp: bool = False,
) -> dict[str, Any]:
    """Return this context-parallel rank's positions of a micro batch.

    Both of Megatron's signatures are supported: `(batch[, cp_group])` and
    `(batch, is_hybrid_cp[, cp_group])`.
    """
    rest = list(options)
    if rest and isinstance(rest[0], bool):
        is_hybrid_cp = rest.pop(0)
    if rest:
        cp_group = rest.pop(0)
    if is_hybrid_cp or rest:
        raise ConfigError(
            "a micro batch was to be split over hybrid context-parallel groups.",
            rule="the ranks that split a micro batch are chosen before it is split",
            flags=["--hybrid-context-parallel"],
            fix="call megatron.core.context_parallel.share_microbatch(batch), then this without it",
        )
    return partition.get_batch_on_this_cp_rank(batch, cp_group)


def is_first_or_last_pipeline_stage(vp_stage: int | None = None) -> bool:
    """Return whether this rank's (virtual) stage is the first or the last one."""
    return parallel_state.is_pipeline_first_stage(
        False, vp_stage
    ) or parallel_state.is_pipeline_last_stage(False, vp_stage)


def maybe_wrap_for_inprocess_restart(pretrain: object) -> tuple[Any, None]:
    """Return (pretrain, None): torchrun restarts processes that fail."""
    return pretrain, None


def get_blend_and_blend_per_split(args: Namespace) -> tuple[Any, Any]:
    """Return `blend` and `blend_per_split` of a dataset config; at least one of them is None."""
    found = blends_of(from_args(DataSettings, vars(args)))
    return found.get("blend"), found.get("blend_per_split")


def get_ltor_masks_and_position_ids(
    data: Tensor, eod_token: int, *options: object, **named: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the masks and positions of a decoder's micro batch.

    Both of Megatron's signatures are supported:

        (data, eod_token, reset_position_ids, reset_attention_mask, eod_mask_loss)
        (data, eod_token, pad_token, reset_position_ids, reset_attention_mask, eod_mask_loss,
         pad_mask_loss)

    Args:
        data: token ids [b, s].
    Returns:
        attention mask bool [b or 1, 1, s, s], True = forbidden; loss mask fp32 [b, s]; position
        ids int64 [b, s].
    """
    names: tuple[str, ...] = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    if len(options) > len(names) or (options and not isinstance(options[0], bool)):
        names = ("pad_token", *names, "pad_mask_loss")
    given = {**dict(zip(names, options, strict=False)), **named}
    unknown = set(given) - {"pad_token", "pad_mask_loss", *names}
    if unknown or len(options) > len(names):
        raise TypeError(f"get_ltor_masks_and_position_ids() does not take {sorted(unknown)}")

    starts = torch.zeros_like(data)
    if given.get("reset_position_ids") or given.get("reset_attention_mask"):
        starts = torch.stack([document_starts(row, eod_token) for row in data])
    loss_mask = torch.ones(data.shape, dtype=torch.float32, device=data.device)
    if given.get("eod_mask_loss"):
        loss_mask[data == eod_token] = 0.0
    if given.get("pad_mask_loss") and given.get("pad_token") is not None:
        loss_mask[data == given["pad_token"]] = 0.0
    positions = torch.arange(data.shape[1], device=data.device).expand_as(data)
    if given.get("reset_position_ids"):
        positions = positions - starts
    seen = starts if given.get("reset_attention_mask") else torch.zeros_like(data[:1])
    return attention_mask(seen), loss_mask, positions.clone()


def _ddp_wrap(
    model: Sequence[nn.Module],
    data_parallel_random_init: bool,
    ddp_config: distributed.DistributedDataParallelConfig,
    overlap_param_gather_with_optimizer_step: bool,
    use_megatron_fsdp: bool = False,
    use_torch_fsdp2: bool = False,
    *,
    pg_collection: ProcessGroupCollection,
) -> list[nn.Module]:
    """Return the chunks in the data-parallel wrapper that the options choose.

    Raises:
        ConfigError: `use_megatron_fsdp`; the error names the replacement.
    """
    kind = "TorchFullyShardedDataParallel" if use_torch_fsdp2 else "DistributedDataParallel"
    # The first name has no definition: its call raises the error.
    wrapper = getattr(distributed, "FullyShardedDataParallel" if use_megatron_fsdp else kind)
    plain = overlap_param_gather_with_optimizer_step
    wrapped: list[Any] = [
        wrapper(
            get_model_config(chunk), ddp_config, chunk, disable_bucketing=plain or place > 0,
            pg_collection=pg_collection,
        )
        for place, chunk in enumerate(model)
    ]  # fmt: skip
    for chunk in wrapped if data_parallel_random_init else ():
        chunk.broadcast_params()
    return wrapped


def core_transformer_config_from_yaml(args: Namespace, _: str = "language_model") -> Any:
    """Return the model's config; `args` already contains the flags of a YAML file."""
    return core_transformer_config_from_args(args)


def report_memory(name: str) -> None:
    """Print the peak memory of this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    print(f"[rank {rank}] {name} memory: peak {device.peak_memory_bytes() / 2**20:.1f} MiB")


def append_to_progress_log(string: str, barrier: bool = True) -> None:
    """Append a line to progress.txt in the save directory of the arguments, on rank 0."""
    append_to_progress_log_in(get_args().save, string, barrier)


def append_to_progress_log_in(save_dir: str | None, string: str, barrier: bool = True) -> None:
    """Append a line to progress.txt in a directory, on rank 0; None has no such file."""
    if save_dir is None:
        return
    if barrier and dist.is_initialized():
        torch_collectives.barrier(torch_collectives.world())
    if safe_get_rank() == 0:
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        with (Path(save_dir) / "progress.txt").open("a") as file:
            file.write(f"{stamp}\t{safe_get_world_size()} ranks\t{string}\n")


def barrier_and_log(string: str) -> None:
    """Wait for all ranks; then rank 0 prints the time."""
    if dist.is_initialized():
        torch_collectives.barrier(torch_collectives.world())
    print_rank_0(f"[{string}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}")


def add_filter_to_all_loggers(added: logging.Filter | Callable[[logging.LogRecord], bool]) -> None:
    """Add a filter, an object or a function, to the root logger and all that exist."""
    for name in (None, *logging.root.manager.loggerDict):
        logging.getLogger(name).addFilter(added)


def warning_filter(record: logging.LogRecord) -> bool:
    """Return whether a record is not a warning."""
    return record.levelno != logging.WARNING


def module_filter(record: logging.LogRecord, modules_to_filter: Sequence[str]) -> bool:
    """Return whether no prefix in `modules_to_filter` begins the name of the record's logger."""
    return not record.name.startswith(tuple(modules_to_filter))


def setup_logging(
    logging_level: int | None = None,
    filter_warning: bool = True,
    modules_to_filter: Sequence[str] | None = None,
    set_level_for_all_loggers: bool = False,
) -> None:
    """Set the level of the root logger and of Megatron's loggers, and add filters to all.

    Args:
        logging_level: default: the environment variable MEGATRON_LOGGING_LEVEL, or INFO.
        filter_warning: drop warnings.
        modules_to_filter: drop records of loggers whose names begin with these.
        set_level_for_all_loggers: also set the level of all other loggers.
    """
    if logging_level is None:
        logging_level = int(os.getenv("MEGATRON_LOGGING_LEVEL", str(logging.INFO)))
    logging.getLogger().setLevel(logging_level)
    for name in logging.root.manager.loggerDict:
        if set_level_for_all_loggers or name.startswith("megatron"):
            logging.getLogger(name).setLevel(logging_level)
    if filter_warning:
        add_filter_to_all_loggers(warning_filter)
    if modules_to_filter:
        kept = partial(module_filter, modules_to_filter=modules_to_filter)
        add_filter_to_all_loggers(kept)


def calculate_padded_vocab_size(
    vocab_size: int,
    make_vocab_size_divisible_by: int,
    tensor_model_parallel_size: int,
    logging_enabled: bool = True,
) -> int:
    """Return the number of rows of the embedding; nothing is logged."""
    return pad_vocabulary(
        vocab_size, multiple=make_vocab_size_divisible_by, tp=tensor_model_parallel_size
    )


def safe_get_rank() -> int:
    """Return this process's rank, which the launcher sets before the processes are connected."""
    return dist.get_rank() if dist.is_initialized() else _launched("RANK", "SLURM_PROCID", 0)


def safe_get_world_size() -> int:
    """Return the number of processes, which the launcher sets before they are connected."""
    return (
        dist.get_world_size()
        if dist.is_initialized()
        else _launched("WORLD_SIZE", "SLURM_NTASKS", 1)
    )


def get_local_rank_preinit() -> int:
    """Return this process's rank on its node, which the launcher sets."""
    return _launched("LOCAL_RANK", "SLURM_LOCALID", 0)


def _launched(torchrun: str, slurm: str, default: int) -> int:
    """Read a variable of torchrun, of a SLURM job otherwise; without both use the default."""
    found = _of_slurm_job(slurm)
    return int(os.environ.get(torchrun, default if found is None else found))


def is_slurm_job() -> bool:
    """Return whether SLURM started this process."""
    return "SLURM_NTASKS" in os.environ


def _of_slurm_job(name: str) -> int | None:
    """Return a number that SLURM sets; None outside of its jobs."""
    return int(os.environ[name]) if is_slurm_job() and name in os.environ else None


resolve_slurm_rank = partial(_of_slurm_job, "SLURM_PROCID")
resolve_slurm_local_rank = partial(_of_slurm_job, "SLURM_LOCALID")
resolve_slurm_world_size = partial(_of_slurm_job, "SLURM_NTASKS")
