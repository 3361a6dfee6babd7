"""Weights in 8 and 4 bits: read like the same weights in full, and written for Transformers."""

import json
import random

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import FineGrainedFP8Config

from megatron.core.dist_checkpointing.loader import read_box
from megatron.core.dist_checkpointing.shard_plan import ShardIndex
from megatron.core.foundation.errors import CheckpointError, ConfigError
from megatron.hugging_face import open_model, quantized, read_model_directory, write_model
from tests.harness.live_memory import LiveMemory
from tests.unit.hugging_face.models import VOCAB, saved
from tests.unit.hugging_face.quantized_models import (
    FORMATS,
    fp8_in_blocks,
    make,
    mxfp4,
)


def boxes(shape, seed):
    """Yield the whole of a tensor, halves as ranks read them, and boxes at any offset."""
    yield (0,) * len(shape), tuple(shape)
    for axis, size in enumerate(shape):
        length = size // 2
        offset = [length if dim == axis else 0 for dim in range(len(shape))]
        yield tuple(offset), tuple(length if d == axis else n for d, n in enumerate(shape))
    draw = random.Random(seed)
    for _ in range(3):
        offset = [draw.randrange(size) for size in shape]
        yield (
            tuple(offset),
            tuple(draw.randint(1, size - begin) for size, begin in zip(shape, offset, strict=True)),
        )


def read(contents, reader, key, box, dtype):
    into = torch.full(box[1], torch.nan, dtype=dtype)
    read_box(ShardIndex(contents.manifest.tensors[key]), box, reader, into)
    return into


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_every_box_of_a_weight_in_few_bits_is_the_box_of_the_weight(name, dtype, tmp_path):
    make(name, tmp_path, dtype)
    found, expected = open_model(tmp_path / "quantized"), open_model(tmp_path / "dense")
    assert any("8 or 4 bits are dequantised" in note for note in found.notes)
    assert found.manifest.tensors.keys() == expected.manifest.tensors.keys()
    with found.open_reader() as reader, expected.open_reader() as plain:
        for number, (key, tensor) in enumerate(sorted(found.manifest.tensors.items())):
            assert tensor.shape == expected.manifest.tensors[key].shape
            for box in boxes(tensor.shape, number):
                ours = read(found, reader, key, box, dtype)
                assert torch.equal(ours, read(expected, plain, key, box, dtype)), (key, box)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_formulas_are_the_functions_of_transformers(dtype):
    torch.manual_seed(2)
    parts, dense = fp8_in_blocks((64, 96))
    theirs = Fp8Dequantize(None)._dequantize_one(parts[""], parts["_scale_inv"], dtype)
    assert torch.equal(dense.to(dtype), theirs)
    parts, dense = mxfp4((3, 64, 96))
    theirs = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=dtype)
    assert torch.equal(dense.to(dtype), theirs)


def test_all_exponents_of_mxfp4_are_powers_of_two():
    exponents = torch.arange(255, dtype=torch.uint8)
    expected = torch.tensor([2.0 ** (n - 127) for n in range(255)])
    assert torch.equal(quantized._power_of_two(exponents), expected)


@pytest.mark.parametrize("name", ["block FP8 in whole blocks", "MXFP4"])
def test_transformers_computes_the_same_logits_from_both_directories(name, tmp_path):
    make(name, tmp_path, torch.float32)
    ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    plain, ours = (
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / kind, dtype=torch.float32, attn_implementation="eager"
        )(ids).logits
        for kind in ("dense", "quantized")
    )
    assert torch.equal(plain, ours)


def test_loading_holds_pieces_and_no_whole_weight(tmp_path, monkeypatch):
    make("block FP8", tmp_path)
    monkeypatch.setattr(quantized, "_PIECE", 256)
    contents = open_model(tmp_path / "quantized")
    key = max(contents.manifest.tensors, key=lambda k: contents.manifest.tensors[k].num_bytes)
    tensor = contents.manifest.tensors[key]
    into = torch.empty(tensor.shape, dtype=torch.bfloat16)
    with contents.open_reader() as reader, LiveMemory() as memory:
        memory.ignore(into)
        box = (0,) * len(tensor.shape), tensor.shape
        read_box(ShardIndex(tensor), box, reader, into)
    assert 0 < memory.peak < 40 * 256 < into.numel() * 2


