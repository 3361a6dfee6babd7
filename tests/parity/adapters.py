"""Print how far adapters are from PEFT's: `python -m tests.parity.adapters`.

For small models of Transformers with random weights and adapters of PEFT's (LoRA, also of routed
experts, and DoRA), logits and the gradient of every factor are compared with those that PEFT
computes, in one process, over replicas at each stage of ZeRO without (EP 1) and with ranks of
experts (EP 2, on four ranks, so that experts have replicas too), and with tensor parallelism. A
figure is the norm of the difference over the norm of PEFT's tensor, and for gradients the largest
of all factors; "max" is the largest element of the difference over the largest element; "joint"
takes the gradients of all factors as one vector. `PEFT's` and `ours` are how far the gradients that
each computes in fp32 are from those in fp64: what either rounds. Columns with 64 are in double
precision throughout, also where the models compute in fp32 whatever their dtype (norms, softmax,
rotation): what is left there is no rounding of fp32, so the mathematics is the same. Exits with
status 1 if fp64 differs by more than 1e-12, or fp32 by more than 1e-6 in norm and by more than
twice what PEFT rounds.

One text says little about what rounds more: its figures scatter by a factor of two. With `--texts
N` the table is means over N texts, in one process, of `PEFT's` and `ours`.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    finalize_model_grads,
)
from megatron.core.distributed.adapter_parameters import set_magnitudes
from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.parameters.param_meta import full_shape, get_param_meta, shard_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.add_adapters import add_adapters
from megatron.core.transformer.low_rank_adapter import (
    LoraConfig,
    is_of_adapter,
)
from megatron.hugging_face import (
    PeftAdapter,
    load_adapters,
    read_adapters,
    read_model_directory,
)
from tests.harness.distributed import run_distributed
from tests.harness.precision import precision
from tests.parity.training_case import named_parameters, whole_gradient
from tests.unit.hugging_face.models import VOCAB, our_model, their_model

FAMILIES: dict[str, list[str]] = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen2, tied": ["q_proj", "o_proj", "up_proj", "down_proj"],
    "gemma3": ["v_proj", "o_proj", "gate_proj", "down_proj"],
    "gpt2": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
    "mixtral": ["q_proj", "v_proj", "o_proj"],
    "qwen2 with experts": ["q_proj", "o_proj", "shared_expert.up_proj", "shared_expert.down_proj"],
    "qwen3 with experts": ["k_proj", "o_proj"],
    "gpt_oss": ["q_proj", "o_proj"],
    "deepseek v2 lite, tied": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "deepseek v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"],
    "mamba2": ["in_proj"],  # PEFT refuses out_proj of this family
    "bamba": ["in_proj", "out_proj", "q_proj", "o_proj", "gate_proj", "down_proj"],
}
"""Case -> PEFT's names of layers."""
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "ep2 expt_tp2": {"tp": 2, "ep": 2, "expt_tp": 2},
    "tp2": {"tp": 2},
    "dp2 zero0": {"zero": 0},
    "dp2 zero1": {"zero": 1},
    "dp2 zero2": {"zero": 2},
    "dp2 zero3": {"zero": 3},
    "dp2 fsdp2": {"zero": None},
    "ep2 zero0": {"ranks": 4, "ep": 2, "zero": 0},
    "ep2 zero1": {"ranks": 4, "ep": 2, "zero": 1},
    "ep2 zero2": {"ranks": 4, "ep": 2, "zero": 2},
    "ep2 zero3": {"ranks": 4, "ep": 2, "zero": 3},
    "ep2 fsdp2": {"ep": 2, "zero": None},
}
"""Name -> sizes of axes, number of ranks where these do not say it, and the stage of ZeRO; None is
torch's FSDP2."""
ROWS, LENGTH, TEXT_SEED = 4, 16, 8


def text(seed: int = TEXT_SEED) -> Tensor:
    """Return token ids [b, s]."""
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def peft_step(case: str, is_dora: bool, folder: Path, dtype: torch.dtype, ids: Tensor) -> Tensor:
    """Write a model, adapters and their gradients into `folder`; return PEFT's logits [b, s, v].

    Args:
        ids: of tokens, [b, s].
    """
    with precision(torch.float32):
        weights = their_model(case).state_dict()
    with precision(dtype):
        return _peft_step(case, is_dora, folder, dtype, weights, ids)


