"""Stage B: measure the step of `speed.py` in a peer's program, one peer per process.

    python -m benchmarks.gpu.peers plain-compiled        # or hf-liger, megatron-core
    python -m benchmarks.gpu.peers hf-liger --rehearse   # a tiny model on the CPU

If a package is missing, the row names it, and the process fails unless it is a rehearsal. A peer
stops early when its next step would exceed the limit of its check: the row has the number of
measured steps. A second row of a peer is another configuration of the same model.
megatron-core's package has the name of ours: LATTICE_PEER_SITE names the folder where `pip install
--target` installed it, and this process imports nothing of our own `megatron`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.gpu import workload
from benchmarks.gpu.workload import Row, Workload
from benchmarks.plain_gpt import PlainLlama

Step = Callable[[int], float]
"""Takes one step of this number of micro batches and returns the loss of the last one."""
SITE = "LATTICE_PEER_SITE"
LEARNING_RATE = 1e-4
NUM_STEPS = 6
"""The first steps count too: some peers compile for many seconds."""
_ROW_S = 4.0
"""Seconds that a row and the end of the process take."""
_STEPS_OF_SECOND_ROW = 3
"""A second row is measured if there is time for this number of steps."""


@dataclass(frozen=True)
class Measured:
    """A configuration of a peer.

    Attributes:
        note: text of its row: what differs from the peer's fastest installation.
    """

    step: Step
    note: str = ""


Configurations = Mapping[str, Measured]
"""Name of the row -> configuration. The first one is always measured."""


class NotRunError(Exception):
    """The peer cannot run here; the message is stored in the row."""


class MasterAdamW:
    """torch's fused AdamW on fp32 copies of a model's bf16 weights."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.mains = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.mains, lr=LEARNING_RATE, fused=True)

    def step(self) -> None:
        """Update the fp32 weights from the bf16 gradients and write the bf16 weights."""
        for main, parameter in zip(self.mains, self.parameters, strict=True):
            main.grad = parameter.grad.float()
        for parameter in self.parameters:
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.mains, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.mains)


