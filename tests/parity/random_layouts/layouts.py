"""Where and how it is computed: flags that must not change a result, and how ranks are shared."""

import random
from collections.abc import Sequence

from megatron.core.utils import as_list
from tests.parity.random_layouts.settings import (
    Option,
    Settings,
    draw_all,
    given,
    number,
    switch,
    without,
)
from tests.parity.random_layouts.training import BEGUN, SCRATCH

TP, PP, CP = (f"{axis}-parallel-size" for axis in ("tensor-model", "pipeline-model", "context"))
EP, ETP = "expert-model-parallel-size", "expert-tensor-parallel-size"
WORLD_SIZES = {2: 12, 3: 1, 4: 7, 6: 1, 8: 2.4}
V_SCHEDULES = ("zb-v", "dualpipe-v")
ACTIVATIONS = ("fine-grained-activation-offloading", "cpu-offloading-num-layers")
OFFLOADS = ("optimizer-cpu-offload", "optimizer-offload-path")


def size(s: Settings, axis: str) -> int:
    """Return a parallel size."""
    return number(s, axis)


def replicas(s: Settings) -> int:
    """Return the data-parallel size; `s["ranks"]` and `s["wide"]` are there while it is drawn."""
    return int(s["ranks"]) // (size(s, TP) * size(s, PP) * size(s, CP))


def micro_batches(s: Settings) -> int:
    """Return the micro batches of a replica in a full step."""
    return number(s, "global-batch-size") // (number(s, "micro-batch-size") * replicas(s))


def _chunks(s: Settings) -> int:
    if s.get("pipeline-schedule") in V_SCHEDULES:
        return 2
    return number(s, "num-virtual-stages-per-pipeline-rank")


def _has_replicas(s: Settings) -> bool:
    return replicas(s) * size(s, CP) > 1


def _is_sharded(s: Settings) -> bool:
    named = s.get("data-parallel-sharding-strategy", "no_shard") != "no_shard"
    return named or "use-distributed-optimizer" in s or "use-megatron-fsdp" in s


def _is_stage_3(s: Settings) -> bool:
    named = s.get("data-parallel-sharding-strategy") == "optim_grads_params"
    return named or "use-megatron-fsdp" in s


def _may_offload(s: Settings) -> bool:
    """Offloaded state is stored as bytes, whose number per value the optimizer knows."""
    return s.get("optimizer") != "muon" and not s["wide"]


def _splits_evenly(s: Settings, instances: int) -> bool:
    """Return whether copies of sharded state share the replicas, those of experts as well."""
    if replicas(s) % instances:
        return False
    of_experts = int(s["ranks"]) // (size(s, PP) * size(s, EP) * number(s, ETP, size(s, TP)))
    return "num-experts" not in s or of_experts % instances == 0


def _may_interleave(s: Settings) -> bool:
    return (
        size(s, PP) > 1
        and s.get("pipeline-schedule") is None
        and "pipeline-model-parallel-layout" not in s
        and not any(name.startswith("decoder") for name in s)
        and number(s, "num-layers") % (2 * size(s, PP)) == 0
        and micro_batches(s) >= size(s, PP)
    )


_UNEVEN_OR_VIRTUAL = {
    "num-virtual-stages-per-pipeline-rank",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
}


def _may_combine(s: Settings) -> bool:
    return (
        size(s, EP) > 1
        and s.get("moe-token-dispatcher-type") == "alltoall"
        and s.get("pipeline-schedule") in (None, "dualpipe-v")
        and "use-torch-fsdp2" not in s
        and s.get("recompute-granularity") != "full"
        and "moe" not in s.get("recompute-modules", ())
        and not {"moe-layer-recompute", "hybrid-context-parallel"} & set(s)
    )