def _peft_step(
    case: str,
    is_dora: bool,
    folder: Path,
    dtype: torch.dtype,
    weights: dict[str, Tensor],
    ids: Tensor,
) -> Tensor:
    model = their_model(case)
    model.load_state_dict(weights)
    model.set_experts_implementation("eager")  # others have no fp64
    model.save_pretrained(folder / "base")
    has_experts = not is_dora and getattr(model.config, "num_experts_per_tok", None)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=FAMILIES[case],
        target_parameters=EXPERTS if has_experts else None,
        use_dora=is_dora,
        fan_in_fan_out=case == "gpt2",
    )
    theirs = peft.get_peft_model(model, config)
    trained = [p for n, p in theirs.named_parameters() if "lora_" in n]
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trained:
            # The same numbers in both precisions.
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float16)
            if parameter.dim() == 1:
                parameter.copy_(parameter.half() * (1 + noise.to(dtype) / 8))
            else:
                parameter.copy_(noise.to(dtype) / 8)
    theirs.save_pretrained(folder / "adapter")
    logits = theirs.eval()(ids).logits
    logits.square().mean().backward()
    with torch.no_grad():
        for parameter in trained:  # so that gradients are read by the names and rows of weights
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(folder / "gradients")
    return logits.detach()


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from another."""

    by_norm: float
    by_max: float
    size: float = 1.0
    """Norm of the other tensor."""

    @staticmethod
    def of(found: Tensor, expected: Tensor) -> Difference:
        """Compare in double precision."""
        error, expected = found.double() - expected.double(), expected.double()
        size, largest = float(expected.norm()), float(expected.abs().max())
        return Difference(
            float(error.norm()) / size if size else float(error.norm()),
            float(error.abs().max()) / largest if largest else float(error.abs().max()),
            size or 1.0,
        )

    @staticmethod
    def joint(of_all: list[Difference]) -> Difference:
        """Return the difference of the tensors as one vector."""
        error = math.hypot(*(d.by_norm * d.size for d in of_all))
        size = math.hypot(*(d.size for d in of_all))
        largest = max(d.by_max for d in of_all)
        return Difference(error / size, largest, size)

    @staticmethod
    def worst(of_all: list[Difference]) -> Difference:
        """Return the largest of each."""
        return Difference(max(d.by_norm for d in of_all), max(d.by_max for d in of_all))


def our_step(
    groups: ProcessGroupCollection,
    folder: Path,
    layout: dict[str, Any],
    dtype: torch.dtype,
    ids: Tensor,
) -> tuple[Tensor, list[Difference], list[Difference]]:
    """Return this rank's rows of the logits, and how far its gradients are from PEFT's, and from
    those that PEFT computes in fp64."""
    with precision(dtype):
        return _our_step(groups, folder, layout, dtype, ids)


def _our_step(
    groups: ProcessGroupCollection,
    folder: Path,
    layout: dict[str, Any],
    dtype: torch.dtype,
    ids: Tensor,
) -> tuple[Tensor, list[Difference], list[Difference]]:
    directory = read_model_directory(folder / "base")
    adapter = read_adapters(folder / "adapter", directory)
    words = ["--tensor-model-parallel-size", str(groups.tp.size())]
    words += ["--expert-model-parallel-size", str(groups.ep.size())]
    words += ["--expert-tensor-parallel-size", str(groups.expt_tp.size())]
    words += ["--sequence-parallel"] * (groups.tp.size() > 1)
    chunk, _ = our_model(folder / "base", groups, *words)
    chunk.to(dtype)
    settings = LoraConfig(
        lora_rank=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_target_modules=tuple(adapter.targets),
        use_dora=adapter.use_dora,
    )
    add_adapters([chunk], settings, groups)
    zero = layout.get("zero", 0)
    wrapper = DistributedDataParallel if zero is not None else TorchFullyShardedDataParallel
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=bool(zero),
        data_parallel_sharding_strategy=SHARDING_STRATEGIES[zero or 0],
    )
    model = wrapper(chunk.config, ddp_config, chunk, pg_collection=groups)
    set_magnitudes([model])
    load_adapters(adapter, [model], groups)
    model.zero_grad_buffer()
    rank, size = groups.dp.rank(), groups.dp.size()
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    logits = gather_from_tensor_model_parallel_region(model(ids[own], None, None), group=groups.tp)[
        ..., :VOCAB
    ]
    logits.square().mean().backward()
    finalize_model_grads([model], pg_collection=groups)
    found = _from_gradients(model, groups, read_adapters(folder / "gradients", directory))
    truth = read_adapters(folder.parent / "64" / "gradients", directory)
    return logits.detach(), found, _from_gradients(model, groups, truth)


def _from_gradients(
    model: DistributedDataParallel, groups: ProcessGroupCollection, theirs: PeftAdapter
) -> list[Difference]:
    """Return how far the gradient of each factor is from that in a directory."""
    differences = []
    with theirs.opened() as reader:
        for name, _, parameter in named_parameters([model]):
            if not is_of_adapter(name):
                continue
            layer, _, part = name.rpartition(".adapter.")
            meta = get_param_meta(parameter)
            tp = groups.expt_tp if meta.is_expert else groups.tp
            found = whole_gradient(model, parameter)
            shape = full_shape(found.shape, meta, tp.size())
            height, width = {
                "down": (None, shape[-1]), "up": (shape[0], None), "magnitude": (shape[0], None)
            }[part]  # fmt: skip
            expected = _gradient(reader, f"{layer}.weight", part, height, width)
            expected = shard_of(expected, meta, tp.rank(), tp.size())
            # Rows of the projections that are joined to it have a gradient here alone.
            found = torch.where(expected != 0, found, 0.0)
            if float(expected.abs().max()) > 0:
                differences.append(Difference.of(found, expected))
    return differences


def _gradient(reader: Any, weight: str, part: str, height: int | None, width: int | None) -> Tensor:
    """Return PEFT's gradient of a factor in the shape of ours."""
    sources = reader.adapter.adapted.get(weight, ())
    if height is None:
        height = max(r.megatron_begin + r.length for s in sources for r in s.rows)
    if width is None:
        width = sources[0].down.shape[1]
    return reader.layer(weight, height, width)[part].nan_to_num(0.0)


