"""Small files that a stranger may send, and who reads them: see test_hostile_files.

    python hostile_files.py FOLDER

reads each in a process of its own, whose processor time and memory are bounded, and prints a line
of JSON: the case, and how it ended.
"""

import base64
import io
import json
import os
import resource
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.core.datasets.corpus.files import token_files
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing.chat_template import find_chat_template
from megatron.core.dist_checkpointing.interop.opening import open_any
from megatron.core.foundation.errors import MegatronError
from megatron.core.tokenizers.hugging_face import ends_of_generation
from megatron.core.tokenizers.megatron_tokenizer import make_tokenizer
from megatron.core.transport.object_collectives import SingleProcess
from megatron.hugging_face.model_directory import read_model_directory, stored_tensors
from megatron.training.cli.yaml_file import read_yaml
from megatron.training.datasets.blends import _blend_in_file
from megatron_lattice.deepspeed.reading import read_settings
from tests.unit.dist_checkpointing.interop.payloads import amplifiers

PROCESSOR_SECONDS = 10
EXTRA_BYTES = 512 << 20
DEEP = "[" * 200_000
CASES: dict[str, tuple[dict[str, bytes], Callable[[Path], Any]]] = {}
"""Name -> (files, reader of the folder that they are in)."""


def case(name: str, reader: Callable[[Path], Any], **files: bytes | str) -> None:
    """Add one; `__` in a name stands for a dot, `___` for a slash."""
    contents = {
        key.replace("___", "/").replace("__", "."): data.encode() if type(data) is str else data
        for key, data in files.items()
    }
    CASES[name] = contents, reader


def archive(pickled: bytes) -> bytes:
    """A file of torch.save around a pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("archive/data.pkl", pickled)
    return file.getvalue()


def header(entries: Any) -> bytes:
    """A safetensors file."""
    data = entries.encode() if isinstance(entries, str) else json.dumps(entries).encode()
    return struct.pack("<Q", len(data)) + data + bytes(64)


def llama(**changed: Any) -> str:
    """The config of a small model."""
    fields = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    return json.dumps(fields | changed)


def tokenizer(kind: str, name: str) -> Callable[[Path], Any]:
    """Load a file as a tokenizer."""
    return lambda folder: make_tokenizer(kind, tokenizer_model=str(folder / name))


def checkpoint(folder: Path) -> Any:
    """Open as a checkpoint of anybody's."""
    return open_any(folder, peers=SingleProcess())


def yaml(folder: Path) -> None:
    """Read settings; the problems are one error."""
    problems: list[MegatronError] = []
    read_yaml(str(folder / "s.yaml"), problems)
    if problems:
        raise problems[0]


def aliases(opening: str, closing: str) -> str:
    """YAML whose values are named again ten times, nine times over."""
    lines = [f"a0: &a0 {opening}1{closing}"]
    lines += [
        f"a{i}: &a{i} {opening}" + ", ".join([f"*a{i - 1}"] * 10) + closing for i in range(1, 10)
    ]
    return "\n".join(lines)


LEGACY = "mp_rank_00___model_optim_rng__pt"
for _name, _pickle in amplifiers().items():
    if len(_pickle) < 20_000:
        case(f"a rank's file: {_name}", checkpoint, **{LEGACY: archive(_pickle)})
        case(f"torch_dist: {_name}", checkpoint, __metadata=_pickle)
_EXPANDED = io.BytesIO()
torch.save({"model": {"w": torch.ones(1).expand(1 << 20, 1 << 12)}}, _EXPANDED)
case("a rank's file: a view of 16 GiB", checkpoint, **{LEGACY: _EXPANDED.getvalue()})
for _what, _text in {
    "deep": DEEP, "a number of many digits": '{"x": ' + "9" * 500_000 + "}", "cut": '{"x',
    "a list": "[]", "no text": "\ufffd",
}.items():  # fmt: skip
    case(f"manifest: {_what}", checkpoint, manifest__json=_text,
         metadata__json='{"sharded_backend": "lattice"}')  # fmt: skip
    case(f"metadata: {_what}", checkpoint, metadata__json=_text)
    case(f"config: {_what}", read_model_directory, config__json=_text)
    case(f"index: {_what}", stored_tensors, model__safetensors__index__json=_text)
    case(f"safetensors: {_what}", stored_tensors, model__safetensors=header(_text))
    case(f"parts: {_what}", lambda f: token_files(str(f / "x.bin")), x__bin__parts=_text)
    case(f"tokenizer.json: {_what}", tokenizer("HuggingFaceTokenizer", ""), tokenizer__json=_text,
         tokenizer_config__json="{}")  # fmt: skip
    case(f"generation config: {_what}", lambda f: ends_of_generation(str(f)),
         generation_config__json=_text)  # fmt: skip
    case(f"tekken: {_what}", tokenizer("TikTokenizer", "t.json"), t__json=_text)
    case(f"chat template: {_what}", lambda f: find_chat_template(None, str(f)),
         tokenizer_config__json=_text)  # fmt: skip
    case(f"DeepSpeed: {_what}", lambda f: read_settings(str(f / "d.json")), d__json=_text)
    case(f"YAML: {_what}", yaml, s__yaml=_text)
    if _text[:1] in "[{" and _what != "a list":
        case(f"blend: {_what}", lambda f: _blend_in_file(str(f / "b.json")), b__json=_text)
