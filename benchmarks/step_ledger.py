"""Count launches and bytes of a training step on a GPU, without a GPU.

    python -m benchmarks.step_ledger [--details] [--write]

The training program runs on a fake accelerator: operations have shapes and compute nothing, and
launches of Triton kernels are recorded. The step is the step of `benchmarks.gpu.speed`: 8 layers of
the width of Llama 3 8B, 8 micro batches of 2 x 4,096 tokens. A pass over memory takes its bytes at
the rate of passes on an H100: 2.7 TB/s for torch's, 2.5 TB/s for ours. A product takes its
operations at 680 TFLOP/s, or its bytes if they take longer. Launches take no time. --details prints
each operation and its caller; --write updates the table of docs/gpu.md.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.workload import Workload
from megatron.core.settings.command_line import read_command_line
from tests.gpu_without_gpu.imaginary_accelerator.accelerator import register

DOCUMENT = Path(__file__).parents[1] / "docs" / "gpu.md"
BEGIN = "<!-- begin: written by python -m benchmarks.step_ledger --write -->"
END = "<!-- end of the step -->"
TORCH_RATE, OUR_RATE, PRODUCT_RATE = 2.7e12, 2.5e12, 680e12
"""Bytes per second of torch's passes and of ours; FLOP/s of products."""
PRODUCTS, ATTENTION, OPTIMIZER = "products", "attention", "optimizer, per step"
REST = "embedding, rest"
FLOOR_MS = {
    PRODUCTS: 113.0, ATTENTION: 7.7, "cross entropy": 2.5, "weight gradient into fp32": 1.5,
    "SwiGLU": 5.6, "norms": 2.4, "residual sums": 0.0, "rotation, qkv copies": 0.9, REST: 0.2,
    OPTIMIZER: 31.0,
}  # fmt: skip
"""Least milliseconds of each part: every necessary byte is read and written once."""
MOST = {
    PRODUCTS: (99, 60.0), ATTENTION: (16, 6.5), "cross entropy": (28, 6.3),
    "weight gradient into fp32": (17, 0.0), "SwiGLU": (16, 15.0), "norms": (68, 7.7),
    "residual sums": (16, 3.2), "rotation, qkv copies": (52, 5.5), REST: (26, 1.0),
    OPTIMIZER: (101, 95.1),
}  # fmt: skip
"""Maximum launches and GB of a part: a change may lower them, none may raise them."""

PARTS_OF_FILES = {
    "cross_entropy.py": "cross entropy", "vocab_parallel_softmax.py": "cross entropy",
    "vocab_softmax.py": "cross entropy",
    "param_meta.py": "weight gradient into fp32",
    "vocab_embedding.py": REST,
    "gated_activation.py": "SwiGLU", "norms.py": "norms", "norm.py": "norms",
    "fused_bias_dropout.py": "residual sums",
    "rotary.py": "rotation, qkv copies", "attention.py": "rotation, qkv copies",
    "rotary_pos_embedding.py": "rotation, qkv copies",
    "adam.py": OPTIMIZER, "squares.py": OPTIMIZER,
}  # fmt: skip
"""File of the innermost project line on the stack -> part."""
PARTS_OF_OPERATIONS = {"cat": "rotation, qkv copies", "add.Tensor": "residual sums"}
"""Operations called by autograd's own nodes, without a project line on the stack."""


@dataclass
class Part:
    """Launches and bytes of a part of the step."""

    launches: float = 0.0
    num_bytes: float = 0.0
    seconds: float = 0.0


