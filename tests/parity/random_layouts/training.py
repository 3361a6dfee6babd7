"""How it is trained, in every layout: data, precision, optimizer, schedules, evaluation."""

from tests.parity.random_layouts.corpus import CONVERSATIONS, CORPUS
from tests.parity.random_layouts.models import has_attention
from tests.parity.random_layouts.settings import Option, Settings, given, switch, without

FIXED: Settings = {
    "tokenizer-type": "NullTokenizer",
    "num-workers": 0,
    "log-interval": 1,
    "log-params-norm": True,
    "log-num-zeros-in-grad": True,
    "distributed-backend": "gloo",
}
"""In every command line."""

SCRATCH = "SCRATCH"
BASE = "BASE"
BEGUN = "BEGUN"
"""Words in place of a path: of a directory that the run may write to, of a checkpoint of the model
without adapters, and of one of the same run in one process after its first step."""


def _moves_by_signs(s: Settings) -> bool:
    return "lion" in (s.get("optimizer"), s.get("muon-scalar-optimizer"))


def _has_empty_gradients(s: Settings) -> bool:
    """Return whether a gradient is zero but for rounding: of what is added to all keys alike, or of
    the decay of a state that nothing is left of after one token, or of the mixing of equal
    streams."""
    if {"experimental-attention-variant", "hybrid-layer-pattern", "enable-mhc-connections"} & set(
        s
    ):
        return True
    is_of_norm = "qk-layernorm" in s and s.get("normalization") != "RMSNorm"
    return "disable-bias-linear" not in s or "add-qkv-bias" in s or is_of_norm


def _has_conversations(s: Settings) -> bool:
    return s.get("data-path") in CONVERSATIONS


def _has_text(s: Settings) -> bool:
    return s.get("data-path") == CORPUS


def _is_adam(s: Settings) -> bool:
    return s.get("optimizer") is None


def _is_half(s: Settings) -> bool:
    return "bf16" in s or "fp16" in s


BATCHES = (
    Option("micro-batch-size", {1: 1, 2: 1}),
    Option("global-batch-size", {4: 3, 8: 4, 12: 1, 16: 1}),
    Option("train-iters", {2: 5, 3: 1}),
    Option("rampup-batch-size", {None: 14, (4, 4, 8): 1},
           lambda s: s["micro-batch-size"] == 1 and s["global-batch-size"] > 4),
    Option("data-path", {CORPUS: 2, None: 2, **dict.fromkeys(CONVERSATIONS, 1)}),
    switch("sft", 1.0, _has_conversations),
    switch("reset-attention-mask", 0.35, _has_text),
    switch("reset-position-ids", 0.35, _has_text),
    switch("eod-mask-loss", 0.3, _has_text),
    switch("fim-data", 0.15, _has_text),
    Option("fim-rate", {1.0: 1, 0.6: 1}, given("fim-data")),
    Option("fim-prefix-token", {1: 1}, given("fim-data")),
    Option("fim-middle-token", {2: 1}, given("fim-data")),
    Option("fim-suffix-token", {3: 1}, given("fim-data")),
    switch("mock-data", 1.0, without("data-path")),
    Option("dataloader-type", {None: 9, "cyclic": 1}),
    switch("calculate-per-token-loss", 0.25, without("sft")),
    # Ranks may share rows then: see `layouts`.
    switch("calculate-per-token-loss", 0.7, given("sft")),
    Option("hidden-dropout", {0: 2, 0.1: 1}, without("sft")),
    Option("attention-dropout", {0: 2, 0.1: 1}, without("sft")),
    Option("hidden-dropout", {0: 5, 0.1: 1}, given("sft")),
    Option("attention-dropout", {0: 5, 0.1: 1}, given("sft")),
    Option("eval-interval", {None: 2, 2: 1}),
    Option("eval-iters", {1: 3, 2: 1}, given("eval-interval")),
    Option("eval-iters", {0: 1}, without("eval-interval")),
    Option("eval-global-batch-size", {None: 2, 4: 1, 8: 1}, given("eval-interval")),
    Option("eval-micro-batch-size", {None: 1, 1: 1}, given("eval-global-batch-size")),
    Option("seed", {None: 3, 77: 1}),
    Option("iterations-to-skip", {None: 30, 2: 1}),
)  # fmt: skip

PRECISION = (
    Option("", {None: 6, "bf16": 3, "fp16": 2}),
    switch("fp32-residual-connection", 0.15, given("bf16")),
    # Either no gradient of fp16 overflows or the first ones do in every layout.
    Option("initial-loss-scale", {1024: 2, 2**30: 1}, given("fp16")),
    Option("loss-scale", {None: 4, 256: 1}, given("fp16")),
    Option("loss-scale-window", {None: 1, 1: 1}, given("fp16")),
)


