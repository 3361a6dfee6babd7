"""Print how far every family is from Transformers: `python -m tests.parity.families`.

Each case of `tests/unit/hugging_face/models.py`, a small model of Transformers with random weights
and every special feature on, is loaded in layouts of tensor and pipeline parallelism. Logits and
every gradient of one step are compared with those of Transformers, and, where ranks neither split
sequences nor share parameters, the tokens that prompts are continued with greedily. `--further` has
more ranks, context parallelism and stages of ZeRO. Exits with status 1 if any error exceeds its
tolerance. (That the way out gives the same files to the bit, and that Transformers loads them, is
in `tests/unit/hugging_face`.)
"""

import math
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.context_parallel.partition import join_zigzag, shard_sequence
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.hugging_face import read_model_directory
from megatron.inference.generate import generate
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.parity.training_case import RankReport, assemble, named_parameters, whole_gradient
from tests.unit.hugging_face.gradients import compare_gradients
from tests.unit.hugging_face.models import (
    CASES,
    LENGTH,
    VOCAB,
    our_model,
    saved,
)

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 1, "pp": 1},
    {"tp": 2, "pp": 1},
    {"tp": 1, "pp": 2},
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "sp": True},
)

EXPERT_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 1, "pp": 1, "ep": 2},
    {"tp": 2, "pp": 1, "ep": 2, "sp": True},
)

FURTHER_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 4, "pp": 1},
    {"tp": 1, "pp": 1, "cp": 2},
    {"tp": 2, "pp": 2, "cp": 2},
    {"tp": 1, "pp": 1, "dp": 2, "zero": 1},
    {"tp": 1, "pp": 1, "dp": 2, "zero": 3},
)

FURTHER_EXPERT_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "pp": 2, "ep": 2, "sp": True},
    {"tp": 1, "pp": 1, "ep": 2, "zero": 3},
)

PROMPTS = [[5, 17, 80, 3, 44], [9, 2, 61, 33, 7, 70, 12, 25, 90], [1]]
NEW_TOKENS = 12


def text(seed: int) -> Tensor:
    """Return token ids [2, s]."""
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def flags_of(layout: dict[str, Any]) -> list[str]:
    """Return the command line of a layout."""
    flags = ["--tensor-model-parallel-size", str(layout["tp"])]
    flags += ["--pipeline-model-parallel-size", str(layout["pp"])]
    if layout.get("ep"):
        flags += ["--expert-model-parallel-size", str(layout["ep"])]
    if layout.get("cp"):
        flags += ["--context-parallel-size", str(layout["cp"])]
    return [*flags, *["--sequence-parallel"] * layout.get("sp", False)]


def continued(
    groups: ProcessGroupCollection, directory: Path, layout: dict[str, Any]
) -> list[list[int]]:
    """Return the prompts with the tokens that this layout continues them with greedily."""
    chunk, _ = our_model(directory, groups, *flags_of(layout))
    return generate(
        chunk.eval(),
        PROMPTS,
        max_new_tokens=NEW_TOKENS,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pg_collection=groups,
    )


def greedy_tokens(model: Any, prompt: list[int]) -> list[int]:
    """Return the prompt with the tokens that a model of Transformers continues it with.

    Each is the likeliest by a forward pass over all before it. `generate` gives others with Mamba-2
    after a prompt of one token.
    """
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


def compare_tokens(layout: dict[str, Any], directory: Path, theirs: Any) -> None:
    """Fail unless each prompt is continued with the tokens of Transformers."""
    sizes = {name: layout[name] for name in ("tp", "pp", "ep") if name in layout}
    expected = [greedy_tokens(theirs, prompt) for prompt in PROMPTS]
    world_size = math.prod(sizes.values())
    for found in run_distributed(continued, world_size, directory, layout, **sizes):
        assert found == expected, f"{found} instead of {expected}"