def _may_share_rows(s: Settings) -> bool:
    """Return whether samples of uneven length may be split over as many ranks as each needs."""
    kinds = as_list(s.get("cp-comm-type", "p2p"))
    return (
        {"sft", "calculate-per-token-loss"} <= set(s)
        and _has_replicas(s)
        and number(s, "micro-batch-size") == 1
        and not s["hidden-dropout"] + s["attention-dropout"]
        and not {"fp8-format", "fp4-format", "dataloader-type", "lora-dropout"} & set(s)
        and not {"a2a", "a2a+p2p"} & set(kinds)
        and s.get("moe-router-load-balancing-type") != "sinkhorn"
        and not {"moe-pad-expert-input-to-capacity", "dsa-indexer-loss-coeff"} & set(s)
    )


SHARED_ROWS = (
    switch("hybrid-context-parallel", 0.6, _may_share_rows),
    Option(
        "max-seqlen-per-dp-cp-rank",
        {160: 1},
        lambda s: "hybrid-context-parallel" in s and number(s, "seq-length") > 24,
    ),
    Option(
        "max-seqlen-per-dp-cp-rank",
        {16: 1, 24: 1, 160: 1},
        lambda s: "hybrid-context-parallel" in s and number(s, "seq-length") <= 24,
    ),
)
"""A rank holds one pack at least."""

EXPERTS = (
    Option("moe-token-dispatcher-type", {"alltoall": 3, None: 2},
           lambda s: "num-experts" in s and "hybrid-context-parallel" not in s),
    Option("moe-token-dispatcher-type", {"alltoall": 1},
           lambda s: "num-experts" in s and "hybrid-context-parallel" in s),
    Option("moe-expert-rank-capacity-factor", {None: 3, 8: 1},
           lambda s: s.get("moe-token-dispatcher-type") == "alltoall"
           and "hybrid-context-parallel" not in s),
    switch("moe-grouped-gemm", 0.5, given("num-experts")),
    switch("moe-shared-expert-overlap", 0.4,
           lambda s: "moe-shared-expert-intermediate-size" in s
           and s.get("moe-token-dispatcher-type") == "alltoall"),
)  # fmt: skip

PIPELINE = (
    Option("num-virtual-stages-per-pipeline-rank", {None: 1, 2: 3}, _may_interleave),
    Option("num-layers-per-virtual-pipeline-stage", {None: 1, 1: 1},
           lambda s: _may_interleave(s) and not _UNEVEN_OR_VIRTUAL & set(s)),
    Option("microbatch-group-size-per-virtual-pipeline-stage", {None: 2, 4: 1},
           given("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage")),
    switch("no-overlap-p2p-communication", 0.1, lambda s: size(s, PP) > 1),
    Option("pipeline-step-durations", {None: 1, (2, 3, 1): 1},
           lambda s: s.get("pipeline-schedule") == "zb-v"),
)  # fmt: skip

TENSOR = (
    switch(
        "sequence-parallel",
        0.5,
        lambda s: size(s, TP) > 1 and number(s, "seq-length") % (size(s, TP) * size(s, CP)) == 0,
    ),
    switch("no-async-tensor-model-parallel-allreduce", 0.1, lambda s: size(s, TP) > 1),
)

REPLICATION = (
    Option("", {None: 4, "use-distributed-optimizer": 3, "use-megatron-fsdp": 1,
                "use-torch-fsdp2": 1.5},
           lambda s: _has_replicas(s) and size(s, PP) == 1),
    Option("data-parallel-sharding-strategy",
           {None: 2, "optim": 1, "optim_grads": 2, "optim_grads_params": 2},
           lambda s: _has_replicas(s) and not _is_sharded(s) and "use-torch-fsdp2" not in s),
    Option("num-distributed-optimizer-instances", {None: 2, 2: 1},
           lambda s: _is_sharded(s) and _splits_evenly(s, 2)),
    switch("overlap-grad-reduce", 0.4, _has_replicas),
    switch("overlap-param-gather", 0.5,
           lambda s: _is_sharded(s) and "overlap-grad-reduce" in s),
    Option("ddp-bucket-size", {None: 3, 1000: 1, 50: 1}),
    Option("ddp-num-buckets", {None: 4, 1: 1, 3: 1}, lambda s: "ddp-bucket-size" not in s),
    switch("ddp-average-in-collective", 0.12),
    switch("grad-reduce-in-bf16", 0.25, given("bf16")),
    Option("param-offload-path", {None: 5, SCRATCH: 1}, _is_stage_3),
    switch("param-cpu-offload", 0.25,
           lambda s: _is_stage_3(s) and "param-offload-path" not in s),
)  # fmt: skip

