"""Published models, and layouts that they are trained in, on 8 to 16,384 ranks.

All `presets` from 6.7B parameters on; those with experts in the layout of their file in
examples/mixture_of_experts. Each has a layout of few ranks and one of 16,384; there models of long
sequences have them, in 16 parts.
"""

from dataclasses import dataclass

LATER = "--rerun-mode disabled"
"""Losses and norms are read when they are logged."""
BF16 = f"--bf16 --hidden-dropout 0 --attention-dropout 0 --use-distributed-optimizer {LATER}"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
EXPERTS = "examples/mixture_of_experts"
ROOM = "--moe-expert-rank-capacity-factor 2"
"""Rows that a rank sends to another are counted on the device."""
SELECTIVE = "--recompute-activations"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params --use-megatron-fsdp"
ENDS = "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7"
"""126 layers in 16 stages: the first and the last have an embedding too."""
MOST = 16384
"""Ranks."""
LONG = 131072
"""Tokens of a sequence, in 16 parts."""


@dataclass(frozen=True)
class LargeRun:
    """A command line and its ranks."""

    name: str
    num_ranks: int
    words: str
    num_microbatches: int = 2
    layout: str = ""
    """In a few words."""
    seq_length: int = 0

    @property
    def ranks(self) -> list[int]:
        """Return the first, a middle and the last rank; pipeline stages are consecutive ranks."""
        return [0, self.num_ranks // 2, self.num_ranks - 1]


@dataclass(frozen=True)
class _Sizes:
    """How a model is cut; what is 1 is not cut."""

    tp: int = 1
    pp: int = 1
    virtual: int = 1
    cp: int = 1
    more: str = ""
    """Further words."""
    stands_for: str = ""
    """What they are called in the table."""

    @property
    def words(self) -> str:
        """The words of the command line."""
        words = [OVERLAP] if ZERO3 not in self.more else []
        if self.tp > 1:
            words.append(f"--tensor-model-parallel-size {self.tp} --sequence-parallel")
        if self.pp > 1:
            words.append(f"--pipeline-model-parallel-size {self.pp}")
        if self.virtual > 1:
            words.append(f"--num-virtual-stages-per-pipeline-rank {self.virtual}")
        if self.cp > 1:
            words.append(f"--context-parallel-size {self.cp}")
        return " ".join((*words, self.more)).strip()

    @property
    def label(self) -> str:
        """The sizes in a few words."""
        sizes = {"TP": self.tp, "PP": self.pp, "VPP": self.virtual, "CP": self.cp}
        words = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
        return ", ".join((*words, *filter(None, [self.stands_for]))) or "DP"

    @property
    def num_microbatches(self) -> int:
        """As many as fill the first stage with those in flight, and at least 2."""
        return max(2, self.pp * (2 if self.virtual > 1 else 1))


def _dense(preset: str, seq_length: int, layouts: dict[int, _Sizes]) -> list[LargeRun]:
    """Return the runs of a preset; `layouts`: ranks -> sizes. With CP 16 sequences are long."""
    found = []
    for num_ranks, sizes in layouts.items():
        length = LONG if sizes.cp == 16 else seq_length
        batch = f"--micro-batch-size 1 --global-batch-size {num_ranks} --seq-length {length}"
        words = f"--preset {preset} {BF16} {batch} {sizes.words}"
        found.append(
            LargeRun(preset, num_ranks, words, sizes.num_microbatches, sizes.label, length)
        )
    return found


def _sparse(
    name: str, label: str, num_microbatches: int, *all_ranks: int, is_full: bool = True
) -> list[LargeRun]:
    """Return the runs of an example with experts, in the layout that it has.

    Args:
        is_full: layers are recomputed whole; otherwise their attention.
    """
    recompute, named = (FULL, "full") if is_full else (SELECTIVE, "selective")
    return [
        LargeRun(
            name,
            num_ranks,
            f"--yaml-cfg {EXPERTS}/{name}.yaml --micro-batch-size 1 --global-batch-size {num_ranks}"
            f" {LATER} {ROOM} {recompute} {OVERLAP}",
            num_microbatches,
            f"{label}, {named} recomputation",
            4096,
        )
        for num_ranks in all_ranks
    ]


_SELECTIVE = {"more": SELECTIVE, "stands_for": "selective recomputation"}
_FULL = {"more": FULL, "stands_for": "full recomputation"}
_7B = {8: _Sizes(tp=2), MOST: _Sizes(tp=4, pp=2)}
_7B_LONG = _7B | {MOST: _Sizes(tp=4, cp=16, **_SELECTIVE)}
_14B = {16: _Sizes(tp=4), MOST: _Sizes(tp=4, pp=4)}
_14B_LONG = _14B | {MOST: _Sizes(tp=4, pp=2, cp=16, **_SELECTIVE)}
_32B = {64: _Sizes(tp=8, pp=2), MOST: _Sizes(tp=8, pp=4)}
_32B_LONG = _32B | {MOST: _Sizes(tp=8, pp=4, cp=16, **_SELECTIVE)}
_70B = {128: _Sizes(tp=8, pp=4), MOST: _Sizes(tp=8, pp=8)}
_70B_LONG = _70B | {MOST: _Sizes(tp=8, pp=4, cp=16, **_SELECTIVE)}
_405B_FULL = {"more": f"{ENDS} {FULL}", "stands_for": "full recomputation"}
_405B = {
    512: _Sizes(tp=8, pp=16, **_405B_FULL),
    8192: _Sizes(tp=8, pp=16, **_405B_FULL),
    MOST: _Sizes(tp=8, pp=16, cp=16, **_405B_FULL),
}
_ZERO3 = _Sizes(more=ZERO3, stands_for="ZeRO 3")

RUNS = [
    *_dense("gpt3-6.7b", 2048, _7B),
    *_dense("gpt3-13b", 2048, _14B | {512: _Sizes(tp=4, pp=2)}),
    *_dense("gpt3-175b", 2048, {128: _Sizes(tp=8, pp=8), 1536: _Sizes(tp=8, pp=8, virtual=3),
                                MOST: _Sizes(tp=8, pp=16)}),
    *_dense("llama2-7b", 4096, _7B),
    *_dense("llama2-13b", 4096, _14B),
    *_dense("llama2-70b", 4096, _70B | {2048: _Sizes(tp=8, pp=4, virtual=5)}),
    *_dense("llama3-8b", 8192, _7B | {8: _ZERO3}),
    *_dense("llama3-70b", 8192, _70B),
    *_dense("llama3.1-8b", 8192, _7B_LONG | {64: _Sizes(tp=2, cp=4)}),
    *_dense("llama3.1-70b", 8192, _70B_LONG | {1024: _Sizes(tp=8, pp=4, cp=2, **_FULL)}),
    *_dense("llama3.1-405b", 8192, _405B),
    *_dense("mistral-7b-v0.1", 4096, _7B | {32: _Sizes(tp=2, pp=2)}),
    *_dense("mistral-7b-v0.3", 4096, _7B),
    *_dense("mistral-nemo-12b", 4096, _14B_LONG),
    *_dense("qwen2.5-7b", 4096, _7B_LONG),
    *_dense("qwen2.5-14b", 4096, _14B_LONG),
    *_dense("qwen2.5-32b", 4096, _32B_LONG),
    *_dense("qwen2.5-72b", 4096, _70B_LONG),
    *_dense("qwen3-8b", 4096, _7B),
    *_dense("qwen3-14b", 4096, _14B),
    *_dense("qwen3-32b", 4096, _32B | {1024: _Sizes(tp=8, pp=2, virtual=2)}),
    *_sparse("mixtral_8x7b", "TP 2, PP 4, EP 8", 4, 64, 1024, MOST, is_full=False),
    *_sparse("gpt_oss_20b", "EP 8", 2, 32, 1024, MOST),
    *_sparse("qwen3_30b_a3b", "PP 2, EP 8", 2, 64, 1024, MOST),
    *_sparse("deepseek_v2_lite", "EP 8", 2, 32, 1024, MOST, is_full=False),
    *_sparse("qwen3_235b_a22b", "PP 8, EP 32", 8, 1024, MOST),
    *_sparse("gpt_oss_120b", "EP 64", 1, 1024, MOST),
    *_sparse("deepseek_v3", "PP 16, EP 64", 16, 1024, MOST),
    *_sparse("kimi_k2", "PP 16, EP 64", 16, 1024, MOST),
]  # fmt: skip