def size(tensor: Tensor) -> int:
    """Return the bytes of a tensor; elements repeated by a stride of zero count once."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1
    for length, stride in sides:
        count *= length if stride else 1
    return count * tensor.element_size()


_aten = torch.ops.aten
_REWRITTEN = {"main_ptr", "first_ptr", "second_ptr"}
"""Arguments of our kernels that are both read and written."""
_CHUNK, _CHUNKS_OF_LAUNCH = 65_536, 320
"""Elements of a chunk and chunks of a launch of torch's kernels over lists of tensors."""
_FREE = {
    _aten.detach.default, _aten.empty.memory_format, _aten.empty_like.default,
    _aten._unsafe_view.default, _aten.lift_fresh.default, _aten.new_empty.default,
    _aten.record_stream.default, _aten.empty_strided.default, _aten.new_empty_strided.default,
}  # fmt: skip
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}
_TAKES_ROWS = {"embedding", "gather", "index_select", "index"}
_PUTS_ROWS = {"index_put_", "_index_put_impl_", "index_add_", "scatter_add_"}


def bytes_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    name = func._schema.name.partition("::")[2]
    given = tensors((args, kwargs))
    if name in _TAKES_ROWS:
        return 2 * sum(map(size, tensors(result))) + sum(map(size, given[1:]))
    if name in _PUTS_ROWS:
        return sum(map(size, given[1:])) + 2 * size(given[-1])
    total, written = 0, []
    for index, declared in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(declared.name)
        held = tensors(value)
        writes = declared.alias_info is not None and declared.alias_info.is_write
        if writes and name.startswith("_fused_adam") and declared.name == "grads":
            writes = kwargs.get("grad_scale") is not None
        is_read = not (writes and (name in _OVERWRITES or declared.is_out))
        total += sum(map(size, held)) * (is_read + writes)
        written += held if writes else []
    if name == "addmm":  # its first argument is the sum that it overwrites
        total -= size(given[0]) if kwargs.get("beta") == 0 else 0
    ids = {id(x) for x in written}
    return total + sum(size(x) for x in tensors(result) if id(x) not in ids)


def tensors(values: Any) -> list[Tensor]:
    """Return the accelerator's tensors among values, at any depth."""
    found = torch.utils._pytree.tree_leaves(values)
    return [x for x in found if isinstance(x, Tensor) and device_of(x) != "cpu"]


def device_of(tensor: Tensor) -> str:
    """Return the type of a tensor's device."""
    return getattr(tensor, "fake_device", None).type  # type: ignore[union-attr]


