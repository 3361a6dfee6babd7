"""Read Megatron-LM's older `torch` checkpoints: one file of torch.save per model-parallel rank.

    iter_0001000/mp_rank_TT[_PPP]/model_optim_rng.pt

Each file contains a stage's state dict (`model`, or `model0`, `model1`, ... for virtual stages)
with layers numbered from the stage's first, and the optimizer state unless the run used the
distributed optimizer. Tensors of ranks are joined by the names of the parameters; the number of
layers per stage is counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.interop.contents import (
    CheckpointFormat,
    ContentsBuilder,
    InteropContents,
    listed,
    not_readable,
)
from megatron.core.dist_checkpointing.interop.rank_state import (
    StageNames,
    Tensors,
    add_stage,
    common_values,
    describe_layout,
    flatten,
    steps_in,
)
from megatron.core.dist_checkpointing.interop.stored_view import StoredView
from megatron.core.dist_checkpointing.interop.torch_file import read_torch_dict

FILE_NAME = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?(?:_(\d{3}))?", re.ASCII)
_CHUNK = re.compile(r"model(\d*)", re.ASCII)


def is_legacy(directory: Path) -> bool:
    """Return whether the directory has the layout of such a checkpoint."""
    return any(_RANK.fullmatch(name) for name in listed(directory)) and any(
        FILE_NAME in listed(directory / name) for name in listed(directory) if _RANK.fullmatch(name)
    )


def open_legacy(directory: Path) -> InteropContents:
    """Open a checkpoint of the format.

    Raises:
        CheckpointError: ranks are missing, or it has experts.
    """
    builder = ContentsBuilder(directory, "Megatron-LM torch (one file per rank)")
    files = _read_ranks(directory)
    pp_size, tp_size = 1 + max(p for p, _ in files), 1 + max(t for _, t in files)
    missing = [(p, t) for p in range(pp_size) for t in range(tp_size) if (p, t) not in files]
    if missing:
        raise DamagedCheckpointError(
            f"{directory} lacks the files of (pipeline, tensor) ranks {missing[:5]}.",
            rule="every model-parallel rank has a file",
            fix="fetch the directories that are missing",
        )
    num_chunks = len(_chunks(files[0, 0]))
    stages: dict[tuple[int, int], StageNames] = {}
    offset, left_out = 0, []
    for chunk in range(num_chunks):  # the order of the layers: virtual stages alternate over ranks
        for p in range(pp_size):
            ranks = [_chunks(files[p, t])[chunk] for t in range(tp_size)]
            names = stages[p, chunk] = StageNames(ranks[0], offset)
            left_out += add_stage(builder, names, ranks, where=directory)
            offset += names.num_layers
    if left_out:
        builder.notes.append(f"left out, split in an unknown way: {', '.join(left_out[:5])}")
    _add_optimizer(builder, directory, files, stages, (pp_size, tp_size, num_chunks))
    values, run = common_values(files[0, 0])
    builder.layout = describe_layout(run) | {"tp": tp_size, "pp": pp_size, "vp": num_chunks}
    return builder.finish(values, run)


def _read_ranks(directory: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Read the description of every rank's file, by (pipeline rank, tensor rank)."""
    files = {}
    for name in listed(directory):
        match = _RANK.fullmatch(name)
        if match is None:
            continue
        if match[3] is not None and int(match[3]) > 0:
            raise not_readable(
                directory, "it has experts in files of their own", "convert it to torch_dist there"
            )
        files[int(match[2] or 0), int(match[1])] = read_torch_dict(directory / name / FILE_NAME)
    return files


def _chunks(file: Mapping[str, Any]) -> list[dict[str, StoredView]]:
    """Return the tensors of each virtual stage by name."""
    keys = sorted((int(m[1] or 0), key) for key in file if (m := _CHUNK.fullmatch(str(key))))
    chunks = [dict(flatten(file[key])) for _, key in keys if isinstance(file[key], dict)]
    if not chunks:
        raise DamagedCheckpointError("a rank's file holds no model.")
    return [{n: v for n, v in chunk.items() if "_extra_state" not in n} for chunk in chunks]


def _add_optimizer(
    builder: ContentsBuilder,
    directory: Path,
    files: Mapping[tuple[int, int], Mapping[str, Any]],
    stages: Mapping[tuple[int, int], StageNames],
    sizes: tuple[int, int, int],
) -> None:
    pp_size, tp_size, num_chunks = sizes
    if any("distrib_optim.pt" in listed(directory / name) for name in listed(directory)):
        builder.no_optimizer = (
            "its optimizer state is in distrib_optim.pt, by internal buffer and not by parameter: "
            "converting it there to torch_dist with --dist-ckpt-optim-fully-reshardable makes it "
            "readable"
        )
        return
    if any(not isinstance(file.get("optimizer"), dict) for file in files.values()):
        return
    for p in range(pp_size):
        per_rank = [
            _moments(files[p, t]["optimizer"], _chunks(files[p, t])) for t in range(tp_size)
        ]
        if any(moments is None for moments in per_rank):
            builder.no_optimizer = "the groups of its optimizer do not match its parameters"
            return
        for chunk in range(num_chunks):
            for kind in ("exp_avg", "exp_avg_sq", "fp32_param"):
                ranks: Sequence[Tensors] = [
                    moments[chunk].get(kind, {}) for moments in per_rank if moments is not None
                ]
                add_stage(
                    builder,
                    stages[p, chunk],
                    ranks,
                    prefix=f"optimizer.state.{kind}.",
                    where=directory,
                )
    builder.optimizer_step = steps_in(files[0, 0]["optimizer"])


def _moments(
    state: Mapping[str, Any], chunks: Sequence[Tensors]
) -> list[dict[str, dict[str, StoredView]]] | None:
    """Assign the numbered states of an optimizer to the parameters, by chunk and kind.

    Groups contain parameters in the order of the model; parameters without weight decay are exactly
    the biases and other tensors of one dimension. Returns None if the shapes do not fit.
    """
    inner = state.get("optimizer", state)
    groups, entries = inner.get("param_groups"), inner.get("state")
    if not isinstance(groups, list) or not isinstance(entries, dict):
        return None
    order = [(i, name, view) for i, chunk in enumerate(chunks) for name, view in chunk.items()]
    kinds = {
        is_flat: [item for item in order if (len(item[2].shape) == 1) == is_flat]
        for is_flat in (False, True)
    }
    mains = state.get("fp32_from_fp16_params")
    found: list[dict[str, dict[str, StoredView]]] = [{} for _ in chunks]
    for index, group in enumerate(groups):
        numbers = group.get("params") if isinstance(group, dict) else None
        if not isinstance(numbers, list):
            return None
        first = entries.get(numbers[0], {}).get("exp_avg") if numbers else None
        if numbers and not isinstance(first, StoredView):
            return None
        wanted = kinds[first is not None and len(first.shape) == 1] if numbers else []
        if len(wanted) != len(numbers):
            return None
        for position, (number, (chunk, name, view)) in enumerate(zip(numbers, wanted, strict=True)):
            tensors = dict(entries.get(number, {}))
            if isinstance(mains, list) and index < len(mains) and position < len(mains[index]):
                tensors["fp32_param"] = mains[index][position]
            for kind in ("exp_avg", "exp_avg_sq", "fp32_param"):
                tensor = tensors.get(kind)
                if not isinstance(tensor, StoredView):
                    continue
                if tensor.shape != view.shape:
                    return None
                found[chunk].setdefault(kind, {})[name] = tensor
    return found


FORMAT = CheckpointFormat(name="torch", recognises=is_legacy, open=open_legacy)