def one_step(
    groups: ProcessGroupCollection, directory: Path, layout: dict[str, Any]
) -> tuple[Tensor | None, int, RankReport]:
    """Return this rank's logits [b, s/cp, v] of the last stage, its place in `cp`, and its
    gradients."""
    chunk, _ = our_model(directory, groups, *flags_of(layout))
    config = chunk.config
    sharding = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=SHARDING_STRATEGIES[layout.get("zero", 0)]
    )
    model = DistributedDataParallel(config, sharding, chunk, pg_collection=groups)
    ids, labels = (shard_sequence(text(i), 1, groups.cp.rank(), groups.cp.size()) for i in (0, 1))
    config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)

    def logits_step(iterator: Any, part: Any) -> Any:
        return part(ids, None, None), lambda output, non_loss_data: output

    def loss_step(iterator: Any, part: Any) -> Any:
        output = part(ids, None, None, labels=labels)
        return output, lambda loss: (loss.mean() / groups.cp.size(), {"loss": loss.detach().mean()})

    run = partial(
        get_forward_backward_func(pp_size=layout["pp"]),
        data_iterator=None,
        model=model,
        num_microbatches=1,
        seq_length=LENGTH,
        micro_batch_size=2,
        pg_collection=groups,
    )
    collected = run(forward_step_func=logits_step, forward_only=True, collect_non_loss_data=True)
    logits = None
    if collected:
        logits = gather_from_tensor_model_parallel_region(collected[0].detach(), group=groups.tp)
    model.zero_grad_buffer()
    losses = run(forward_step_func=loss_step, forward_only=False)
    ranks = groups.tp.rank(), groups.expt_tp.rank(), 0
    # Of a part of the sequence, a loss is not that of others.
    said = [] if groups.cp.rank() else [float(x["loss"]) for x in losses]
    report = RankReport(*ranks, said, [], {}, {}, {}, {})
    trained = [named for named in named_parameters([model]) if named[2].requires_grad]
    report.gradients[0] = {name: whole_gradient(c, p) for name, c, p in trained}
    for name, _, parameter in trained:
        meta = get_param_meta(parameter)
        report.metas[name] = (meta.split_dim, meta.stride, meta.is_expert)
    return logits, groups.cp.rank(), report


def compare(case: str, layout: dict[str, Any], directory: Path, theirs: Any) -> tuple[float, float]:
    """Return the largest error of a logit, and of a gradient relative to its tensor's largest.

    Raises:
        AssertionError: one exceeds its tolerance.
    """
    sizes = {name: layout[name] for name in ("tp", "pp", "cp", "ep") if name in layout}
    world_size = math.prod(sizes.values()) * layout.get("dp", 1)
    reports = run_distributed(one_step, world_size, directory, layout, **sizes)
    output = theirs(text(0)).logits
    expected = output.detach()
    by_part = {part: logits for logits, part, _ in reports if logits is not None}
    pieces = torch.stack([by_part[part] for part in sorted(by_part)])
    logits = (join_zigzag(pieces, 2) if len(pieces) > 1 else pieces[0])[..., :VOCAB]
    assert_close(logits, expected, FP32_REORDERED_SUM, "logits")
    theirs.zero_grad()
    F.cross_entropy(output.flatten(0, 1), text(1).flatten()).backward()
    run = assemble([report for _, _, report in reports], vocabulary=VOCAB)
    worst = compare_gradients(directory, theirs, run.gradients[0])
    return float((logits.detach() - expected).abs().max()), worst


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    cases: str = ""
    """Only cases whose name begins so."""
    further: bool = False
    """Only the layouts with more ranks, context parallelism and stages of ZeRO."""


def main() -> int:
    """Print the table."""
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    torch.set_num_threads(1)
    usual, of_experts = LAYOUTS, EXPERT_LAYOUTS
    if options.further:
        usual, of_experts = FURTHER_LAYOUTS, FURTHER_EXPERT_LAYOUTS
    started, failures, num_cases = time.time(), [], 0
    print(f"{'case':<40}{'layout':<18}{'logits':>10}{'gradients':>11}")
    for case in CASES:
        if not case.startswith(options.cases):
            continue
        with tempfile.TemporaryDirectory() as folder:
            theirs = saved(case, Path(folder))
            theirs.set_experts_implementation("eager")  # others have no fp64
            settings = read_model_directory(Path(folder)).settings
            layouts = usual + of_experts * (settings.num_moe_experts is not None)
            if settings.num_kv_shared_layers or settings.per_layer_embed_dim:
                # Such a model has one stage.
                layouts = tuple(x for x in layouts if x["pp"] == 1) + (
                    {"tp": 2, "pp": 1, "sp": True},
                )
            for layout in layouts:
                num_cases += 1
                name = " ".join(f"{k}{int(v)}" for k, v in layout.items())
                try:
                    logits, gradients = compare(case, layout, Path(folder), theirs)
                    if not {"cp", "zero"} & set(layout):
                        compare_tokens(layout, Path(folder), theirs)
                except Exception:
                    failures.append(f"{case} | {name}: {traceback.format_exc(limit=-1)}")
                    print(f"{case:<40}{name:<18}  FAILED", flush=True)
                    continue
                print(f"{case:<40}{name:<18}{logits:>10.1e}{gradients:>11.1e}", flush=True)
    print(f"\n{num_cases} cases in {time.time() - started:.0f} s, {len(failures)} failed")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