def change(directory, **fields):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "awq"}, "quant_method are fp8, .*compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo are FP8"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "pack-quantized"),
        ({"quant_method": "compressed-tensors", "quantization_status": "frozen"}, "compressed"),
        ({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}, "transform"),
        ("fp8", "is an object"),
    ],
)
def test_a_format_that_is_not_known_is_refused_with_the_known_ones(config, named, tmp_path):
    saved("llama", tmp_path)
    change(tmp_path, quantization_config=config)
    with pytest.raises(ConfigError, match=f"(?s){named}.*bf16 with Transformers"):
        read_model_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "edit", "named"),
    [
        ("block FP8", lambda t: t.pop(next(n for n in t if n.endswith("_scale_inv"))),
         "no tensor holds its scales"),
        ("block FP8", lambda t: t.update({n: v[:, :1].repeat(1, 5) for n, v in t.items()
                                          if n.endswith("0.self_attn.o_proj.weight_scale_inv")}),
         "does not fit"),
        ("INT4 in groups", lambda t: t.pop(next(n for n in t if n.endswith("_shape"))), "_shape"),
        ("NVFP4, ModelOpt", lambda t: t.pop(next(n for n in t if n.endswith("_scale_2"))),
         "_scale_2"),
    ],
)  # fmt: skip
def test_codes_without_fitting_scales_are_refused(name, edit, named, tmp_path):
    make(name, tmp_path)
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=named):
        open_model(tmp_path / "quantized")


def test_fp8_without_a_quantization_config_is_refused(tmp_path):
    make("block FP8", tmp_path)
    change(tmp_path / "quantized", quantization_config=None)
    with pytest.raises(CheckpointError, match="in FP8"):
        open_model(tmp_path / "quantized")


def test_modelopt_describes_the_format_in_a_file_of_its_own(tmp_path):
    make("NVFP4, ModelOpt", tmp_path)
    directory = tmp_path / "quantized"
    fields = json.loads((directory / "config.json").read_text())
    own = {"producer": {"name": "modelopt"}, "quantization": fields.pop("quantization_config")}
    del own["quantization"]["quant_method"]
    (directory / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="in FP8"):
        open_model(directory)
    (directory / "hf_quant_config.json").write_text(json.dumps(own))
    assert any("dequantised" in note for note in open_model(directory).notes)


WIDE = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
WRITTEN = {
    "llama": transformers.LlamaConfig(**WIDE, head_dim=64),
    "a width that is not in whole blocks": transformers.LlamaConfig(
        **WIDE | {"intermediate_size": 192}
    ),
    "experts": transformers.Qwen3MoeConfig(
        **WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, head_dim=64
    ),
    "latent attention": transformers.DeepseekV3Config(
        **WIDE | {"num_key_value_heads": 4}, q_lora_rank=128, kv_lora_rank=112,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=4,
        n_shared_experts=1, moe_intermediate_size=128, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_block_fp8_is_written_as_transformers_writes_and_reads_it(name, tmp_path):
    torch.manual_seed(4)
    theirs = transformers.AutoModelForCausalLM.from_config(WRITTEN[name])
    theirs.save_pretrained(tmp_path / "in")
    written = write_model(
        open_model(tmp_path / "in"), tmp_path / "out", dtype=torch.float8_e4m3fn,
        companion=tmp_path / "in", file_bytes=400_000,
    )  # fmt: skip
    assert len(written.files) > 1
    before, found = load_file(tmp_path / "in" / "model.safetensors"), {}
    for file in written.files:
        found |= load_file(tmp_path / "out" / file)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    left = config["quantization_config"]["modules_to_not_convert"]
    assert "lm_head" in left
    for key, tensor in before.items():
        if key + "_scale_inv" not in found:
            assert tensor.dim() == 1 or key.removesuffix(".weight") in left
            assert torch.equal(found[key], tensor.bfloat16())
            continue
        size = [min(128, n) for n in tensor.shape]
        options = FineGrainedFP8Config(weight_block_size=size)
        quantizer = type("Quantizer", (), {"quantization_config": options})
        for made, value in Fp8Quantize(quantizer)._quantize_one(key, tensor).items():
            assert torch.equal(found[made].float(), value.float()), made
    num_coded = sum(key.endswith("_scale_inv") for key in found)
    assert num_coded >= 8

    # What Transformers dequantises is what a load dequantises.
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    theirs.bfloat16().load_state_dict(again.state_dict())
    theirs.save_pretrained(tmp_path / "again")
    ours, dense = open_model(tmp_path / "out"), open_model(tmp_path / "again")
    with ours.open_reader() as reader, dense.open_reader() as plain:
        for key, tensor in ours.manifest.tensors.items():
            box = (0,) * len(tensor.shape), tensor.shape
            here = read(ours, reader, key, box, torch.bfloat16)
            assert torch.equal(here, read(dense, plain, key, box, torch.bfloat16)), key
