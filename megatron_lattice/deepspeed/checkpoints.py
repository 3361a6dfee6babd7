"""Checkpoints of an engine: this library's format, with DeepSpeed's directory names.

SAVE_DIR/latest            text: the tag of the newest checkpoint, replaced by a rename
SAVE_DIR/global_step10/    a checkpoint without pickle; it appears only when complete
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, StrictHandling
from megatron.core.dist_checkpointing.collective import run_collectively, run_on_coordinator
from megatron.core.dist_checkpointing.commit import make_directory
from megatron.core.dist_checkpointing.durable import rename_durably, replace_durably
from megatron.core.dist_checkpointing.interop.contents import InteropContents, slice_of_stack
from megatron.core.dist_checkpointing.interop.opening import LATEST_NAME, open_any
from megatron.core.dist_checkpointing.loader import Contents, load_state
from megatron.core.dist_checkpointing.shard_file import header_of, write_shards
from megatron.core.dist_checkpointing.tree import map_leaves
from megatron.core.dist_checkpointing.writer import DurableFile
from megatron.core.foundation.errors import CheckpointError
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import control_group
from megatron_lattice.deepspeed.engine_state import EngineState
from megatron_lattice.deepspeed.lr_schedules import Schedule


def save(
    engine: EngineState,
    save_dir: str,
    tag: str | None,
    client_state: Mapping[str, object],
    is_latest: bool,
    excludes_frozen: bool,
) -> None:
    """Save model, optimizer, schedule and counters: collective.

    Raises:
        CheckpointError: on all ranks, if a value of `client_state` cannot be stored.
    """
    peers = control_group(torch_collectives.world())

    def declare() -> dict[str, Any]:
        model = engine.replica.sharded_state_dict()
        optimizer = engine.optimizer.sharded_state_dict(model) if engine.optimizer else {}
        if excludes_frozen:
            frozen = {n for n, p in engine.module.named_parameters() if not p.requires_grad}
            model = {name: value for name, value in model.items() if name not in frozen}
        return {
            "model": model,
            "optimizer": optimizer,
            "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler else {},
            "client_state": dict(client_state),
            "engine": engine.counters(),
            "shared": _names_in_module(engine),
        }

    def name_tag() -> str:
        make_directory(Path(save_dir))
        return f"global_step{engine.global_steps}" if tag is None else str(tag)

    state = run_collectively(peers, "declaring the state to save", declare)
    tag = run_on_coordinator(peers, name_tag, doing="writing", path=Path(save_dir))
    dist_checkpointing.save(state, Path(save_dir, tag))
    if is_latest:
        latest = Path(save_dir, LATEST_NAME)
        run_on_coordinator(
            peers, lambda: replace_durably(latest, tag.encode()), doing="writing", path=latest
        )


def load(
    engine: EngineState,
    load_dir: str,
    tag: str | None,
    *,
    is_strict: bool,
    optimizer_states: bool,
    scheduler_states: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load what `save` saved: collective. See `EngineState.load_checkpoint`."""
    peers = control_group(torch_collectives.world())
    latest = Path(load_dir, LATEST_NAME)

    def find() -> str | None:
        if tag is None:
            return latest.read_text().strip() if latest.is_file() else None
        return str(tag)

    found = run_on_coordinator(peers, find, doing="reading", path=latest)
    if found is None:
        warnings.warn(f"{load_dir} has no file {LATEST_NAME}: nothing is loaded", stacklevel=3)
        return None, None
    path, optimizer = Path(load_dir, found), engine.optimizer
    contents = open_any(path, peers=peers)

    def place(leaf: Any) -> Any:
        return slice_of_stack(leaf, contents.manifest) if isinstance(leaf, ShardedTensor) else leaf

    def declare() -> tuple[dict[str, Any], StrictHandling]:
        model = engine.replica.sharded_state_dict()
        wanted: dict[str, Any] = {"model": model}
        if optimizer is not None and optimizer_states:
            wanted["optimizer"] = optimizer.sharded_state_dict(model, is_loading=True)
        if isinstance(contents, InteropContents):
            _check_interop(contents, needs_moments="optimizer" in wanted)
            wanted = map_leaves(place, wanted)
        return wanted, _strictness(wanted, is_strict, contents)

    def apply() -> None:
        for buffer in engine.replica.gradient_buffers:
            buffer.params.prepare_update()
        if isinstance(contents, InteropContents):
            _complete(state, wanted, contents)
        engine.replica.load_state_dict(state["model"], strict=is_strict)
        if optimizer is not None:
            if "optimizer" in wanted:
                optimizer.load_state_dict(state["optimizer"])
            else:
                optimizer.reload_model_params()
        schedule = engine.lr_scheduler
        # Another program's checkpoint only determines the position in a schedule of this package.
        is_known = isinstance(schedule, Schedule) or not isinstance(contents, InteropContents)
        if schedule is not None and is_known and scheduler_states and state.get("lr_scheduler"):
            schedule.load_state_dict(state["lr_scheduler"])
        for name, value in state.get("engine", {}).items():
            setattr(engine, name, value)

    wanted, strictness = run_collectively(peers, "declaring the state to load", declare)
    state = load_state(wanted, contents, peers=peers, strict=strictness).state
    run_collectively(peers, f"applying the state of {path}", apply)
    return str(path), state.get("client_state", {})


