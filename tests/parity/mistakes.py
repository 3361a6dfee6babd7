"""Command lines of `pretrain_gpt.py`, right ones and ones with planted mistakes."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.settings.flags import FlagSpec
from megatron.training.config.run import all_flags
from tests.parity.random_layouts.cases import Case, draw_model
from tests.parity.random_layouts.corpus import write_corpus
from tests.parity.random_layouts.settings import Settings, to_words
from tests.parity.random_layouts.training import BASE, CORPUS, SCRATCH

MAX_RANKS = 4

_ON = True
_CORPUS = {"data-path": CORPUS, "mock-data": None}
PLANTED: tuple[Settings, ...] = (
    {"spec": ("nowhere.to_be_found", "layers")},
    {"spec": ("megatron.core.models.gpt.gpt_layer_specs", "no_such_function")},
    {"spec": ("one", "word", "more")},
    {"spec": "layers"},
    {"spec": "local"},
    {"spec": ("megatron.core.models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec")},
    {"num-attention-heads": 3},
    {"hidden-size": 30},
    {"num-layers": 5, "pipeline-model-parallel-size": 2},
    {"tensor-model-parallel-size": 3},
    {"context-parallel-size": 2, "seq-length": 18},
    {"seq-length": 0},
    {"micro-batch-size": 3, "global-batch-size": 8},
    {"global-batch-size": 0},
    {"lr": -1},
    {"lr": -1, "min-lr": -2},
    {"lr": 1e-5, "min-lr": 1e-3},
    {"lr": 1e-5, "min-lr": -1},
    {"lr": None},
    {"lr": "nan"},
    {"lr-warmup-iters": 7, "lr-warmup-fraction": 0.1},
    {"lr-warmup-fraction": 2},
    {"lr-decay-style": "rising"},
    {"optimizer": "adagrad"},
    {"adam-beta1": 1.5},
    {"clip-grad": -1},
    {"param-rules": "*.weight:lr_mul=2"},
    {"fp16": _ON, "bf16": _ON},
    {"loss-scale": 128, "fp16": None, "bf16": None},
    {"fp16": _ON, "bf16": None, "min-loss-scale": -1},
    {"swiglu": _ON, "squared-relu": _ON},
    {"position-embedding-type": "yarn", "rotary-percent": 0.5},
    {"position-embedding-type": "yarn"},
    {"position-embedding-type": "rope", "kv-channels": 7},
    {"num-query-groups": 3},
    {"group-query-attention": _ON, "num-query-groups": 3},
    {"num-experts": 3, "moe-router-topk": 4},
    {"num-experts": 3, "expert-model-parallel-size": 2},
    {"moe-router-topk": 0, "num-experts": 4},
    {"max-position-embeddings": 2},
    {"split": "none"},
    {"split": "0,0,0"},
    {**_CORPUS, "split": "1,0,0", "eval-interval": 1, "eval-iters": 1},
    {"data-path": "EMPTY", "mock-data": None},
    {"data-path": "EMPTY", "mock-data": None, "split": "100,0,0"},
    {"data-path": "TRUNCATED", "mock-data": None},
    {"data-path": "ONE_DOCUMENT", "mock-data": None, "eval-interval": 1, "eval-iters": 1},
    {"data-path": ("0.5", CORPUS, "x", CORPUS), "mock-data": None},
    {"data-path": ("-1", CORPUS, "2", CORPUS), "mock-data": None},
    {"data-path": CORPUS, "mock-data": _ON},
    {"sft": _ON, "mock-data": _ON},
    {"sft": _ON, **_CORPUS},
    {"tokenizer-type": "NullTokenizer", "vocab-size": None},
    {"tokenizer-type": "GPT2BPETokenizer"},
    {"vocab-size": 0},
    {"exit-on-missing-checkpoint": _ON, "load": None},
    {"ckpt-step": 3},
    {"use-checkpoint-args": _ON},
    {"save-hf": SCRATCH},
    {"save": SCRATCH, "save-interval": 2, "save-retain-interval": 3},
    {"lora-rank": 4},
    {"lora-rank": 4, "pretrained-checkpoint": SCRATCH},
    {"on-spike": "rollback"},
    {"profile": _ON, "profile-step-start": 5, "profile-step-end": 2},
    {"wandb-project": "mine"},
    {"optimizer-cpu-offload": _ON, "optimizer": "muon"},
    {"optimizer-offload-fraction": 0.5},
    {"optimizer-offload-path": "/nowhere/at/all"},
    {"recompute-granularity": "full"},
    {"recompute-granularity": "some"},
    {"recompute-modules": ("mlp",)},
    {"num-virtual-stages-per-pipeline-rank": 2},
    {"pipeline-schedule": "zb-v"},
    {"sequence-parallel": _ON, "tensor-model-parallel-size": 1},
    {"multi-latent-attention": _ON, "position-embedding-type": "learned_absolute"},
    {"nun-layers": 3},
    {"train-iters": -1},
    {"train-samples": 8},
    {"phase-transition-iterations": "9,1"},
    {"rampup-batch-size": (3, 5, 7)},
    {"attention-backend": "quick"},
    {"transformer-impl": "inference"},
    {"use-torch-fsdp2": _ON, "use-distributed-optimizer": _ON},
    {"data-parallel-sharding-strategy": "optim_grads_params", "optimizer": "muon"},
    {"overlap-param-gather": _ON},
    {"mtp-num-layers": 1, "position-embedding-type": "none"},
    {"hybrid-layer-pattern": "M*Q-"},
    {"window-size": (4, 4)},
    {"tensorboard-dir": "/dev/null/x"},
    {"metrics-jsonl": "/nowhere/at/all/metrics.jsonl"},
    {"fim-data": _ON, "mock-data": _ON},
    {"data-cache-path": "/dev/null/x", **_CORPUS},
)  # fmt: skip
"""Flag -> value, None to leave the flag out. Most are wrong in most command lines."""

_NOT_DRAWN = (
    "wandb", "tensorboard", "otel", "mlflow", "one_logger", "profile", "dry_run", "auto_parallel",
    "yaml_cfg", "deepspeed", "load", "save", "inprocess", "rank", "distributed_backend",
    "distributed_timeout", "dataloader_type", "logging", "manual_gc", "local", "ft_", "exit",
    "workload", "rerun", "calibrate", "architecture", "num_workers", "ckpt", "checkpoint",
    "error_injection", "data_audit", "monitor", "metrics", "prometheus", "object_storage",
    "memory_snapshot", "record_memory",
)  # fmt: skip
"""Parts of names of flags that reach outside of the process, or choose another program."""
_NUMBERS = ("0", "-1", "1", "2", "3", "7", "64", "1e9", "0.5", "-0.5", "nan", "inf", "many")


_ADAPTERS = (
    "lora-rank", "lora-alpha", "lora-dropout", "use-dora", "lora-target-modules",
    "pretrained-checkpoint",
)  # fmt: skip
"""They need a trained model."""


def _flags_to_draw() -> list[FlagSpec]:
    return [
        spec
        for spec in all_flags().values()
        if not any(part in spec.name for part in _NOT_DRAWN) and not spec.metadata.refuse
    ]


def _value(spec: FlagSpec, rng: random.Random) -> object:
    if spec.is_switch:
        return True
    if spec.choices and rng.random() < 0.8:
        return str(rng.choice(sorted(map(str, spec.choices))))
    count = spec.metadata.nargs if isinstance(spec.metadata.nargs, int) else 1
    words = tuple(rng.choice(_NUMBERS) for _ in range(count))
    return words if count > 1 else words[0]


def with_changes(settings: Settings, changes: Settings) -> Settings:
    """Return settings in which flags have other values, or are left out."""
    return {name: value for name, value in {**settings, **changes}.items() if value is not None}


def draw_command(seed: int, index: int) -> Case:
    """Return a command line: half of them are right, others have one or two mistakes."""
    rng = random.Random(f"mistakes/{seed}/{index}")
    cases = [case for case in draw_model(seed, index) if case.ranks <= MAX_RANKS]
    cases = [case for case in cases if "lora-rank" not in case.settings]
    case = rng.choice(cases) if cases and rng.random() < 0.6 else draw_model(seed, index)[0].serial
    case = replace(case.without(*_ADAPTERS), is_wide=False)
    kind = rng.random()
    settings = case.settings
    for _ in range(0 if kind < 0.25 else 1 if kind < 0.8 else 2):
        if rng.random() < 0.6:
            settings = with_changes(settings, rng.choice(PLANTED))
        else:
            spec = rng.choice(_flags_to_draw())
            settings = with_changes(settings, {spec.flag[2:]: _value(spec, rng)})
    return replace(case, settings=settings)


def write_inputs(folder: Path) -> dict[str, str]:
    """Write the corpora that command lines name; return word -> path."""
    places = {word: str(folder / word.lower()) for word in
              (CORPUS, SCRATCH, BASE, "EMPTY", "TRUNCATED", "ONE_DOCUMENT")}  # fmt: skip
    Path(places[SCRATCH]).mkdir()
    write_corpus(Path(places[CORPUS]))
    for word, lengths in (("EMPTY", []), ("TRUNCATED", [30]), ("ONE_DOCUMENT", [900])):
        prefix = places[word]
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for length in lengths:
            builder.add_document(torch.arange(length) % 80, [length])
        builder.finalize(f"{prefix}.idx")
    index = Path(f"{places['TRUNCATED']}.idx")
    index.write_bytes(index.read_bytes()[:-3])
    return places


def words_of(case: Case, places: dict[str, str]) -> list[str]:
    """Return the words of a command line, with paths."""
    return [places.get(word, word) for word in to_words(case.settings)]


def draw_commands(seed: int, count: int) -> Iterator[Case]:
    """Yield command lines, always the same ones of a seed."""
    return (draw_command(seed, index) for index in range(count))
