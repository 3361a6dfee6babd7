"""Suggest the flag that was probably meant by an unknown flag."""

from __future__ import annotations

import difflib

from megatron.training.config.run import flags_by_spelling

_REPLICAS = "torchrun --nproc-per-node: the number of ranks sets the data-parallel size"
_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
RENAMED = {
    "--tp": "--tensor-model-parallel-size",
    "--tp-size": "--tensor-model-parallel-size",
    "--tensor-parallel-size": "--tensor-model-parallel-size",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--pp-size": "--pipeline-model-parallel-size",
    "--pipeline-parallel-size": "--pipeline-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--dp": _REPLICAS,
    "--data-parallel-size": _REPLICAS,
    "--batch-size": "--micro-batch-size",
    "--num-heads": "--num-attention-heads",
    "--n-layers": "--num-layers",
    "--n-heads": "--num-attention-heads",
    "--learning-rate": "--lr",
    "--max-lr": "--lr",
    "--max-steps": "--train-iters",
    "--num-steps": "--train-iters",
    "--epochs": "--train-samples",
    "--warmup": "--lr-warmup-fraction",
    "--warmup-steps": "--lr-warmup-iters",
    "--gradient-clipping": "--clip-grad",
    "--dropout": "--hidden-dropout and --attention-dropout",
    "--checkpoint-activations": _RECOMPUTE,
    "--gradient-checkpointing": _RECOMPUTE,
    "--rope": "--position-embedding-type rope",
    "--zero-stage": "--data-parallel-sharding-strategy optim, optim_grads or optim_grads_params",
    "--cpu-optimizer": "--optimizer-cpu-offload",
    "--remote-device": "--param-offload-path, --optimizer-cpu-offload or --optimizer-offload-path",
    "--ds-sequence-parallel-size": "--context-parallel-size",
    "--universal-checkpoint": "--load: any number of ranks loads any checkpoint",
    "--deepspeed-activation-checkpointing": _RECOMPUTE,
    "--output-dir": "--save",
    "--resume": "--load",
    "--resume-from": "--load",
}
"""Flags of other frameworks and of older releases of Megatron -> our flags."""


def suggestion(unknown: str) -> str:
    """Return the most similar flag, or "" if no flag is similar."""
    wanted = unknown.split("=")[0].replace("_", "-").lower()
    if wanted in RENAMED:
        return RENAMED[wanted]
    known = flags_by_spelling()
    if wanted in known:
        return wanted
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.75)
    if near:
        return near[0]
    # The same words in another order, or with one word missing: --parallel-tensor-size.
    words = set(wanted.strip("-").split("-"))
    best, best_score = "", 0.0
    for spelling in known:
        have = set(spelling.strip("-").split("-"))
        score = len(words & have) / len(words | have)
        if score > best_score:
            best, best_score = spelling, score
    return best if best_score >= 0.5 else ""