RESUMED = (
    Option("load", {None: 6, BEGUN: 1}, lambda s: not {"lora-rank", "iterations-to-skip"} & set(s)),
)
"""Continues what one process began."""

EXECUTION = (
    Option("recompute-granularity", {None: 5, "full": 2, "selective": 2}),
    Option("recompute-method", {"uniform": 1, "block": 1},
           lambda s: s.get("recompute-granularity") == "full"),
    Option("recompute-num-layers", {1: 2, 2: 1},
           lambda s: s.get("recompute-granularity") == "full"),
    Option("recompute-modules",
           {None: 1, ("mlp",): 1, ("layernorm", "moe_act"): 1,
            ("core_attn", "mlp", "layernorm"): 1},
           lambda s: s.get("recompute-granularity") == "selective"),
    switch("distribute-saved-activations", 0.3,
           lambda s: s.get("recompute-granularity") == "full" and size(s, TP) > 1
           and "sequence-parallel" not in s),
    switch("moe-layer-recompute", 0.15, given("num-experts")),
    switch("fine-grained-activation-offloading", 0.1),
    Option("offload-modules",
           {("core_attn", "attn_proj"): 1,
            ("attn_norm", "qkv_linear", "mlp_norm", "expert_fc1", "moe_act"): 1},
           given("fine-grained-activation-offloading")),
    Option("cpu-offloading-num-layers", {None: 12, 1: 1, 2: 1},
           lambda s: "fine-grained-activation-offloading" not in s
           and s.get("recompute-granularity") != "selective"),
    Option("min-offloaded-tensor-size", {1: 2, 100: 1}, given(*ACTIVATIONS)),
    Option("mlp-chunks-for-training", {None: 6, 3: 1},
           lambda s: not {"num-experts", "fp8-format", "fp4-format"} & set(s)),
    switch("cross-entropy-loss-fusion", 0.15, lambda s: "final-logit-softcapping" not in s),
    switch("no-gradient-accumulation-fusion", 0.1),
    switch("no-bias-gelu-fusion", 0.06),
    switch("no-bias-swiglu-fusion", 0.06),
    switch("no-bias-dropout-fusion", 0.08),
    Option("attention-backend", {None: 6, "unfused": 1, "fused": 1, "flash": 1, "local": 1},
           without("attention-chunk-size")),
    switch("optimizer-cpu-offload", 0.1, _may_offload),
    Option("optimizer-offload-path", {None: 9, SCRATCH: 1},
           lambda s: _may_offload(s) and "optimizer-cpu-offload" not in s),
    Option("optimizer-offload-fraction", {None: 2, 0.5: 1}, given(*OFFLOADS)),
    switch("use-cpu-initialization", 0.05),
    switch("overlap-moe-expert-parallel-comm", 0.4, _may_combine),
    # Pipelines in which it is possible are few.
    switch("overlap-moe-expert-parallel-comm", 0.6,
           lambda s: size(s, PP) > 1 and _may_combine(s)),
)  # fmt: skip

AFTER_SCHEDULE = (
    *SHARED_ROWS, *EXPERTS, *PIPELINE, *TENSOR, *REPLICATION, *EXECUTION, *RESUMED
)  # fmt: skip

TOPOLOGY = (
    TP, PP, CP, EP, ETP, "cp-comm-type", "hierarchical-context-parallel-sizes",
    "pipeline-schedule", "pipeline-model-parallel-layout", "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers", "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "microbatch-group-size-per-virtual-pipeline-stage", "use-tp-pp-dp-mapping",
)  # fmt: skip
"""Flags that are not drawn one by one."""

