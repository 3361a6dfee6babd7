"""Runs on samples of uneven length, whose rows are shared by as many ranks as they need."""

from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.parameters.param_meta import get_param_meta
from megatron.training.run import step as training_step
from tests.harness.distributed import run_distributed
from tests.parity.compare import Errors, compare
from tests.parity.training_case import (
    RankReport,
    Run,
    assemble,
    named_parameters,
    whole_gradient,
)
from tests.parity.training_run import read_metrics, train_with_flags

LONGEST = 128
VOCABULARY = 200
MODEL = (
    f"--hidden-size 32 --num-attention-heads 4 --seq-length {LONGEST} --max-position-embeddings"
    f" {LONGEST} --lr 1e-3 --micro-batch-size 1 --global-batch-size 16 --log-interval 1"
    " --hidden-dropout 0 --attention-dropout 0 --num-workers 0 --sft --split 1"
    " --tokenizer-type NullTokenizer --calculate-per-token-loss --train-iters 3"
    f" --vocab-size {VOCABULARY} --adam-eps 1e-5 --no-save-optim"
)


@dataclass(frozen=True)
class SharedRowsCase:
    """Flags of a model, flags of a layout of `world_size` ranks, and that layout."""

    model: str
    flags: str
    world_size: int
    layout: dict[str, int]

    @property
    def num_sharing(self) -> int:
        """Ranks that may share samples."""
        return self.world_size // (self.layout.get("tp", 1) * self.layout.get("pp", 1))


GPT = "--num-layers 4"
LLAMA = "--num-layers 2 --position-embedding-type rope --normalization RMSNorm --swiglu"
EXPERTS = (
    f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none"
    " --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
)
COUNTED = (
    f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
    " --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    " --moe-router-bias-update-rate 0.05 --moe-z-loss-coeff 0.05 --moe-input-jitter-eps 0.1"
    " --moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss"
    " --moe-aux-loss-coeff 0.1 0.05 0.2 --moe-expert-capacity-factor 1.0"
)
"""Every loss, draw, count and limit of a router."""
CASES = {
    "dp4": SharedRowsCase(LLAMA, "", 4, {}),
    "tp2 sp dp2 zero1": SharedRowsCase(
        LLAMA,
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
        4,
        {"tp": 2},
    ),
    "pp2 vp2 dp2 recompute": SharedRowsCase(
        GPT,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
        " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        4,
        {"pp": 2, "vp": 2},
    ),
    "cp2 dp2 zero3 all_gather": SharedRowsCase(
        LLAMA,
        "--context-parallel-size 2 --use-distributed-optimizer --cp-comm-type all_gather"
        " --data-parallel-sharding-strategy optim_grads_params",
        4,
        {"cp": 2},
    ),
    "dp3": SharedRowsCase(f"{GPT} --global-batch-size 15", "", 3, {}),
    "ep2 dp4": SharedRowsCase(EXPERTS, "--expert-model-parallel-size 2", 4, {"ep": 2}),
    "ep2 dp4 routers": SharedRowsCase(COUNTED, "--expert-model-parallel-size 2", 4, {"ep": 2}),
    "tp2 sp cp2 dp2 routers": SharedRowsCase(
        COUNTED,
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2",
        8,
        {"tp": 2, "cp": 2},
    ),
    "tp2 pp2 routers at random": SharedRowsCase(
        f"{COUNTED} --moe-router-force-load-balancing --moe-layer-recompute",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        8,
        {"tp": 2, "pp": 2},
    ),
    "tp2 pp2 dp2 zero1 mtp": SharedRowsCase(
        f"{LLAMA} --mtp-num-layers 1",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
        " --use-distributed-optimizer",
        8,
        {"tp": 2, "pp": 2},
    ),
    "mla dp4 zero2": SharedRowsCase(
        f"{LLAMA} --multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6"
        " --qk-pos-emb-head-dim 4 --v-head-dim 8",
        "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads",
        4,
        {},
    ),
    "mamba2 dp4": SharedRowsCase(
        f"{LLAMA} --experimental-attention-variant mamba2 --mamba-state-dim 8"
        " --mamba-head-dim 16 --mamba-num-groups 1",
        "",
        4,
        {},
    ),
}


def write_conversations(folder: Path, count: int = 60, longest: int = LONGEST) -> str:
    """Write packs of one to three conversations, most of them short; return their prefix."""
    random = np.random.RandomState(0)
    lengths = np.clip(np.exp(random.normal(0, 1.0, count)) * longest / 6, 4, longest).astype(int)
    lengths[:2] = longest
    documents = [random.randint(0, VOCABULARY, length) for length in lengths]
    masks = [random.randint(0, 2, length) for length in lengths]
    for name, rows, dtype in (("", documents, np.uint16), ("_mask", masks, np.uint8)):
        with IndexedDatasetBuilder(f"{folder}/talk{name}.bin", dtype=dtype) as builder:
            for number, row in enumerate(rows):
                cut = [len(part) for part in np.array_split(row, 1 + number % 3)]
                builder.add_document(row, cut)
            builder.finalize(f"{folder}/talk{name}.idx")
    return f"{folder}/talk"


def train_and_report(groups, words):
    """Train as `pretrain_gpt.py` does, and keep the reduced gradients of each step."""
    report = RankReport(
        groups.tp.rank(), groups.expt_tp.rank(), groups.dp_cp.rank(), [0.0], [], {}, {}, {}, {}
    )
    compute = training_step.compute_gradients

    def computed(context, *args, **options):
        found = compute(context, *args, **options)
        named = list(named_parameters(context.model))
        report.gradients[len(report.gradients)] = {
            name: whole_gradient(chunk, p) for name, chunk, p in named
        }
        report.metas |= {n: _split(get_param_meta(p)) for n, _, p in named}
        return found

    with patch.object(training_step, "compute_gradients", computed):
        train_with_flags(groups, words)
    return report


def _split(meta):
    return meta.split_dim, meta.stride, meta.is_expert


def run_case(case: SharedRowsCase, corpus: str, *, is_shared: bool) -> Run:
    """Train a case in its layout, or its model in one process without shared rows."""
    metrics = Path(corpus).parent / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    words = f"{MODEL} {case.model} --data-path {corpus} --metrics-jsonl {metrics}"
    layout: dict = {}
    if is_shared:
        words += f" {case.flags} --hybrid-context-parallel --max-seqlen-per-dp-cp-rank"
        words += f" {LONGEST // case.num_sharing + 8}"
        layout = {**case.layout, "hybrid_cp": True}
    world_size = case.world_size if is_shared else 1
    reports = run_distributed(
        train_and_report, world_size, words.split(), timeout_s=180.0, **layout
    )
    run = assemble(reports, VOCABULARY)
    lines = read_metrics(metrics)
    run.losses = [line["lm loss"] for line in lines]
    run.grad_norms = [line["grad-norm"] for line in lines]
    return run


def errors_of(case: SharedRowsCase, folder: Path) -> Errors:
    """Return how far a case is from its model in one process, whose samples are padded."""
    corpus = write_conversations(folder)
    return compare(run_case(case, corpus, is_shared=True), run_case(case, corpus, is_shared=False))
