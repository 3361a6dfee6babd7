"""Print how far every family is from Transformers: `python -m tests.parity.families`.

Each case of `tests/unit/hugging_face/models.py`, a small model of Transformers with random weights
and every special feature on, is loaded in layouts of tensor and pipeline parallelism. Logits and
every gradient of one step are compared with those of Transformers. Exits with status 1 if any
error exceeds its tolerance. (That the way out gives the same files to the bit, and that
Transformers loads them, is in `tests/unit/hugging_face`.)
"""

from __future__ import annotations

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

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.parity.training_case import RankReport, assemble, named_parameters, whole_gradient
from tests.unit.hugging_face.models import (
    CASES,
    LENGTH,
    VOCAB,
    compare_gradients,
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


def text(seed: int) -> Tensor:
    """Return token ids [2, s]."""
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def one_step(
    groups: ProcessGroupCollection, directory: Path, layout: dict[str, Any]
) -> tuple[Tensor | None, RankReport]:
    """Return the logits [b, s, v] on the last stage, and this rank's gradients."""
    flags = ["--tensor-model-parallel-size", str(layout["tp"])]
    flags += ["--pipeline-model-parallel-size", str(layout["pp"])]
    if layout.get("ep"):
        flags += ["--expert-model-parallel-size", str(layout["ep"])]
    flags += ["--sequence-parallel"] * layout.get("sp", False)
    chunk, _ = our_model(directory, groups, *flags)
    config = chunk.config
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(), chunk, pg_collection=groups
    )
    config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)

    def logits_step(iterator: Any, part: Any) -> Any:
        return part(text(0), None, None), lambda output, non_loss_data: output

    def loss_step(iterator: Any, part: Any) -> Any:
        output = part(text(0), None, None, labels=text(1))
        return output, lambda loss: (loss.mean(), {"loss": loss.detach().mean()})

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
        logits = gather_from_tensor_model_parallel_region(collected[0], group=groups.tp)
    model.zero_grad_buffer()
    losses = run(forward_step_func=loss_step, forward_only=False)
    ranks = groups.tp.rank(), groups.expt_tp.rank(), 0
    report = RankReport(*ranks, [float(x["loss"]) for x in losses], [], {}, {}, {}, {})
    named = list(named_parameters([model]))
    report.gradients[0] = {name: whole_gradient(c, p) for name, c, p in named}
    for name, _, parameter in named:
        meta = get_param_meta(parameter)
        report.metas[name] = (meta.split_dim, meta.stride, meta.is_expert)
    return logits, report


def compare(case: str, layout: dict[str, Any], directory: Path, theirs: Any) -> tuple[float, float]:
    """Return the largest error of a logit, and of a gradient relative to its tensor's largest.

    Raises:
        AssertionError: one exceeds its tolerance.
    """
    sizes = {name: layout[name] for name in ("tp", "pp", "ep") if name in layout}
    world_size = layout["tp"] * layout["pp"] * layout.get("ep", 1)
    reports = run_distributed(one_step, world_size, directory, layout, **sizes)
    output = theirs(text(0)).logits
    expected = output.detach()
    logits = next(logits for logits, _ in reports if logits is not None)[..., :VOCAB]
    assert_close(logits, expected, FP32_REORDERED_SUM, "logits")
    theirs.zero_grad()
    F.cross_entropy(output.flatten(0, 1), text(1).flatten()).backward()
    run = assemble([report for _, report in reports], vocabulary=VOCAB)
    worst = compare_gradients(directory, theirs, run.gradients[0])
    return float((logits.detach() - expected).abs().max()), worst


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    cases: str = ""
    """Only cases whose name begins so."""


def main() -> int:
    """Print the table."""
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    torch.set_num_threads(1)
    started, failures, num_cases = time.time(), [], 0
    print(f"{'case':<40}{'layout':<18}{'logits':>10}{'gradients':>11}")
    for case in CASES:
        if not case.startswith(options.cases):
            continue
        with tempfile.TemporaryDirectory() as folder:
            theirs = saved(case, Path(folder))
            for layout in LAYOUTS + EXPERT_LAYOUTS * hasattr(theirs.config, "num_experts_per_tok"):
                num_cases += 1
                name = " ".join(f"{k}{int(v)}" for k, v in layout.items())
                try:
                    logits, gradients = compare(case, layout, Path(folder), theirs)
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