for _what, _entry in {
    "many dimensions": {"dtype": "F32", "shape": [1] * 200_000, "data_offsets": [0, 4]},
    "large dimensions": {"dtype": "F32", "shape": [1 << 62] * 40_000, "data_offsets": [0, 4]},
    "huge offsets": {"dtype": "F32", "shape": [1], "data_offsets": [1 << 62, (1 << 62) + 4]},
}.items():
    case(f"safetensors: {_what}", stored_tensors, model__safetensors=header({"w": _entry}))
case("safetensors: a header of 2^63 bytes", stored_tensors,
     model__safetensors=struct.pack("<Q", 1 << 63))  # fmt: skip
for _kind, _field in {
    "llama": "num_hidden_layers", "gemma2": "num_hidden_layers", "gemma3_text": "num_hidden_layers",
    "gpt_oss": "num_hidden_layers", "deepseek_v3": "num_hidden_layers", "gpt2": "n_layer",
    "deepseek_v32": "num_hidden_layers",
    "mixtral": "num_local_experts", "qwen3_moe": "num_experts",
}.items():  # fmt: skip
    case(f"config: {_kind} of 10^12 parts", read_model_directory,
         config__json=llama(model_type=_kind, **{_field: 10**12}))  # fmt: skip
case("tekken: 10^12 reserved ids", tokenizer("TikTokenizer", "t.json"), t__json=json.dumps({
    "config": {"default_num_special_tokens": 10**12, "default_vocab_size": 10**12, "pattern": "."},
    "vocab": [{"rank": 0, "token_bytes": base64.b64encode(b"a").decode(), "token_str": "a"}],
}))  # fmt: skip
case("ranks: a number of many digits", tokenizer("TikTokenizer", "t.tiktoken"),
     t__tiktoken="YQ== " + "9" * 500_000)  # fmt: skip
case("sentencepiece: noise", tokenizer("GPTSentencePieceTokenizer", "t.model"),
     t__model=bytes(range(256)) * 100)  # fmt: skip
for _count in (1 << 63, (1 << 64) - 1, 1 << 40):
    _head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, _count, _count)
    case(f"corpus of {_count} sequences", lambda f: IndexedDataset(str(f / "x")), x__idx=_head,
         x__bin=bytes(8))  # fmt: skip
case("YAML: lists of aliases", yaml, s__yaml=aliases("[", "]"))
case("YAML: sections of aliases", yaml, s__yaml="\n".join(
    ["a0: &a0 {x: 1}"]
    + [f"a{i}: &a{i} {{" + ", ".join(f"k{j}: *a{i - 1}" for j in range(10)) + "}"
       for i in range(1, 10)]
))  # fmt: skip


def outcome(reader: Callable[[Path], Any], folder: Path) -> str:
    """Run a reader; its end in one line."""
    try:
        reader(folder)
    except MegatronError as error:
        return f"refused, {len(str(error))} characters"
    except BaseException as error:
        return f"{type(error).__name__}: {error!s:.200}"
    return "read"


def bounded(reader: Callable[[Path], Any], folder: Path) -> str:
    """Run a reader in a child with bounded time and memory."""
    incoming, outgoing = os.pipe()
    child = os.fork()
    if child == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + EXTRA_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.write(outgoing, outcome(reader, folder).encode())
        os._exit(0)
    os.close(outgoing)
    with os.fdopen(incoming, "rb") as file:
        told = file.read().decode()
    status = os.waitpid(child, 0)[1]
    return told or f"killed by signal {os.WTERMSIG(status)}"


def main() -> None:
    root = Path(sys.argv[1])
    for number, (name, (files, reader)) in enumerate(CASES.items()):
        folder = root / str(number)
        for file, data in files.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        size = sum(map(len, files.values()))
        print(json.dumps([name, size, bounded(reader, folder)]), flush=True)


if __name__ == "__main__":
    main()