LAYOUT_FLAGS = frozenset(TOPOLOGY) | {
    name
    for option in AFTER_SCHEDULE
    for name in ([option.name] if option.name else option.values)
    if name is not None
}
"""All flags that one process does without."""


def draw_layout(model: Settings, is_wide: bool, rng: random.Random) -> tuple[int, Settings]:
    """Return a number of ranks, and the flags of a layout that this model fits."""
    for _ in range(1000):
        ranks = _chosen(rng, WORLD_SIZES)
        layout: Settings = {}
        sizes = dict.fromkeys((TP, PP, CP, "dp"), 1)
        for factor in _prime_factors(ranks):
            sizes[_chosen(rng, {TP: 3, PP: 3, CP: 2, "dp": 4})] *= factor
        layout |= {axis: n for axis, n in sizes.items() if axis != "dp" and n > 1}
        s: Settings = {**model, **layout, "ranks": ranks, "wide": is_wide}
        if not _fits(s):
            continue
        known = set(s) - set(layout)
        _draw_experts_grid(s, rng)
        _draw_context(s, rng)
        _draw_schedule(s, rng)
        draw_all(AFTER_SCHEDULE, s, rng)
        _draw_mapping(s, rng)
        return ranks, {name: value for name, value in s.items() if name not in known}
    raise AssertionError(f"no layout fits {model}")


def _chosen(rng: random.Random, weights: dict) -> object:  # type: ignore[type-arg]
    return rng.choices(list(weights), weights=list(weights.values()))[0]


def _prime_factors(n: int) -> Sequence[int]:
    return {2: (2,), 3: (3,), 4: (2, 2), 6: (2, 3), 8: (2, 2, 2)}[n]


def _fits(s: Settings) -> bool:
    """Return whether the sizes of the model divide by those of the grid, and its layers by stages
    that begin with an indexer."""
    of_one_stage = {"dsa-indexer-topk-freq", "num-kv-shared-layers", "per-layer-embed-dim",
                    "kv-source-layers"}  # fmt: skip
    if size(s, PP) > 1 and of_one_stage & set(s):
        return False
    tp, pp, cp, heads = size(s, TP), size(s, PP), size(s, CP), number(s, "num-attention-heads")
    groups = number(s, "num-query-groups") if "group-query-attention" in s else heads
    widths = [_mlp_width(s), number(s, "moe-shared-expert-intermediate-size", tp)]
    if heads % tp or (groups % tp and tp % groups) or any(width % tp for width in widths):
        return False
    step = number(s, "micro-batch-size") * replicas(s)
    ramp = s.get("rampup-batch-size", ())[:2]
    if any(n % step for n in (number(s, "global-batch-size"), *map(int, ramp))):
        return False
    evaluated = number(s, "eval-micro-batch-size", number(s, "micro-batch-size")) * replicas(s)
    if number(s, "eval-global-batch-size", evaluated) % evaluated:
        return False
    return number(s, "seq-length") % (2 * cp if cp > 1 else 1) == 0 and pp <= number(
        s, "num-layers"
    )


def _mlp_width(s: Settings) -> int:
    hidden = number(s, "hidden-size")
    default = 4 * hidden if "swiglu" not in s else int(4 * hidden * 2 / 3) // 64 * 64
    return number(s, "ffn-hidden-size", default)


def _draw_experts_grid(s: Settings, rng: random.Random) -> None:
    if "num-experts" not in s:
        return
    width, tp = number(s, "moe-ffn-hidden-size", _mlp_width(s)), size(s, TP)
    ranks = int(s["ranks"]) // size(s, PP)
    grids = [
        (ep, etp)
        for ep in (1, 2, 3, 4, 8)
        for etp in (1, 2, 3, 4)
        if ranks % (ep * etp) == 0 and number(s, "num-experts") % ep == 0 and width % etp == 0
    ]
    ep, etp = rng.choice(grids)
    if ep > 1:
        s[EP] = ep
    if etp != tp or rng.random() < 0.2:
        s[ETP] = etp