def text_of(work: Workload, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and labels [b, s] of each micro batch of a step."""
    generator = torch.Generator().manual_seed(1)
    shape = work.num_micro_batches, work.micro_batch, work.sizes.sequence + 1
    text = torch.randint(work.sizes.vocab_size, shape, generator=generator).to(device)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in text]


def simple_step(
    optimizer: MasterAdamW, loss_of: Callable[[Tensor, Tensor], Tensor], work: Workload
) -> Step:
    """Return the step of a bf16 model that accumulates its gradients in bf16."""
    text = text_of(work, optimizer.mains[0].device)

    def step(count: int) -> float:
        for tokens, labels in text[:count]:
            loss = loss_of(tokens, labels)
            (loss / count).backward()
        optimizer.step()
        return float(loss.detach())

    return step


def plain_compiled(work: Workload, device: torch.device, *, is_rehearsal: bool) -> Configurations:
    """Return the step of `plain_gpt.PlainLlama` with compiled layers and a compiled loss.

    Each layer is compiled separately, and one compilation serves all layers: compiling the whole
    model would take minutes.
    """
    with _in_bf16(device):
        model = PlainLlama(work.sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
    backend = "aot_eager" if is_rehearsal else "inductor"  # inductor's C++ compiler takes a minute
    for block in model.blocks:
        block.compile(backend=backend)

    @torch.compile(backend=backend)
    def loss_of_hidden_states(x: Tensor, labels: Tensor) -> Tensor:
        logits = model.head(model.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), labels.flatten())

    angles = model.angles.float()
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        x = model.words(tokens)
        for block in model.blocks:
            x = block(x, cos, sin)
        return loss_of_hidden_states(x, labels)

    return {"plain-compiled": Measured(simple_step(MasterAdamW(model), loss_of, work))}


def hugging_face(work: Workload, device: torch.device, *, is_rehearsal: bool) -> Configurations:
    """Return the steps of Transformers' Llama with torch's attention and Liger's other kernels.

    Liger has two losses. Its loss of the logits is the faster one where the logits fit into memory.
    Its fused head and loss computes 32 chunks of 256 tokens at this workload, which takes about
    twice the time of the three products alone.

    Raises:
        NotRunError: in a rehearsal with Liger installed: Liger has patched the model, and its
            kernels need a GPU.
    """
    transformers = _imported("transformers")
    z = work.sizes
    config = transformers.LlamaConfig(
        vocab_size=z.vocab_size, hidden_size=z.hidden_size, intermediate_size=z.ffn_size,
        num_hidden_layers=z.num_layers, num_attention_heads=z.num_heads,
        num_key_value_heads=z.num_kv_heads, max_position_embeddings=z.sequence,
        rms_norm_eps=z.epsilon, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    with _in_bf16(device):
        model = transformers.LlamaForCausalLM(config).train()
    liger = _imported("liger_kernel.transformers")
    liger.apply_liger_kernel_to_llama(
        rope=True, swiglu=True, rms_norm=True, fused_linear_cross_entropy=False, model=model
    )
    loss_of_logits = liger.LigerCrossEntropyLoss()
    loss_of_rows = liger.LigerFusedLinearCrossEntropyLoss()
    if is_rehearsal:
        raise NotRunError("Liger is applied to the model; its kernels need a GPU")

    def hidden(tokens: Tensor) -> Tensor:
        return model.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        return loss_of_logits(model.lm_head(hidden(tokens)), labels.flatten())

    def fused_loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        return loss_of_rows(model.lm_head.weight, hidden(tokens), labels.flatten())

    optimizer = MasterAdamW(model)
    return {
        "hf-liger": Measured(simple_step(optimizer, loss_of, work)),
        "hf-liger, fused head and loss": Measured(simple_step(optimizer, fused_loss_of, work)),
    }


class TorchAttention(nn.Module):
    """torch's causal attention with the interface of megatron-core's `core_attention`."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> Tensor:
        """Return [s, b, n * d] of query [s, b, n, d], and key and value with fewer heads."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


WITHOUT_TE = (
    "no Transformer Engine and no apex: no fused rotation, weight gradients in bf16, torch's"
    " fused Adam and RMSNorm; "
)


def megatron_core(work: Workload, device: torch.device, *, is_rehearsal: bool) -> Configurations:
    """Return the steps of megatron-core's local layers: with torch's attention and with its own.

    megatron-core has no fused attention of its own, so torch's attention takes the place of
    `core_attention`, as a layer spec permits. Its own attention stores scores [b, n, s, s] and
    recomputes them in backward, as with its flag `--recompute-activations`: otherwise the full
    workload does not fit into memory. Its softmax of bf16 scores is the default of its command
    line.
    """
    _find_peer()
    if is_rehearsal:
        _answer_for_a_gpu()
    parallel_state = _imported("megatron.core.parallel_state")
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.distributed.init_process_group(
        "gloo" if is_rehearsal else "nccl",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    z = work.sizes
    config = TransformerConfig(
        num_layers=z.num_layers, hidden_size=z.hidden_size, num_attention_heads=z.num_heads,
        num_query_groups=z.num_kv_heads, ffn_hidden_size=z.ffn_size, normalization="RMSNorm",
        layernorm_epsilon=z.epsilon, gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=is_rehearsal, bias_activation_fusion=True,
        bias_dropout_fusion=True, cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="native", recompute_granularity="selective",
        attention_softmax_in_fp32=False,
    )  # fmt: skip
    model = GPTModel(
        config=config,
        transformer_layer_spec=gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=z.vocab_size,
        max_sequence_length=z.sequence,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    chunk = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        module=model.bfloat16().to(device),
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=LEARNING_RATE, bf16=True, params_dtype=torch.bfloat16),
        [chunk],
    )
    for group in optimizer.param_groups:  # it creates torch's AdamW without fusion
        group.update(fused=True, foreach=False)
    attentions = [layer.self_attention for layer in model.decoder.layers]
    own = [each.core_attention for each in attentions]
    text = text_of(work, device)
    positions = torch.arange(z.sequence, device=device).unsqueeze(0)

    def step(count: int) -> float:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        for tokens, labels in text[:count]:
            # Without a mask, megatron-core's softmax is causal.
            loss = chunk(tokens, positions, None, labels=labels).float().mean()
            (loss / count).backward()
        finalize_model_grads([chunk])
        optimizer.step()
        return float(loss.detach())

    def with_attention(modules: Sequence[nn.Module], *, recomputes: bool) -> Step:
        def chosen(count: int) -> float:
            for each, module in zip(attentions, modules, strict=True):
                each.core_attention, each.checkpoint_core_attention = module, recomputes
            return step(count)

        return chosen

    of_torch = with_attention([TorchAttention() for _ in own], recomputes=False)
    return {
        "megatron-core": Measured(of_torch, WITHOUT_TE + "torch's attention in its layers"),
        "megatron-core, own attention": Measured(
            with_attention(own, recomputes=True),
            WITHOUT_TE + "its local attention stores the scores",
        ),
    }


@contextmanager
def _in_bf16(device: torch.device) -> Iterator[None]:
    """Create bf16 weights on the device inside the block."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotRunError(f"{name} cannot be imported: {error}") from error


def _find_peer() -> None:
    """Make `import megatron` find megatron-core's package instead of ours.

    Raises:
        NotRunError: megatron-core is not installed.
    """
    site = os.environ.get(SITE)
    if not site or not (Path(site) / "megatron" / "core").is_dir():
        raise NotRunError(f"megatron-core is missing: {SITE}={site or ''} has no megatron/core")
    # Python prefers a package with __init__.py, at any position of the path.
    others = [p for p in sys.path if not (Path(p or ".") / "megatron" / "__init__.py").exists()]
    sys.path[:] = [site, *others]
    own = Path(__file__).resolve().parents[2]
    found = getattr(sys.modules.get("megatron"), "__path__", ())
    assert not any(Path(path).is_relative_to(own) for path in found)


class _CpuForGpu(TorchFunctionMode):
    """Redirects megatron-core's requests for a GPU to the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is Tensor.cuda:
            return args[0]
        if function is Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


def _answer_for_a_gpu() -> None:
    """Make megatron-core compute on the CPU, without compiling, for the rest of this process."""
    gpu: Any = torch.get_device_module("cuda")
    gpu.synchronize = gpu.empty_cache = lambda *_: None
    gpu.current_device = lambda: "cpu"
    gpu.manual_seed = lambda seed: None
    gpu.get_rng_state = gpu.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.compiler.set_stance("force_eager")
    softmax = _imported("megatron.core.fusions.fused_softmax")
    softmax.get_default_causal_mask = lambda size: torch.ones(size, size).triu(1).bool()
    _CpuForGpu().__enter__()


PACKAGES = {
    "plain-compiled": ("torch._dynamo",),
    "hf-liger": ("transformers.models.llama.modeling_llama", "liger_kernel.transformers"),
    "megatron-core": ("megatron.core.models.gpt.gpt_model", "megatron.core.optimizer"),
}
"""Modules that take seconds to import; they are imported before the peer's turn."""


def import_packages(name: str) -> None:
    """Import a peer's packages; `PEERS` reports missing ones."""
    with suppress(NotRunError):
        if name == "megatron-core":
            _find_peer()
        # Transformers imports torchao if it is installed: seconds, and nothing here uses it.
        sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]
        for package in PACKAGES[name]:
            _imported(package)


