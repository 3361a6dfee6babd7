"""What has been run where: `docs/status.md`, written by `python -m tests.status`.

A feature names the test that compares it with one process or with another program, and the checks
of `tools/gpu_session.py` that run it on a GPU. A cell of the CPU column is a link to the test. A
cell of the GPU column is a link to a committed result in which every check of the feature passed.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.evidence import NOTHING, RESULTS, ROOT, Result, by_card, results, rows_of
from megatron.core.settings.command_line import NoFlags, read_command_line
from megatron.hugging_face.families import FAMILIES

PAGE = ROOT / "docs" / "status.md"
YES, PARTLY, NO = "●", "○", "–"


@dataclass(frozen=True)
class Feature:
    """One line of the table."""

    name: str
    """Markdown; links are relative to `docs/`."""
    test: str
    """Path from the root of the repository."""
    gpu: tuple[str, ...] = ()
    """Cases of the checks `paths` and `layouts`."""
    machines: str = ""
    """Path of a test with two network namespaces as machines."""


NAMESPACES = "tests/faults/namespaces.py"
GROUPS: dict[str, tuple[Feature, ...]] = {
    "Layouts": (
        Feature("tensor parallelism", "tests/parity/test_layouts.py", ("TP 2",)),
        Feature("sequence parallelism", "tests/parity/test_layouts.py", ("TP 2, SP", "TP 4, SP")),
        Feature(
            "[context parallelism](context_parallelism.md): ring, all-gather, Ulysses",
            "tests/distributed/context_parallel/test_attention.py",
            ("CP 2, ring", "CP 2, Ulysses", "CP 2, all-gather"),
        ),
        Feature(
            "hierarchical context parallelism",
            "tests/distributed/context_parallel/test_attention.py",
        ),
        Feature(
            "[dynamic context parallelism](context_parallelism.md): the number of ranks per"
            " sequence follows its length",
            "tests/distributed/context_parallel/test_shared_rows.py",
        ),
        Feature(
            "[pipelines](schedules.md): 1F1B, interleaved 1F1B, zero-bubble ZB-V",
            "tests/distributed/pipeline_parallel/test_executor.py",
            ("PP 2", "PP 2, interleaved", "PP 2, zb-v"),
        ),
        Feature(
            "GPipe, uneven stages, zero-bubble ZB-H1 and DualPipe-V",
            "tests/distributed/pipeline_parallel/test_executor.py",
        ),
        Feature(
            "[data parallelism](sharding.md), ZeRO-1",
            "tests/distributed/distributed/test_data_parallel.py",
            ("DP 2, overlapped", "ZeRO-1"),
            NAMESPACES,
        ),
        Feature(
            "[ZeRO-2 and ZeRO-3](sharding.md)",
            "tests/distributed/distributed/test_sharded_parameters.py",
            ("ZeRO-2", "ZeRO-3"),
        ),
        Feature("HSDP", "tests/distributed/distributed/test_sharded_parameters.py"),
        Feature(
            "[torch FSDP2](sharding.md)",
            "tests/distributed/distributed/test_torch_fsdp2.py",
            ("FSDP2",),
        ),
        Feature(
            "[expert parallelism](mixture_of_experts.md), expert tensor parallelism",
            "tests/distributed/models/test_experts.py",
            ("EP 2, all-to-all", "EP 2, all-gather", "ETP 2"),
        ),
        Feature("random combinations of all axes", "tests/parity/test_random_layouts.py"),
        Feature("[the same bits in every layout](bits.md)", "tests/parity/test_same_bits.py"),
    ),
    "Models": (
        Feature(
            "GPT: RoPE, packed documents, attention dropout",
            "tests/parity/test_features.py",
            ("attention dropout", "documents"),
        ),
        Feature("YaRN, sinks, windows, MTP", "tests/parity/test_features.py"),
        Feature(
            "multi-head latent attention", "tests/parity/test_features.py", ("latent attention",)
        ),
        Feature(
            "[mixture of experts](mixture_of_experts.md)",
            "tests/distributed/models/test_experts.py",
            ("experts",),
        ),
        Feature(
            "[sequence mixers](sequence_mixers.md): Mamba-2, Gated DeltaNet",
            "tests/distributed/context_parallel/test_recurrence.py",
            ("hybrid mixers",),
        ),
        Feature("Kimi Delta Attention", "tests/distributed/context_parallel/test_recurrence.py"),
        Feature(
            "[hybrid models](sequence_mixers.md#hybrid-models), checkpoints of a GPT and of a"
            " hybrid model in turn",
            "tests/distributed/checkpointing/test_hybrid_and_gpt.py",
        ),
        Feature(
            "[compressed attention of DeepSeek-V4](sequence_mixers.md#compressed-attention)",
            "tests/distributed/context_parallel/test_compressed_attention.py",
        ),
        Feature(
            "[sparse attention of DeepSeek-V3.2](sequence_mixers.md)",
            "tests/distributed/context_parallel/test_sparse_attention.py",
        ),
        Feature("[BERT and T5](encoders.md)", "tests/distributed/models/test_encoders.py"),
        Feature("[vision-language models](vision_language.md)", "tests/parity/vision_case.py"),
        Feature(
            f"[Hugging Face models in and out](hugging_face.md), {len(FAMILIES)} families",
            "tests/distributed/hugging_face/test_layouts.py",
        ),
        Feature(
            "[LoRA and DoRA](hugging_face.md)", "tests/distributed/hugging_face/test_adapters.py"
        ),
    ),
    "Precision and memory": (
        Feature("bf16 with fp32 main weights", "tests/parity/test_layouts.py", ("documents",)),
        Feature("fp16 with loss scaling", "tests/distributed/optimizer/test_fp16_trajectory.py"),
        Feature(
            "[FP8 with a scale for each tensor](low_precision.md)",
            "tests/parity/low_precision_curves.py",
            ("fp8",),
        ),
        Feature("FP8 in blocks, MXFP8, NVFP4", "tests/parity/low_precision_curves.py"),
        Feature("activation recomputation", "tests/parity/test_features.py", ("recomputation",)),
        Feature(
            "[activations in host memory](memory.md)",
            "tests/parity/test_features.py",
            ("activations in host memory",),
        ),
        Feature(
            "[optimizer state in host memory](optimizers.md)",
            "tests/distributed/optimizer/test_streamed_state.py",
            ("optimizer in host memory",),
        ),
        Feature(
            "[optimizer state in files](optimizers.md)",
            "tests/distributed/optimizer/test_streamed_state.py",
        ),
        Feature("CUDA graphs of layers", "tests/parity/test_features.py", ("graphs",)),
    ),
    "Runs": (
        Feature(
            "[preprocessing](preprocessing.md) and [corpora](data.md)",
            "tests/unit/datasets/test_preprocessing.py",
        ),
        Feature(
            "[checkpoints](checkpoints.md): exact resume, any layout, commit protocol",
            "tests/distributed/checkpointing/test_any_layout.py",
            ("save and load", "saved by TP 2, loaded by PP 2"),
        ),
        Feature(
            "[checkpoints of Megatron-LM and DeepSpeed](coming_from_megatron.md)",
            "tests/distributed/checkpointing/test_interop_run.py",
        ),
        Feature(
            "[signals, lost ranks, hangs](failures.md)",
            "tests/faults/test_faults.py",
            ("a rank killed",),
            NAMESPACES,
        ),
        Feature(
            "[in-process restart](restarts.md#restart-inside-the-job): a hot spare replaces a"
            " failed rank",
            "tests/faults/inprocess.py",
        ),
        Feature(
            "[DeepSpeed's JSON and engine](coming_from_deepspeed.md)",
            "tests/distributed/deepspeed/test_engine.py",
        ),
        Feature(
            "[generation](generation.md), server, scores",
            "tests/distributed/inference/test_generate.py",
        ),
        Feature(
            "[post-training](post_training.md): log-probabilities, DPO, GRPO",
            "tests/distributed/post_training/test_log_probs.py",
        ),
        Feature(
            "[planner](planner.md): predicted time and memory", "tests/unit/planner/test_planner.py"
        ),
    ),
}
"""Heading of the page -> its features."""


def _link(mark: str, path: Path) -> str:
    return f"[{mark}]({os.path.relpath(path, PAGE.parent)})"


def _gpu_cell(feature: Feature, found: Sequence[Result]) -> str:
    """Return a link to the newest result among those in which the feature's checks passed."""
    for card in by_card(found):
        rows = rows_of(card, "paths", "layouts")
        at = {row["case"]: row["commit"] for row in rows if row.get("ok")}
        if feature.gpu and at.keys() >= {*feature.gpu}:
            commits = {at[name] for name in feature.gpu}
            newest = next(each["commit"] for each in found if each["commit"] in commits)
            return _link(YES, next(RESULTS.glob(f"*-{newest}.json")))
    return NO


def page() -> str:
    """Return the text of the page."""
    found = results()
    lines = [
        "# Status", "",
        "Written by `python -m tests.status` from the tests and from the results of"
        " [`make gpu`](kernels.md) that are in the repository.", "",
        f"{YES} runs and is compared with one process or with another program (the link is the"
        f" test or the result); {PARTLY} runs on two network namespaces of one machine;"
        f" {NO} has not run.", "",
    ]  # fmt: skip
    lines += [] if found else [NOTHING, ""]
    for group, features in GROUPS.items():
        lines += [f"## {group}", "", "| | CPU | one GPU | several machines |", "|---|:-:|:-:|:-:|"]
        for feature in features:
            machines = _link(PARTLY, ROOT / feature.machines) if feature.machines else NO
            cells = (_link(YES, ROOT / feature.test), _gpu_cell(feature, found), machines)
            lines.append(f"| {feature.name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Write the page."""
    read_command_line(NoFlags, prog="python -m tests.status", description=__doc__)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
