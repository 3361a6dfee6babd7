"""Check that a resumed run continues with the same order of samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.core.foundation.errors import DataError
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import broadcast_object
from megatron.training.config.resolved import ResolvedRun, phase_of, transitions_of
from megatron.training.launch.printing import print_rank_0
from megatron.training.run.state import TrainState

_MEANING = {
    "sample_order": ("--sample-order", "the kind of order"),
    "seed": ("--seed", "the seed of the shuffles"),
    "sequence_length": ("--seq-length", "the length of a sample"),
    "corpus": ("--data-path", "the contents of a corpus"),
    "contents": ("--data-path", "the contents of a corpus"),
    "documents": ("--split", "the documents of the training part"),
    "epochs": ("--train-iters", "the number of epochs"),
    "weights": ("--data-path", "the weights of the blend"),
    "members": ("--data-path", "the corpora of the blend"),
    "sampler": ("--dataloader-type", "the order of samples over ranks"),
}


def with_data_order(run: ResolvedRun, state: TrainState, order: Any) -> TrainState:
    """Compare the order of the training data with the checkpoint's, and store it in the state.

    Args:
        order: `order_fingerprint()` of the training set; None on ranks without the dataset.
    Raises:
        DataError: on all ranks, if the order differs after the first sample. Not raised at the
            beginning of a phase or with --allow-changed-data.
    Communication:
        one broadcast from rank 0.
    """
    order = broadcast_object(order, 0, torch_collectives.world())
    before = state.data_order
    if order is None:
        return state
    order = {**order, **_sampler_identity(run)}
    consumed = state.consumed_train_samples
    begins_phase = bool(transitions_of(run)) and phase_of(run, consumed).begin == consumed
    if before is not None and consumed > 0 and not begins_phase and not run.schedule.skip_train:
        changed = differences(before, order)
        if changed and not run.data.allow_changed_data:
            raise _refusal(changed, consumed)
        if changed:
            print_rank_0(f" > the data have changed since the checkpoint: {', '.join(changed)}")
    return dataclasses.replace(state, data_order=order)


def _sampler_identity(run: ResolvedRun) -> dict[str, str]:
    """Describe a sampler that reorders samples; return {} for other samplers."""
    kind = run.data.dataloader_type
    if kind == "cyclic-megatron":
        replicas, size = run.topology.data_parallel_size, run.schedule.micro_batch_size
        sharded = "sharded" if run.data.data_sharding else "not sharded"
        kind += f", {sharded}, {replicas} replicas, micro batch size {size}"
    return {"sampler": kind} if kind.startswith("cyclic") else {}


def differences(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, str]:
    """Return name -> "old, now new" for all values that differ."""
    found: dict[str, str] = {}
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        # Earlier checkpoints have no digest of contents.
        if old == new or (name == "contents" and old is None):
            continue
        if isinstance(old, list) and isinstance(new, list) and name == "members":
            if len(old) != len(new):
                found[name] = f"{len(old)} corpora, now {len(new)}"
                continue
            for one, other in zip(old, new, strict=True):
                found |= {k: v for k, v in differences(one, other).items() if k not in found}
            continue
        found[name] = f"{old}, now {new}"
    return found


def _refusal(changed: Mapping[str, str], consumed: int) -> DataError:
    told = [f"{_MEANING.get(n, ('', n))[1]} ({text[:120]})" for n, text in changed.items()]
    flags = sorted({_MEANING.get(name, ("--data-path", ""))[0] for name in changed})
    return DataError(
        f"the checkpoint has consumed {consumed} samples of other data: {'; '.join(told)}.",
        rule="a resumed run continues one order of samples; another order repeats and skips some",
        flags=[*flags, "--allow-changed-data"],
        fix="give the data flags of the saved run, or --allow-changed-data to continue at sample "
        f"{consumed} of the new data; --phase-transition-iterations plans a change of data",
    )