def differences(
    layout: dict[str, Any], folder: Path, expected: Tensor, dtype: torch.dtype, ids: Tensor
) -> dict[str, Difference]:
    """Compare the logits and gradients of all ranks with PEFT's.

    Returns:
        `logits`; `gradients`, the worst of all factors; `joint`, all factors of the worst rank as
        one vector; `ours`, the worst gradient from that of PEFT in fp64.
    """
    sizes = {axis: layout[axis] for axis in ("tp", "ep", "expt_tp") if axis in layout}
    world_size = max(layout.get("tp", 1) * layout.get("ep", 1), 2 if "zero" in layout else 1)
    world_size = layout.get("ranks", world_size)
    reports = run_distributed(
        our_step, world_size, folder, layout, dtype, ids, **sizes, timeout_s=240.0
    )
    logits, gradients, from_truth = zip(*reports, strict=True)
    return {
        "logits": Difference.of(torch.cat(logits[:: layout.get("tp", 1)]), expected),
        "gradients": Difference.worst([found for of_rank in gradients for found in of_rank]),
        "joint": Difference.worst([Difference.joint(of_rank) for of_rank in gradients]),
        "ours": Difference.worst([found for of_rank in from_truth for found in of_rank]),
    }


def compare(
    case: str, is_dora: bool, layouts: Sequence[str], folder: Path, seed: int = TEXT_SEED
) -> Iterator[tuple[str, dict[str, Difference]]]:
    """Yield (layout, figures) of a family.

    Figures: those of `differences` in fp32, the same with `64` in fp64, and `PEFT's`, the worst
    gradient of PEFT in fp32 from that in fp64.
    """
    expected, ids = {}, text(seed)
    for bits, dtype in ((32, torch.float32), (64, torch.float64)):
        (folder / str(bits)).mkdir()
        expected[bits] = peft_step(case, is_dora, folder / str(bits), dtype, ids)
    own, truth = (
        load_file(folder / bits / "gradients" / "adapter_model.safetensors")
        for bits in ("32", "64")
    )
    theirs = Difference.worst([Difference.of(own[name], truth[name]) for name in own])
    for name in layouts:
        figures = {"PEFT's": theirs}
        for bits, dtype in ((32, torch.float32), (64, torch.float64)):
            found = differences(LAYOUTS[name], folder / str(bits), expected[bits], dtype, ids)
            end = "64" if bits == 64 else ""
            figures |= {f"{what}{end}": value for what, value in found.items()}
        yield name, figures