def _depends_on_arrival(s: Settings) -> bool:
    """Return whether blocks would be made of the tokens that an expert has on one rank."""
    return "num-experts" in s and s.get("fp8-recipe") in ("mxfp8", "blockwise")


LOW_PRECISION = (
    Option("fp8-format", {None: 8, "e4m3": 1, "hybrid": 1}, lambda s: not _is_half(s)),
    # One scale of the tokens that an expert has on one rank would depend on the layout.
    Option("fp8-recipe", {None: 1, "mxfp8": 1, "blockwise": 1}, given("fp8-format")),
    Option("fp8-recipe", {None: 2, "tensorwise": 1},
           lambda s: "fp8-format" in s and not {"num-experts", "fp8-recipe"} & set(s)),
    Option("fp8-amax-history-len", {None: 1, 2: 1}, lambda s: "fp8-format" in s
           and "fp8-recipe" not in s),
    Option("fp8-amax-compute-algo", {"max": 1}, given("fp8-amax-history-len")),
    switch("no-fp8-wgrad", 1.0, _depends_on_arrival),
    Option("fp4-format", {None: 15, "e2m1": 1},
           lambda s: not _is_half(s) and not {"num-experts", "fp8-format"} & set(s)),
    switch("first-last-layers-bf16", 0.2, given("fp8-format", "fp4-format")),
)  # fmt: skip
"""In fp64 alone: otherwise the order of a sum decides on which side of a step of the format an
element falls."""

OPTIMIZER = (
    Option("optimizer", {None: 7, "sgd": 1, "muon": 1.5}),
    Option("optimizer", {None: 6, "lion": 1},
           lambda s: _is_adam(s) and not _has_empty_gradients(s)),
    Option("sgd-momentum", {None: 1, 0.0: 1}, lambda s: s.get("optimizer") == "sgd"),
    Option("adam-beta2", {None: 2, 0.95: 1}, _is_adam),
    Option("adam-eps", {1e-5: 1}, lambda s: not _moves_by_signs(s)),
    switch("muon-use-nesterov", 0.3, lambda s: s.get("optimizer") == "muon"),
    switch("muon-no-split-qkv", 0.3, lambda s: s.get("optimizer") == "muon"),
    Option("muon-scale-mode", {None: 2, "unit_rms_norm": 1, "shape_scaling": 1},
           lambda s: s.get("optimizer") == "muon"),
    Option("muon-scalar-optimizer", {None: 3, "sgd": 1}, lambda s: s.get("optimizer") == "muon"),
    Option("lr", {1e-3: 4, 3e-4: 1}),
    Option("min-lr", {None: 3, 1e-4: 1}),
    Option("lr-decay-style", {None: 3, "constant": 1, "cosine": 2, "inverse-square-root": 1}),
    Option("lr-warmup-iters", {None: 2, 1: 1}),
    Option("decoupled-lr", {None: 8, 3e-4: 1}),
    Option("clip-grad", {None: 3, 0.0: 1, 0.3: 2, 20.0: 1}),
    Option("weight-decay", {None: 2, 0.0: 1, 0.1: 1}),
    Option("weight-decay-incr-style", {None: 7, "linear": 1, "cosine": 1}),
    Option("start-weight-decay", {0.01: 1}, given("weight-decay-incr-style")),
    Option("end-weight-decay", {0.1: 1}, given("weight-decay-incr-style")),
    switch("apply-wd-to-qk-layernorm", 0.3, given("qk-layernorm")),
    Option("param-rules", {None: 12, "*.mlp.*:lr_mult=0.5,wd_mult=0": 1}),
    switch("use-precision-aware-optimizer", 0.1, lambda s: s.get("optimizer") != "muon"
           and not {"fp8-format", "fp4-format"} & set(s)),
    Option("exp-avg-dtype", {None: 1, "bf16": 1, "fp16": 1},
           given("use-precision-aware-optimizer")),
)  # fmt: skip

ADAPTERS = (
    Option("lora-rank", {None: 12, 4: 1}, without("num-experts")),
    Option("pretrained-checkpoint", {BASE: 1}, given("lora-rank")),
    Option("lora-alpha", {None: 1, 8: 1}, given("lora-rank")),
    Option("lora-dropout", {None: 1, 0.1: 1}, given("lora-rank")),
    switch("use-dora", 0.4, given("lora-rank")),
    Option(
        "lora-target-modules",
        {None: 1, ("linear_qkv", "linear_fc1"): 1},
        lambda s: "lora-rank" in s and "multi-latent-attention" not in s and has_attention(s),
    ),
    Option(
        "lora-target-modules",
        {None: 2, ("linear_kv_down_proj", "linear_proj"): 1, ("linear_kv_up_proj",): 1},
        lambda s: "lora-rank" in s and "multi-latent-attention" in s,
    ),
)

TRAINING = (*BATCHES, *PRECISION, *LOW_PRECISION, *OPTIMIZER, *ADAPTERS)