class Launches:
    """Counts launches by part."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {name: Part() for name in FLOOR_MS}
        self.details: dict[tuple[str, str, str], Part] = {}
        self.is_update = False

    def add(
        self, part: str, name: str, place: str, num_bytes: float, seconds: float, number: int = 1
    ) -> None:
        """Count launches."""
        if self.is_update:
            part = OPTIMIZER
        for each in (self.parts[part], self.details.setdefault((part, name, place), Part())):
            each.launches += number
            each.num_bytes += num_bytes
            each.seconds += seconds

    def operation(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Count an operation of torch's."""
        if func.namespace != "aten" or func.is_view or func in _FREE:
            return
        if not tensors((args, kwargs, out)):
            return
        name = str(func).removeprefix("aten.")
        moved = bytes_of(func, args, kwargs, out)
        seconds = moved / TORCH_RATE
        place = place_in_project()
        if is_of_stand_in(func, place):
            return
        part = PARTS_OF_FILES.get(place.partition(":")[0], "")
        if "scaled_dot_product" in name:
            part = ATTENTION
        elif name.startswith(("mm", "addmm", "bmm")):
            m, n = (out if isinstance(out, Tensor) else args[0]).shape[-2:]
            left = args[1] if name.startswith("addmm") else args[0]
            part, seconds = PRODUCTS, max(seconds, 2.0 * m * n * left.shape[-1] / PRODUCT_RATE)
        elif not part:
            part = next((p for o, p in PARTS_OF_OPERATIONS.items() if name.startswith(o)), REST)
        self.add(part, name, place, moved, seconds, launches_of(name, args))

    def kernel(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> None:
        """Count a launch of one of our kernels: each tensor argument is read or written once,
        moments and main weights both."""
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        held = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        # For an absent optional tensor, callers pass another argument's tensor.
        distinct = {id(x) if name != "out_ptr" else name: x for name, x in held.items()}
        moved = sum(map(size, (*distinct.values(), *(held[n] for n in _REWRITTEN & held.keys()))))
        file = f"{function.__module__.rpartition('.')[2]}.py"
        self.add(PARTS_OF_FILES[file], function.__name__, file, moved, moved / OUR_RATE)


def launches_of(name: str, args: Sequence[Any]) -> int:
    """Return the launches of an operation, more than one for a long list of tensors."""
    if not name.startswith(("_foreach", "_fused")):
        return 1
    chunks = sum(-(-x.numel() // _CHUNK) for x in args[0])
    return -(-chunks // _CHUNKS_OF_LAUNCH)


def is_of_stand_in(func: Any, place: str) -> bool:
    """Return whether an operation repeats keys for attention, or sums their gradients.

    Attention on a GPU accepts fewer keys; attention on the fake accelerator does not.
    """
    if place == "torch_attention.py:_sdpa":
        return func is _aten.clone.default
    return not place and func is _aten.sum.dim_IntList


def place_in_project() -> str:
    """Return "file.py:function" of the innermost project line on the stack, or ""."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if "megatron" in path.parts and "planner" not in path.parts:
            return f"{path.name}:{frame.name}"
    return ""


@contextlib.contextmanager
def noted_triton(launches: Launches) -> Iterator[None]:
    """Provide a fake Triton inside the block, and record its launches."""
    from megatron.core.kernels import triton_kernels

    class Jitted:
        def __init__(self, function: Callable[..., Any]) -> None:
            self.function = function

        def __getitem__(self, _grid: object) -> Callable[..., None]:
            def launch(*args: Any, num_warps: int = 0, num_stages: int = 0, **kwargs: Any) -> None:
                launches.kernel(self.function, args, kwargs)

            return launch

    triton, language = ModuleType("triton"), mock.MagicMock(name="triton.language")
    triton.__dict__.update(
        jit=Jitted, language=language, cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << max(n - 1, 0).bit_length(),
    )  # fmt: skip
    # torch imports Triton too, and must not find the fake one.
    stand_in = {"triton": triton, "triton.language": language}
    known = {name: sys.modules.pop(name) for name in stand_in if name in sys.modules}
    sys.modules.update(stand_in)
    for file in Path(triton_kernels.__path__[0]).glob("[a-z]*.py"):
        importlib.import_module(f"{triton_kernels.__name__}.{file.stem}")
    for name in stand_in:
        del sys.modules[name]
    sys.modules.update(known)
    with (
        mock.patch.object(triton_kernels, "device_type", return_value="cuda"),
        mock.patch.object(triton_kernels, "why_missing", return_value=None),
    ):
        yield


def counted_step(workload: Workload) -> Launches:
    """Return the launches of a step after the first; the process has the fake accelerator."""
    from megatron.training.metrics.memory_timeline import MemoryTimeline
    from megatron.training.setup import traced_rank as rank_step
    from megatron.training.setup.fake_device import fake_rank
    from pretrain_gpt import forward_step, model_provider
    from tests.gpu_without_gpu.imaginary_accelerator.accelerator import as_a_gpu_computes
    from tests.harness.resolved_run import run_of

    launches = Launches()

    class Ledger(MemoryTimeline):
        is_counting = False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is _aten.record_stream.default:
                return None
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if self.is_counting:
                launches.operation(func, args, kwargs or {}, result)
            return result

    def updating(*args: Any, **kwargs: Any) -> Any:
        launches.is_update = True
        return start(*args, **kwargs)

    start = rank_step.DeviceDecision.finish
    with (
        as_a_gpu_computes(),
        mock.patch.object(rank_step.DeviceDecision, "finish", updating),
        fake_rank(0, 1, backend="nccl", repeats=True),
        noted_triton(
            launches
        ),  # within the rank, which replaces the launches of an installed Triton
        Ledger() as ledger,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        script = rank_step.ModelScript(model_provider, forward_step)
        rank = rank_step.RankUnderTest(run_of(words_of(workload), 1), script, ledger)
        rank.step(None, 1)
        launches.__init__()  # type: ignore[misc]
        ledger.is_counting = True
        rank.step(None, workload.num_micro_batches)
    return launches


def words_of(w: Workload) -> str:
    """Return the command line of `pretrain_gpt.py`."""
    z = w.sizes
    return (
        f"--num-layers {z.num_layers} --hidden-size {z.hidden_size} --ffn-hidden-size {z.ffn_size}"
        f" --num-attention-heads {z.num_heads} --group-query-attention"
        f" --num-query-groups {z.num_kv_heads} --vocab-size {z.vocab_size} --bf16"
        " --hidden-dropout 0 --attention-dropout 0 --swiglu --disable-bias-linear"
        " --normalization RMSNorm --position-embedding-type rope"
        " --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer"
        f" --use-distributed-optimizer --seq-length {z.sequence}"
        f" --max-position-embeddings {z.sequence} --micro-batch-size {w.micro_batch}"
        f" --global-batch-size {w.micro_batch * w.num_micro_batches} --rerun-mode disabled"
    )


def rows_of(launches: Launches, num_micro_batches: int) -> dict[str, Part]:
    """Return the parts of a micro batch, and the optimizer's part of a step."""
    found = {}
    for name, part in launches.parts.items():
        share = 1 if name == OPTIMIZER else num_micro_batches
        found[name] = Part(part.launches / share, part.num_bytes / share, part.seconds / share)
    return found


def milliseconds_of_passes(rows: Mapping[str, Part]) -> float:
    """Return the milliseconds of a micro batch outside of products and attention."""
    left_out = (PRODUCTS, ATTENTION, OPTIMIZER)
    return 1e3 * sum(part.seconds for name, part in rows.items() if name not in left_out)


def table(rows: Mapping[str, Part]) -> list[str]:
    """Return the lines of the document."""
    lines = ["| part | launches | GB | ms | least ms |", "|---|---|---|---|---|"]
    for name, part in rows.items():
        ms = "-" if name == ATTENTION else f"{1e3 * part.seconds:.1f}"
        lines.append(
            f"| {name} | {part.launches:.0f} | {part.num_bytes / 1e9:.1f} | {ms}"
            f" | {FLOOR_MS[name]:.1f} |"
        )
    ms = milliseconds_of_passes(rows)
    return [*lines, "", f"Outside of products and attention a micro batch takes {ms:.1f} ms."]


def details(launches: Launches, num_micro_batches: int) -> Iterator[str]:
    """Yield a line for each operation and place, the longest first."""
    for key, part in sorted(launches.details.items(), key=lambda item: -item[1].seconds):
        share = 1 if key[0] == OPTIMIZER else num_micro_batches
        yield " ".join(
            (f"{part.launches / share:7.1f} {part.num_bytes / share / 1e6:9.1f} MB", *key)
        )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    details: bool = False
    """Print each operation and its caller."""
    write: bool = False
    """Update the table of docs/gpu.md."""


def main() -> int:
    """Count the step and print it."""
    flags = read_command_line(Flags, prog="python -m benchmarks.step_ledger", description=__doc__)
    register()
    workload = Workload()
    launches = counted_step(workload)
    if flags.details:
        print("\n".join(details(launches, workload.num_micro_batches)))
    rows = rows_of(launches, workload.num_micro_batches)
    lines = "\n".join(table(rows))
    print(lines)
    if flags.write:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{lines}\n{END}{rest.partition(END)[2]}")
    above = [
        name
        for name, part in rows.items()
        if round(part.launches) > MOST[name][0] or round(part.num_bytes / 1e9, 1) > MOST[name][1]
    ]
    if above:
        print(f"More launches or bytes than before: {', '.join(above)}", file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