def rounding(case: str, is_dora: bool, num_texts: int) -> dict[str, float]:
    """Return the figures of one process by norm, means over texts."""
    sums: dict[str, float] = {}
    for seed in range(num_texts):
        with tempfile.TemporaryDirectory() as folder:
            ((_, found),) = compare(case, is_dora, ["one process"], Path(folder), seed)
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value.by_norm / num_texts
    return sums


def problems(figures: dict[str, Difference]) -> list[str]:
    """Return what exceeds its bound."""
    found = [
        f"{name} {figures[name].by_norm:.1e} > 1e-12"
        for name in ("logits64", "gradients64")
        if figures[name].by_norm > 1e-12
    ]
    allowed = max(1e-6, 2 * figures["PEFT's"].by_norm)
    found += [
        f"{name} {figures[name].by_norm:.1e} > {allowed:.1e}"
        for name in ("logits", "gradients")
        if figures[name].by_norm > allowed
    ]
    return found


def layouts_of(case: str, is_dora: bool) -> list[str]:
    """Return the layouts that say something of a case."""
    with_experts = ("experts", "mixtral", "deepseek", "gpt_oss", "qwen3_next")
    has_experts = any(word in case for word in with_experts)
    return [name for name in LAYOUTS if has_experts or "ep2" not in name]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    cases: str = ""
    """Only cases whose name begins so."""
    layouts: str = ""
    """Only layouts whose name has this in it."""
    texts: int = 0
    """Print means over so many texts, in one process, instead."""


COLUMNS = ("logits", "max", "gradients", "max", "joint", "PEFT's", "ours", "logits64", "grad64")


def columns_of(found: dict[str, Difference]) -> list[float]:
    """Return the numbers of one line."""
    return [
        found["logits"].by_norm, found["logits"].by_max,
        found["gradients"].by_norm, found["gradients"].by_max, found["joint"].by_norm,
        found["PEFT's"].by_norm, found["ours"].by_norm,
        found["logits64"].by_norm, found["gradients64"].by_norm,
    ]  # fmt: skip


def print_line(*words: str, values: Iterable[float]) -> None:
    """Print one line of a table."""
    named = "".join(f"{word:<{width}}" for word, width in zip(words, (31, 15), strict=False))
    print(named + "".join(f"{value:>11.1e}" for value in values), flush=True)


def print_means(cases: Sequence[tuple[str, bool]], num_texts: int) -> int:
    """Print what PEFT and we round, by family; return the exit status."""
    names = ("logits", "gradients", "joint", "PEFT's", "ours")
    print(f"{'mean of ' + str(num_texts) + ' texts':<31}" + "".join(f"{n:>11}" for n in names))
    for case, is_dora in cases:
        found = rounding(case, is_dora, num_texts)
        print_line(_title(case, is_dora), values=[found[name] for name in names])
    return 0


def _title(case: str, is_dora: bool) -> str:
    return f"{case}, {'DoRA' if is_dora else 'LoRA'}"


def main() -> int:
    """Print the table."""
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    torch.set_num_threads(1)
    started, failures, num_cases = time.time(), [], 0
    chosen = [(c, d) for d in (False, True) for c in FAMILIES if c.startswith(options.cases)]
    if options.texts:
        return print_means(chosen, options.texts)
    print(f"{'case':<31}{'layout':<15}" + "".join(f"{name:>11}" for name in COLUMNS))
    for case, is_dora in chosen:
        layouts = [n for n in layouts_of(case, is_dora) if options.layouts in n]
        title = _title(case, is_dora)
        with tempfile.TemporaryDirectory() as folder:
            for name, found in compare(case, is_dora, layouts, Path(folder)):
                num_cases += 1
                failures += [f"{title}, {name}: {problem}" for problem in problems(found)]
                print_line(title, name, values=columns_of(found))
    print(f"\n{num_cases} cases in {time.time() - started:.0f} s, {len(failures)} beyond the bound")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