def _draw_context(s: Settings, rng: random.Random) -> None:
    cp = size(s, CP)
    if cp == 1:
        return
    heads = number(s, "num-attention-heads") // size(s, TP)
    kinds = ["p2p", "all_gather"] + ["a2a"] * (heads % cp == 0)
    if cp == 4 and heads % 2 == 0:
        kinds.append("a2a+p2p")
    layers = number(s, "num-layers")
    if rng.random() < 0.2:
        s["cp-comm-type"] = tuple(rng.choice(kinds) for _ in range(layers))
    elif (kind := rng.choice([None, *kinds])) is not None:
        s["cp-comm-type"] = kind
    if "a2a+p2p" in s.get("cp-comm-type", ()):
        s["hierarchical-context-parallel-sizes"] = (2, 2)


def _draw_schedule(s: Settings, rng: random.Random) -> None:
    pp, layers, count = size(s, PP), number(s, "num-layers"), micro_batches(s)
    if pp == 1:
        return
    ramp = s.get("rampup-batch-size")
    if ramp is not None:
        count = int(ramp[0]) // (number(s, "micro-batch-size") * replicas(s))
    schedules = {None: 6, "gpipe": 1, "zb-h1": 2, "zb-v": 2}
    if count >= 2 * pp:
        schedules["dualpipe-v"] = 2
    schedule = _chosen(rng, schedules)
    if schedule is not None:
        s["pipeline-schedule"] = schedule
    stages = pp * _chunks(s)
    splits = {"layout": 2.0}
    if layers % stages == 0:
        splits |= {"even": 6}
    if (layers + 1) % stages == 0:
        splits |= {"account-for-embedding-in-pipeline-split": 2,
                   "account-for-loss-in-pipeline-split": 2}  # fmt: skip
    if _chunks(s) == 1 and pp == 2:
        splits["decoder-first-pipeline-num-layers"] = 1
        splits["decoder-last-pipeline-num-layers"] = 1
    split = str(_chosen(rng, splits))
    if split.startswith("account"):
        s[split] = True
    elif split.startswith("decoder"):
        s[split] = rng.randint(0, layers)
    elif split == "layout":
        may_interleave = schedule is None and count >= pp
        per_rank = rng.choice([1, 2, 3]) if may_interleave else _chunks(s)
        s["pipeline-model-parallel-layout"] = _layout(s, pp * per_rank, rng)
        if schedule is None and per_rank > 1 and rng.random() < 0.3:
            group = pp + rng.randint(0, 2)
            s["microbatch-group-size-per-virtual-pipeline-stage"] = group


def _layout(s: Settings, stages: int, rng: random.Random) -> str:
    """Return the letters of the model, cut anywhere; the last stage predicts all later tokens, or
    one before it does."""
    letters = "E" + "t" * number(s, "num-layers")
    cuts = sorted(rng.randint(1, len(letters)) for _ in range(stages - 1))
    predictions = "m" * number(s, "mtp-num-layers", 0)
    may_be_early = predictions and "enable-mhc-connections" not in s
    is_early = may_be_early and stages > 1 and rng.random() < 0.6
    if is_early:
        cuts[-1] = len(letters)  # the loss has a stage without layers
    parts = [letters[a:b] for a, b in zip([0, *cuts], [*cuts, len(letters)], strict=True)]
    last_layer = max(i for i, part in enumerate(parts) if part)
    where = rng.randint(last_layer, stages - 2) if is_early else stages - 1
    parts[where] += predictions
    return "|".join(parts) + "L"


def _draw_mapping(s: Settings, rng: random.Random) -> None:
    """Experts whose grid differs would have stages of other ranks in this order."""
    same = "num-experts" not in s or (number(s, ETP, size(s, TP)) == size(s, TP)
                                      and size(s, CP) == 1)  # fmt: skip
    if size(s, PP) > 1 and same and rng.random() < 0.25:
        s["use-tp-pp-dp-mapping"] = True
