"""Which attention kernel is chosen, and the masks of flex attention."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.foundation.errors import ConfigError
from megatron.core.kernels import attention as table
from megatron.core.kernels.attention import ATTENTION, choose_attention
from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import MaskSpec
from megatron.core.kernels.library_attention import MASK_BLOCK, _block_mask
from megatron.core.kernels.registry import Kernel, KernelTable, Request


def plain():
    return "plain"


def test_the_first_capable_kernel_is_chosen_and_the_others_are_explained():
    kernels = (
        Kernel("fast", plain, dtypes=frozenset({"bfloat16"})),
        Kernel("library", plain, frozenset({"windows"}), missing=lambda: "is not installed"),
        Kernel("slow", plain, frozenset({"windows", "documents"})),
    )
    choice = KernelTable("x", {"cpu": kernels}).choose(
        Request("cpu", "float32", frozenset({"windows"}))
    )
    assert choice.kernel.name == "slow"
    assert dict(choice.passed_over) == {
        "fast": "does not support windows",
        "library": "is not installed",
    }
    assert choice.reasons == "fast does not support windows; library is not installed"


def test_an_asked_kernel_goes_first_where_it_can():
    kernels = (Kernel("a", plain, frozenset({"sink"})), Kernel("b", plain))
    chooser = KernelTable("x", {"cpu": kernels})
    assert chooser.choose(Request("cpu", "float32"), ("b",)).kernel.name == "b"
    with_sink = Request("cpu", "float32", frozenset({"sink"}))
    assert chooser.choose(with_sink, ("b",)).kernel.name == "a"


def has_triton(monkeypatch, answer):
    """Let flex attention believe it; the memory of the table is not asked."""
    monkeypatch.setattr("megatron.core.kernels.library_attention.has", lambda name: answer)


def has_libraries(monkeypatch, *names):
    """Let the table believe that of the attention libraries these are installed."""
    for kernel in ATTENTION.of_device("cuda"):
        if kernel.library:
            lacks = None if kernel.name in names else "is not installed"
            monkeypatch.setitem(vars(kernel), "missing", lambda lacks=lacks: lacks)


CHOICES = [
    # needs, on a CPU, on an accelerator with Triton and without libraries
    ((), "cpu-blocks", "sdpa"),
    ((table.WINDOW,), "cpu-blocks", "flex"),
    ((table.DROPOUT,), "cpu-blocks", "unfused"),
    ((table.OWN_DROPOUT,), "cpu-blocks", "sdpa"),
    ((table.OWN_DROPOUT, table.WINDOW), "cpu-blocks", "sdpa-mask"),
    ((table.WIDE_HEADS,), "cpu-blocks", "sdpa"),
    ((table.WIDTHS,), "blockwise", "sdpa"),
    ((table.DOCUMENTS,), "blockwise", "flex"),
    ((table.SOFTCAP,), "blockwise", "flex"),
    ((table.SINK, table.WINDOW), "blockwise", "flex"),
    ((table.DOCUMENTS, table.DROPOUT), "blockwise", "unfused"),
    ((table.MASK,), "sdpa-mask", "sdpa-mask"),
    ((table.MASK, table.DROPOUT), "unfused", "unfused"),
    ((table.BIAS,), "sdpa-mask", "sdpa-mask"),
    ((table.LENGTHS,), "sdpa-mask", "sdpa-mask"),
    ((table.PARTIAL_KEYS,), "blockwise", "blockwise"),
    ((table.HEAD_EXCHANGE,), "blockwise", "sdpa"),
    ((table.HEAD_EXCHANGE, table.DOCUMENTS), "blockwise", "flex"),
]


@pytest.mark.parametrize(("needs", "on_cpu", "on_gpu"), CHOICES)
def test_each_device_has_its_own_preference(monkeypatch, needs, on_cpu, on_gpu):
    has_triton(monkeypatch, True)
    has_libraries(monkeypatch)
    for device, wanted in (("cpu", on_cpu), ("cuda", on_gpu)):
        request = Request(device, "bfloat16", frozenset(needs))
        assert ATTENTION._choose(request, ()).kernel.name == wanted


LIBRARIES = [
    # needs, backend asked for, with both libraries installed
    ((), "auto", "sdpa"),
    ((), "flash", "flash-attn"),
    ((), "fused", "transformer-engine"),
    ((table.WINDOW, table.DOCUMENTS), "auto", "flash-attn"),
    ((table.WINDOW, table.DOCUMENTS, table.OWN_DROPOUT), "fused", "transformer-engine"),
    ((table.WINDOW, table.OWN_DROPOUT), "flash", "flash-attn"),
    ((table.SOFTCAP,), "fused", "flex"),
    ((table.SOFTCAP,), "flash", "flash-attn"),
    ((table.SOFTCAP, table.OWN_DROPOUT), "flash", "unfused"),
    ((table.WIDE_HEADS, table.WINDOW), "flash", "flex"),
    ((table.SINK,), "flash", "flex"),
    ((table.DROPOUT,), "auto", "unfused"),
]


@pytest.mark.parametrize(("needs", "backend", "wanted"), LIBRARIES)
def test_an_installed_library_is_taken_where_it_can(monkeypatch, needs, backend, wanted):
    has_triton(monkeypatch, True)
    has_libraries(monkeypatch, "flash-attn", "transformer-engine")
    request = Request("cuda", "bfloat16", frozenset(needs))
    assert ATTENTION._choose(request, table.ASKED[backend]).kernel.name == wanted


def test_libraries_compute_in_half_precision_only(monkeypatch):
    has_triton(monkeypatch, True)
    has_libraries(monkeypatch, "flash-attn", "transformer-engine")
    request = Request("cuda", "float32", frozenset({table.WINDOW}))
    choice = ATTENTION._choose(request, ())
    assert choice.kernel.name == "flex"
    assert dict(choice.passed_over)["flash-attn"] == "computes in bfloat16, float16, not in float32"


def test_a_planned_device_leaves_open_whether_it_has_the_libraries():
    request = Request("cuda", "bfloat16", frozenset({table.WINDOW}), is_planned=True)
    choice = ATTENTION.choose(request)
    assert choice.name == (
        "flash-attn if installed, else transformer-engine if installed, else flex"
    )
    assert choice.reasons == "sdpa does not support windows"


@pytest.mark.parametrize("backend", table.ASKED)
def test_only_an_explicit_request_lets_a_kernel_drop_by_layout(backend):
    options = AttentionOptions(1.0, MaskSpec((-1, 0)), dropout=0.1)
    needs = table.attention_needs(options, backend)
    request = Request("cuda", "bfloat16", frozenset(needs), is_planned=True)
    choice = ATTENTION.choose(request, table.ASKED[backend])
    if backend in ("flash", "fused"):
        assert choice.kernel.name == "sdpa"
        assert choice.if_installed == (("flash-attn",) if backend == "flash" else (
            "transformer-engine",
        ))  # fmt: skip
    else:
        assert choice.kernel.name == "unfused"
        refused = ("sdpa", "does not support dropout independent of the layout")
        assert backend != "auto" or refused in choice.passed_over


def test_without_triton_documents_on_an_accelerator_become_a_mask(monkeypatch):
    has_triton(monkeypatch, False)
    choice = ATTENTION._choose(Request("cuda", "bfloat16", frozenset({table.DOCUMENTS})), ())
    assert choice.kernel.name == "sdpa-mask"
    assert ("flex", "needs Triton, which is not installed") in choice.passed_over


def test_asking_for_flash_on_an_accelerator_prefers_fused_kernels():
    documents = Request("cuda", "bfloat16", frozenset({table.DOCUMENTS}), is_planned=True)
    assert ATTENTION.choose(documents, table.ASKED["flash"]).kernel.name == "flex"
    assert ATTENTION.choose(documents, table.ASKED["unfused"]).kernel.name == "unfused"


def test_needs_that_no_kernel_meets_together_are_refused():
    q = torch.zeros(4, 1, 1, 8)
    options = AttentionOptions(1.0, MaskSpec((-1, 0)), attention_mask=torch.zeros(4, 4) > 0)
    with pytest.raises(ConfigError, match="an attention_mask, context parallelism by a ring"):
        choose_attention(q, q, q, options, comm_type="p2p")


def masks_of_flex():
    generator = torch.Generator().manual_seed(0)
    for s in (1, 128, 300, 1024):
        for share in (None, 0.003, 0.05, 1.0):
            ids = None
            if share is not None:
                ids = (torch.rand(2, s, generator=generator) < share).int().cumsum(1)
                ids[1] *= 3  # some number no document
            for window in ((-1, 0), (0, 0), (5, 0), (127, 0), (400, 0), (200, 130), (-1, -1)):
                yield s, window, ids


def test_blocks_of_the_mask_are_those_that_torch_finds_in_the_whole_of_it():
    for s, window, ids in masks_of_flex():
        found = _block_mask.__wrapped__(window, ids, s, torch.device("cpu"))
        if found is None:
            assert (window, ids) == ((-1, -1), None)
            continue
        batch = None if ids is None else 2
        wanted = create_block_mask(found.mask_mod, batch, None, s, s, device="cpu")
        assert (found.seq_lengths, found.BLOCK_SIZE) == (wanted.seq_lengths, wanted.BLOCK_SIZE)
        for name, tensor in vars(wanted).items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(getattr(found, name), tensor), (s, window, name)


def test_a_mask_of_blocks_takes_no_memory_of_the_order_of_the_scores():
    s, largest = 8192, 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            nonlocal largest
            out = operation(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            largest = max([largest, *(x.untyped_storage().nbytes() for x in tensors)])
            return out

    ids = (torch.arange(2 * s) % s // 700).view(2, s)
    with Sizes():
        _block_mask.__wrapped__((-1, 0), ids, s, torch.device("cpu"))
    tables = 2 * (s // MASK_BLOCK) ** 2 * 8  # int64, for each of two samples
    assert 0 < largest <= max(tables, ids.nbytes)
