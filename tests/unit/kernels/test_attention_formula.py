"""Every attention kernel computes the formula in fp64 for all options that its table promises."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from megatron.core.kernels import attention as table
from megatron.core.kernels import blockwise_attention, torch_attention
from megatron.core.kernels.attention import ATTENTION, attention_needs
from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import MaskSpec
from megatron.core.kernels.library_attention import flex_attention_with
from megatron.core.kernels.registry import Request
from megatron.core.parameters.keyed_draws import keyed_attention_keep_mask
from megatron.core.parameters.rng import rng_state
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

B, N, D, E = 2, 4, 8, 6
SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """Options of an attention, and its sizes."""

    window: tuple[int, int] = (-1, 0)
    s: int = 13
    later_queries: int = 0
    groups: int = 2
    value_width: int = D
    dropout: float = 0.0
    softcap: float | None = None
    has: tuple[str, ...] = ()
    """Of documents, mask, bias and sink."""

    def options(self, sink=None) -> AttentionOptions:
        draw = torch.Generator().manual_seed(self.s)
        size = (B, 1, self.s, self.s)
        documents = (torch.rand(B, self.s, generator=draw) < 0.15).cumsum(1).int()
        mask = (torch.rand(size, generator=draw) < 0.3) & ~torch.eye(self.s, dtype=torch.bool)
        bias = torch.randn(1, N, self.s, self.s, generator=draw)
        first = self.later_queries
        return AttentionOptions(
            SCALE,
            MaskSpec(self.window, documents if "documents" in self.has else None),
            attention_mask=mask[..., first:, :] if "mask" in self.has else None,
            attention_bias=bias[..., first:, :] if "bias" in self.has else None,
            first_query=first,
            dropout=self.dropout,
            sink=sink,
            softcap=self.softcap,
        )

    def needs(self) -> frozenset[str]:
        sink = torch.zeros(N) if "sink" in self.has else None
        extra = {table.WIDTHS: self.value_width != D, table.LENGTHS: self.later_queries > 0}
        needs = attention_needs(self.options(sink), "auto")
        return frozenset(needs | {need for need, is_given in extra.items() if is_given})


CASES = {
    **{f"window {w}": Case(w) for w in ((-1, 0), (-1, -1), (3, 0), (4, 2), (1, 0), (-1, 5))},
    **{f"length {s}": Case(s=s) for s in (1, 5, 12, 40)},
    **{f"{g} key heads": Case(groups=g) for g in (1, 4)},
    "widths": Case(value_width=E),
    "documents": Case(has=("documents",), s=40),
    "documents in a window": Case((7, 0), has=("documents",), s=40),
    "cap": Case(softcap=1.5),
    "sink": Case(has=("sink",)),
    "dropout": Case(dropout=0.3, groups=4),
    "all of a sequence": Case((7, 0), 40, 0, 2, E, 0.3, 1.5, ("documents", "sink")),
    "mask": Case(has=("mask",)),
    "mask, dropout": Case(has=("mask",), dropout=0.3),
    "bias": Case((-1, -1), has=("bias",)),
    "later queries": Case(later_queries=5, has=("mask", "bias")),
}
KERNELS = {
    f"{kernel.name} of {device}": replace(kernel, missing=None)
    for device in ("cpu", "cuda")
    for kernel in ATTENTION.of_device(device)
    if not kernel.library
}
PROMISED = {
    (kernel.run, case): (name, case)
    for name, kernel in KERNELS.items()
    for case, given in CASES.items()
    if kernel.refusal(Request("cpu", "float32", given.needs())) is None
}
SIZES_OF_TILES = [
    (name, case, keys)
    for name, case in PROMISED.values()
    for keys in ((5, 64) if name.startswith("blockwise") else (5,))
]


def formula(q, k, v, options, keep_mask):
    """Return the whole attention in fp64, [s, b, n*e]."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(N // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.attention_bias is not None:
        scores = scores + options.attention_bias
    distance = torch.arange(len(k)) - torch.arange(len(k))[options.first_query :, None]
    left, right = options.mask.window
    hidden = (distance > right) & (right >= 0) | (distance < -left) & (left >= 0)
    ids = options.mask.document_ids
    if ids is not None:
        hidden = hidden | (ids[:, None, :, None] != ids[:, None, None, :])
    if options.attention_mask is not None:
        hidden = hidden | options.attention_mask
    scores = scores.masked_fill(hidden, float("-inf"))
    if options.sink is not None:
        column = options.sink.double().view(1, N, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    p = scores.softmax(-1)[..., : len(k)] * keep_mask
    return torch.einsum("bnst,tbnd->sbnd", p, v).flatten(2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("name", "case", "tile_keys"), SIZES_OF_TILES)
def test_a_kernel_and_its_gradients_equal_the_formula(monkeypatch, name, case, tile_keys):
    monkeypatch.setattr(torch_attention, "BLOCK_ROWS", 4)
    monkeypatch.setattr(blockwise_attention, "MAX_BLOCK_ROWS", 8)
    monkeypatch.setattr(blockwise_attention, "MIN_TILE_KEYS", tile_keys)
    monkeypatch.setattr(blockwise_attention, "MAX_TILE_ELEMENTS", B * N * 8 * tile_keys)
    given, run = CASES[case], KERNELS[name].run
    is_flex = name.startswith("flex")  # torch compiles it, and has no gradient of it on the CPU
    if is_flex:
        run = lambda *inputs: flex_attention_with(flex_attention, *inputs)  # noqa: E731
    torch.manual_seed(0)
    num_queries = given.s - given.later_queries
    shapes = [
        (num_queries, B, N, D),
        *((given.s, B, given.groups, w) for w in (D, given.value_width)),
    ]
    leaves = [torch.randn(shape, requires_grad=not is_flex) for shape in shapes]
    if "sink" in given.has:
        leaves.append(torch.randn(N, requires_grad=not is_flex))
    options = given.options(*leaves[3:])
    keep_mask = torch.ones(())
    if given.dropout:
        with rng_state().in_scope("here"):
            keep_mask = keyed_attention_keep_mask(
                (B, N, num_queries, given.s), 1 - given.dropout, first_head=0,
                dtype=torch.float32, device=torch.device("cpu"),
            ) / (1 - given.dropout)  # fmt: skip
    with rng_state().in_scope("here"):
        out = run(*leaves[:3], options)
    expected = formula(*leaves[:3], options, keep_mask)
    assert_close(out, expected, FP32_REORDERED_SUM, "output")
    if is_flex:
        return
    weight = torch.randn(expected.shape)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), leaves)
    for part, ours, theirs in zip(("query", "key", "value", "sink"), found, wanted, strict=False):
        assert_close(ours, theirs, FP32_REORDERED_SUM, f"gradient of the {part}")