def _strictness(wanted: Mapping[str, Any], is_strict: bool, contents: Contents) -> StrictHandling:
    if not is_strict:
        return StrictHandling.LOG_ALL
    if isinstance(contents, InteropContents) or "optimizer" not in wanted:
        return StrictHandling.RAISE_UNEXPECTED  # entries that were not requested are ignored
    return StrictHandling.RAISE_ALL


def _check_interop(contents: InteropContents, *, needs_moments: bool) -> None:
    """Raise on all ranks if the optimizer's state is required and cannot be read."""
    why = contents.why_no_moments
    if needs_moments and why is not None:
        raise CheckpointError(
            f"{contents.directory}: {why}.",
            rule="a run resumes only with the optimizer state of the checkpoint",
            fix="give load_optimizer_states=False to continue with fresh moments",
        )


def _complete(state: dict[str, Any], wanted: Mapping[str, Any], contents: InteropContents) -> None:
    """Add the entries that a checkpoint of DeepSpeed stores under other names."""
    if "optimizer" in wanted:
        contents.complete_optimizer(state["optimizer"], wanted["optimizer"])
    common = contents.common_state()
    steps, samples = int(common.get("iteration", 0)), int(common.get("consumed_train_samples", 0))
    state["engine"] = {"global_steps": steps, "global_samples": samples, "micro_steps": 0}
    state["lr_scheduler"] = {"last_batch_iteration": steps - 1}


def save_weights(engine: EngineState, directory: str, name: str) -> None:
    """Write the full weights to one file of raw tensors: collective.

    Raises:
        CheckpointError: on all ranks, if the file cannot be written, or if its name has the suffix
            of another format.
    """
    peers = control_group(torch_collectives.world())
    path = Path(directory) / name
    state = run_collectively(peers, "gathering the weights", engine.state_dict)

    def write() -> None:
        if not name.endswith(".safetensors"):
            raise CheckpointError(
                f"save_16bit_model(save_filename={name!r}).",
                rule="weights are written as safetensors, which no reader executes",
                fix=f"use {Path(name).stem}.safetensors",
            )
        tensors = {n: v for n, v in state.items() if isinstance(v, Tensor)}
        shared = _names_in_module(engine)
        tensors |= {
            n: tensors[first] for n, first in shared.items() if {n, first} <= tensors.keys()
        }
        write_safetensors(path, tensors)

    run_on_coordinator(peers, write, doing="writing", path=path)


def _further_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return each further name of a tensor -> its first name."""
    first: dict[int, str] = {}
    return {name: first[id(t)] for name, t in named if first.setdefault(id(t), name) != name}


def _names_in_module(engine: EngineState) -> dict[str, str]:
    return _further_names(engine.module.named_parameters(remove_duplicate=False))


def write_safetensors(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write tensors to one file, which appears complete or not at all: this process alone.

    A tensor with several names is stored under the first name. The file's metadata maps each
    further name to the first name, as `safetensors.torch.save_model` does.
    """
    shared = _further_names(state.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.unfinished")
    draft.unlink(missing_ok=True)
    tensors = [(name, tensor) for name, tensor in state.items() if name not in shared]
    header = header_of(tensors, {"format": "pt", **shared})
    num_bytes = len(header) + sum(t.numel() * t.element_size() for _, t in tensors)
    with DurableFile(draft, num_bytes) as file:
        write_shards(draft.name, header, tensors, file)
    rename_durably(draft, path)
