"""Checkpoints as Megatron-LM and DeepSpeed write them, made of known tensors.

The layouts are written out here by their descriptions, not by the code under test; distributed
files come from torch's own writer. `tests.parity.interop` compares with the real program.
"""

import json
import math
import re
import warnings
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save

LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCABULARY = 4, 16, 4, 2, 24, 64
QKV = (HEADS + 2 * GROUPS) * (HIDDEN // HEADS)
LAYER_SHAPES = {
    "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
    "self_attention.linear_qkv.weight": (QKV, HIDDEN),
    "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
    "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
    "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
    "mlp.linear_fc2.weight": (HIDDEN, FFN),
}
STEP, ITERATION, SAMPLES = 5, 7, 28
MOMENTS = ("exp_avg", "exp_avg_sq")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Return the full tensors of a llama by canonical name, layers one by one."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.empty(shape).normal_(generator=generator)

    found = {"embedding.word_embeddings.weight": drawn(VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        found |= {f"decoder.layers.{i}.{n}": drawn(*s) for n, s in LAYER_SHAPES.items()}
    found["decoder.final_layernorm.weight"] = drawn(HIDDEN)
    found["output_layer.weight"] = drawn(VOCABULARY, HIDDEN)
    return found


def moments() -> dict[str, dict[str, Tensor]]:
    """Return Adam's moments, by kind and name."""
    first, second = weights(1), weights(2)
    return {"exp_avg": first, "exp_avg_sq": {name: t.square() for name, t in second.items()}}


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the keys of distributed files."""
    found = {n: t for n, t in tensors.items() if "layers." not in n}
    for name in LAYER_SHAPES:
        rows = [tensors[f"decoder.layers.{i}.{name}"] for i in range(LAYERS)]
        found[f"decoder.layers.{name}"] = torch.stack(rows)
    return found


def halved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the keys of Megatron-LM's HybridModel of `*-*-*-*-`."""

    def halves(match: re.Match[str]) -> str:
        return f"layers.{2 * int(match[1]) + (match[2] == 'mlp')}.{match[2]}."

    pattern = r"layers\.(\d+)\.(self_attention|mlp)\."
    renamed = {re.sub(pattern, halves, name): tensor for name, tensor in tensors.items()}
    return {name.replace("final_layernorm", "final_norm"): t for name, t in renamed.items()}


def args() -> Namespace:
    """Return the settings that Megatron-LM stores."""
    return Namespace(num_layers=LAYERS, params_dtype=torch.float32, consumed_train_samples=SAMPLES)


def write_torch_dist(
    directory: Path, *, with_optimizer: bool = True, keys: Callable[..., Any] = stacked
) -> Path:
    """Write SAVE/iter_0000007 in the distributed format, under `stacked` or `halved` keys."""
    place = directory / f"iter_{ITERATION:07d}"
    state: dict[str, Any] = dict(keys(weights()))
    if with_optimizer:
        state |= {f"optimizer.state.param.{n}": t for n, t in keys(weights()).items()}
        for kind, tensors in moments().items():
            state |= {f"optimizer.state.{kind}.{n}": t for n, t in keys(tensors).items()}
    group = {"lr": 1e-3, "wd_mult": 1.0, "step": float(STEP)}
    optimizer = {"optimizer": {"param_groups": [group]}}
    _write_distributed(place, state, args=args(), checkpoint_version=3.0, optimizer=optimizer)
    (directory / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return place


def write_by_buffer(directory: Path, *, tp: int = 1, pp: int = 1, is_te: bool = False) -> Path:
    """Write the distributed format with moments by internal buffer, in two buckets each."""
    place = directory / f"iter_{ITERATION:07d}"
    state: dict[str, Any] = dict(stacked(weights()))
    kinds = {"param": weights()} | moments()
    for i in range(tp * pp):
        names = list(stage_names(i // tp, 0, pp, 1, is_te=is_te).values())[::-1]
        half = len(names) // 2
        for bucket, part in enumerate((names[:half], names[half:])):
            for kind, tensors in kinds.items():
                row: list[Tensor] = []
                for name in part:
                    flat = shard(name, tensors[name], i % tp, tp).flatten()
                    row.append(torch.cat([flat, torch.zeros(-len(flat) % 64)]))
                key = f"optimizer.distributed.dp_group_idx_{i}.gbuf_idx_0.dtype_x"
                state[f"{key}.bucket_idx_{bucket}.{kind}"] = torch.cat(row)
    run = args()
    run.tensor_model_parallel_size, run.pipeline_model_parallel_size = tp, pp
    group = {"lr": 1e-3, "step": STEP}
    _write_distributed(place, state, args=run, optimizer={"param_groups": [group]})
    return place


def _write_distributed(place: Path, state: dict[str, Any], **common: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(place), no_dist=True)
    torch.save({"iteration": ITERATION, **common}, place / "common.pt")
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))


def shard(name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    """Return a tensor-parallel rank's part."""
    if tensor.dim() == 1 or size == 1:
        return tensor.clone()
    if name.endswith(COLUMNS):
        return tensor.chunk(size, 1)[rank].contiguous()
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(size, 0)[rank] for half in tensor.chunk(2, 0)])
    return tensor.chunk(size, 0)[rank].contiguous()


def stage_of(p: int, chunk: int, pp: int, vp: int) -> list[int]:
    """Return the layers of a virtual stage."""
    per_stage = LAYERS // (pp * vp)
    first = (chunk * pp + p) * per_stage
    return list(range(first, first + per_stage))


def stage_names(p: int, chunk: int, pp: int, vp: int, *, is_te: bool = False) -> dict[str, str]:
    """Return the parameters of a virtual stage in model order: local name -> canonical name."""
    is_first, is_last = p == 0 and chunk == 0, p == pp - 1 and chunk == vp - 1
    names = {}
    if is_first:
        names["embedding.word_embeddings.weight"] = "embedding.word_embeddings.weight"
    for local, layer in enumerate(stage_of(p, chunk, pp, vp)):
        order = list(LAYER_SHAPES)
        if is_te:  # Transformer Engine holds a norm in the linear layer behind it
            order = [order[2], *order[:2], *order[3:]]
        else:
            order = [order[0], order[2], order[1], *order[3:]]
        for name in order:
            # The local spec keeps norms beside the linear layers.
            short = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            short = short.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
            names[f"decoder.layers.{local}.{short}"] = f"decoder.layers.{layer}.{name}"
    if is_last:
        for name in ("decoder.final_layernorm.weight", "output_layer.weight"):
            names[name] = name
    return names


def write_legacy(directory: Path, *, tp: int = 1, pp: int = 1, vp: int = 1) -> Path:
    """Write one file per rank, with the optimizer of a run without the distributed one."""
    place = directory / f"iter_{ITERATION:07d}"
    for p in range(pp):
        for t in range(tp):
            file: dict[str, Any] = {"args": args(), "iteration": ITERATION,
                                    "checkpoint_version": 3.0}  # fmt: skip
            order: list[str] = []
            for chunk in range(vp):
                names = stage_names(p, chunk, pp, vp)
                key = f"model{chunk}" if vp > 1 else "model"
                file[key] = OrderedDict(
                    (local, shard(full, weights()[full], t, tp)) for local, full in names.items()
                )
                file[key]["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
                order += names.values()
            state, groups, number = {}, [], 0
            for wants_decay in (True, False):
                mine = [n for n in order if (weights()[n].dim() > 1) == wants_decay]
                for name in mine:
                    state[number] = {
                        kind: shard(name, tensors[name], t, tp)
                        for kind, tensors in moments().items()
                    }
                    number += 1
                groups.append({"params": list(range(number - len(mine), number)), "step": STEP})
            file["optimizer"] = {"optimizer": {"state": state, "param_groups": groups}}
            folder = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
            (place / folder).mkdir(parents=True)
            torch.save(file, place / folder / "model_optim_rng.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return place


def write_deepspeed(directory: Path, *, stage: int, dp: int = 2, tp: int = 1) -> Path:
    """Write one tag as ZeRO does; 16-bit weights, fp32 shards."""
    place = directory / f"global_step{ITERATION}"
    place.mkdir(parents=True)
    (directory / "latest").write_text(place.name)
    for t in range(tp):
        own = {kind: {n: shard(n, x, t, tp) for n, x in tensors.items()}
               for kind, tensors in ({"main": weights()} | moments()).items()}  # fmt: skip
        shapes = [
            OrderedDict((n, x.shape) for n, x in own["main"].items() if (x.dim() > 1) == is_matrix)
            for is_matrix in (True, False)
        ]
        module = OrderedDict((n, x.bfloat16()) for n, x in own["main"].items())
        if stage == 3:
            module = OrderedDict((n, torch.empty(0)) for n in own["main"])
        model = {"module": module, "param_shapes": shapes, "global_steps": ITERATION,
                 "global_samples": SAMPLES, "ds_config": {"train_batch_size": 4}}  # fmt: skip
        for d in range(dp):
            cut = _zero_3 if stage == 3 else _zero_1
            rows = {kind: [cut([own[kind][n] for n in group], d, dp) for group in shapes]
                    for kind in own}  # fmt: skip
            entries = {
                i: {"step": torch.tensor(float(STEP))} | {k: rows[k][i] for k in MOMENTS}
                for i in range(len(shapes))
            }
            if stage == 3:
                inner = {"fp32_flat_groups": rows["main"],
                         "optimizer_state_dict": {"state": entries}}  # fmt: skip
                torch.save(model, place / f"zero_pp_rank_{d}_mp_rank_{t:02d}_model_states.pt")
            else:
                inner = {"single_partition_of_fp32_groups": rows["main"],
                         "base_optimizer_state": {"state": entries}}  # fmt: skip
                torch.save(model, place / f"mp_rank_{t:02d}_model_states.pt")
            name = f"zero_pp_rank_{d}_mp_rank_{t:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": inner | {"zero_stage": stage}}, place / name)
    return place


def _zero_1(tensors: list[Tensor], rank: int, size: int) -> Tensor:
    """One row of all elements, padded, in equal parts."""
    row = torch.cat([t.flatten() for t in tensors])
    pad = -len(row) % (2 * size)
    return torch.cat([row, torch.zeros(pad)]).chunk(size)[rank].clone()


def _zero_3(tensors: list[Tensor], rank: int, size: int) -> Tensor:
    """Every tensor in equal parts; a rank's parts follow each other."""
    parts = []
    for tensor in tensors:
        part = math.ceil(tensor.numel() / size)
        padded = torch.cat([tensor.flatten(), torch.zeros(part * size - tensor.numel())])
        parts.append(padded.view(size, part)[rank])
    return torch.cat(parts)