PEERS: dict[str, Callable[..., Configurations]] = {
    "plain-compiled": plain_compiled,
    "hf-liger": hugging_face,
    "megatron-core": megatron_core,
}


def measure(
    name: str, work: Workload, device: torch.device, *, is_rehearsal: bool
) -> Iterator[Row]:
    """Yield the row of each configuration that there is time for.

    Raises:
        NotRunError: the peer is not installed here.
    """
    before = workload.clocks()
    begin = time.perf_counter()
    configurations = PEERS[name](work, device, is_rehearsal=is_rehearsal)
    start_s = time.perf_counter() - begin
    print(f"{name}: the model and its optimizer took {start_s:.1f} s", flush=True)
    last_s = 0.0
    for label, each in configurations.items():
        if last_s and not fits(_STEPS_OF_SECOND_ROW * last_s):
            print(f"{label}: no time was left", flush=True)
            return
        seconds, loss = timed_steps(label, each.step, work, is_first=not last_s)
        if len(seconds) < 2:
            return
        last_s, peak = seconds[-1], 0.0
        if device.type != "cpu":
            peak = torch.get_device_module(device.type).max_memory_allocated()
            torch.get_device_module(device.type).reset_peak_memory_stats()
        row = workload.step_row(label, work, device, seconds, loss, peak, before)
        yield row | ({"note": each.note} if each.note else {})


def timed_steps(
    label: str, step: Step, work: Workload, *, is_first: bool
) -> tuple[list[float], float]:
    """Return the duration of the steps that there is time for, and the loss of the last one.

    The first step has one micro batch: it compiles and allocates. The first configuration takes at
    least one step more.
    """
    seconds: list[float] = []
    loss = float("nan")
    for number in range(work.num_steps):
        if not (fits(max(seconds, default=0.0)) if not is_first else
                number < 2 or fits(seconds[-1])):  # fmt: skip
            print(f"{label}: {number} of {work.num_steps} steps; no time was left", flush=True)
            break
        begin = time.perf_counter()
        loss = step(work.num_micro_batches if number else 1)  # it waits for the device
        seconds.append(time.perf_counter() - begin)
        # Printed for the case that the process is killed at its limit.
        print(f"{label}: step {number + 1} took {seconds[-1]:.3f} s, loss {loss:.4f}", flush=True)
    return seconds, loss


def fits(seconds: float) -> bool:
    """Return whether work of this duration and a row end before the check's limit."""
    return 1.1 * seconds + _ROW_S < workload.seconds_left()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one peer and print its row."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.peers", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--micro-batch", type=int, default=2, help="samples, default 2")
    options = parser.parse_args(argv)
    if not options.rehearse:  # the CPU takes the place of the GPU before the imports
        import_packages(options.peer)
    device = workload.choose_device(options.rehearse)
    work = workload.workload(options.rehearse).with_micro_batch(options.micro_batch)
    work = replace(work, num_steps=min(work.num_steps, NUM_STEPS))
    try:
        for row in measure(options.peer, work, device, is_rehearsal=options.rehearse):
            workload.print_row(row)
    except NotRunError as error:
        workload.print_row({"step": options.peer, "not run": str(error)})
        return 0 if options.rehearse else 1
    except torch.OutOfMemoryError as error:
        text = str(error).splitlines()[0]
        workload.print_row({"step": options.peer, "micro batch": work.micro_batch, "error": text})
        if work.micro_batch == 1:
            return 1
        # A new process, because this one may never free its memory.
        os.execv(sys.executable, [*sys.orig_argv, "--micro-batch", "1"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
