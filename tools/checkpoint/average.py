"""Write the average of the weights of several checkpoints of one model, as a release.

Averaging the last checkpoints of a run often gives a better model than the last one alone
(Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", section 3,
arXiv 1803.05407). Each weight is taken in its most precise stored form and averaged in fp64; the
result is stored in the precision of the first checkpoint's weights, without optimizer state:
train on from it with --pretrained-checkpoint OUT.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import commit, typed_json
from megatron.core.dist_checkpointing.loader import Contents
from megatron.core.dist_checkpointing.object_store import storage_path
from megatron.core.dist_checkpointing.rewrite import Produced, read_full, write_full_tensors
from megatron.core.dist_checkpointing.shard_file import DTYPES
from megatron.core.foundation.errors import CheckpointError
from megatron.core.settings.flags import positional
from megatron.training.checkpointing.restore import MAIN_WEIGHT_PREFIX
from tools.checkpoint.opening import OPTIMIZER_PREFIX, checkpoint_in, held, opened, settings_of


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Checkpoints, and the factor of each."""

    out: str = positional()
    """The save directory, or its URL, to write OUT/release to."""
    paths: tuple[str, ...] = positional()
    """Checkpoints, or save directories."""
    factors: tuple[float, ...] = ()
    """One per checkpoint; scaled to a sum of 1."""


def run(flags: Flags) -> int:
    """Write the average and return 0."""
    every = [opened(checkpoint_in(storage_path(path))) for path in flags.paths]
    factors = list(flags.factors) or [1.0] * len(every)
    if len(factors) != len(every) or not sum(factors) > 0:
        raise CheckpointError(
            f"{len(factors)} factors for {len(every)} checkpoints, with a sum of {sum(factors):g}.",
            rule="each checkpoint has a factor, and their sum is positive",
            flags=["--factors"],
        )
    shares = [factor / sum(factors) for factor in factors]
    weights = {
        key: tensor
        for key, tensor in every[0].manifest.tensors.items()
        if not key.startswith(OPTIMIZER_PREFIX)
    }
    for other in every[1:]:
        _check_same_model(every[0], other)
    out = storage_path(flags.out)
    with held(out), ExitStack() as stack:
        readers = [stack.enter_context(c.open_reader()) for c in every]

        def average(key: str) -> Tensor:
            total = None
            for contents, reader, share in zip(every, readers, shares, strict=True):
                stored = contents.manifest.tensors
                source = stored.get(MAIN_WEIGHT_PREFIX + key, stored[key])
                part = read_full(source, reader)
                if not part.is_floating_point():
                    return part  # a count or a mask: take the first checkpoint's
                part = part.double().mul_(share)
                total = part if total is None else total.add_(part)
            assert total is not None
            return total.to(DTYPES[weights[key].dtype])

        tensors = {
            key: Produced(t.dtype, t.shape, t.is_padded, lambda key=key: average(key))
            for key, t in weights.items()
        }
        state = every[0].common_state()
        args = Namespace(**settings_of(state))
        kept = {"args": args, "checkpoint_version": state.get("checkpoint_version", 4.0)}
        plain = {"common": typed_json.encode(kept), "objects": {}}
        sources = [
            {"path": str(c.directory), "run": c.manifest.run, "share": share}
            for c, share in zip(every, shares, strict=True)
        ]
        info = dict(every[0].manifest.info) | {"average_of": sources}
        write_full_tensors(out / commit.RELEASE, tensors, plain, info, num_files=1)
        commit.write_tracker(out, commit.RELEASE)
    for source in sources:
        print(f"{source['share']:.4f} x {source['path']}")
    print(f"{out / commit.RELEASE}: {len(tensors)} tensors")
    return 0


def _check_same_model(first: Contents, other: Contents) -> None:
    kinds = [
        {
            key: (tuple(t.shape), torch.empty(0, dtype=DTYPES[t.dtype]).is_floating_point())
            for key, t in contents.manifest.tensors.items()
            if not key.startswith(OPTIMIZER_PREFIX)
        }
        for contents in (first, other)
    ]
    if kinds[0] != kinds[1]:
        key = sorted(k for k in kinds[0].keys() | kinds[1].keys()
                     if kinds[0].get(k) != kinds[1].get(k))[0]  # fmt: skip
        raise CheckpointError(
            f"{other.directory} is of another model than {first.directory}: {key} is "
            f"{kinds[1].get(key, ('absent',))[0]} instead of {kinds[0].get(key, ('absent',))[0]}.",
            rule="only checkpoints of one model, with the same padding, are averaged",
            fix="reload both in one layout and save them, or compare them with diff",
        )
