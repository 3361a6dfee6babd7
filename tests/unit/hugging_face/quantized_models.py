"""Small models in 8 and 4 bits, as they are published, and their weights by the formats' formulas.

Codes and scales are random; every formula is written out for a whole tensor. The formulas of
block FP8 and MXFP4 are compared with Transformers' functions in `test_quantized`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.hugging_face.models import saved

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Made = tuple[dict[str, Tensor], Tensor]
"""Suffix of a weight's name -> its tensor in the file; the weight by the formula."""


def fp8(shape: tuple[int, ...]) -> Tensor:
    codes = torch.randint(0, 256, shape, dtype=torch.int32).to(torch.uint8)
    return torch.where(codes & 0x7F == 0x7F, 0x30, codes).view(torch.float8_e4m3fn)


def positive_fp8(*shape: int) -> Tensor:
    codes = fp8(shape).view(torch.uint8) & 0x7F
    return codes.view(torch.float8_e4m3fn)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape) * 1e-3 + 1e-4).to(dtype)


def per_block(scale: Tensor, rows: int, columns: int, shape: tuple[int, ...]) -> Tensor:
    """Repeat the scales of blocks for their elements."""
    full = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return full[: shape[0], : shape[1]]


def fp8_in_blocks(shape: tuple[int, ...]) -> Made:
    codes, scale = fp8(shape), scales(-(-shape[0] // 16), -(-shape[1] // 16))
    dense = codes.float() * per_block(scale, 16, 16, shape)
    return {"": codes, "_scale_inv": scale}, dense


def fp8_by_tensor(shape: tuple[int, ...]) -> Made:
    codes, scale = fp8(shape), scales()
    return {"": codes, "_scale": scale}, codes.float() * scale


def fp8_by_row(shape: tuple[int, ...]) -> Made:
    codes, scale = fp8(shape), scales(shape[0], 1, dtype=torch.bfloat16)
    return {"": codes, "_scale": scale}, codes.to(torch.bfloat16) * scale


def nibbles(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.int32).to(torch.uint8)


def int4_in_groups(shape: tuple[int, ...], size: int = 16, asymmetric: bool = False) -> Made:
    codes = torch.randint(0, 16, shape)
    packed = torch.zeros(shape[0], -(-shape[1] // 8), dtype=torch.int64)
    for column in range(shape[1]):
        packed[:, column // 8] |= codes[:, column] << 4 * (column % 8)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    scale = scales(shape[0], shape[1] // size, dtype=torch.bfloat16)
    parts = {"_packed": packed, "_scale": scale, "_shape": torch.tensor(shape)}
    numbers = codes - 8
    if asymmetric:
        zeros = torch.randint(0, 16, scale.shape)
        words = torch.zeros(-(-shape[0] // 8), scale.shape[1], dtype=torch.int64)
        for row in range(shape[0]):
            words[row // 8] |= zeros[row] << 4 * (row % 8)
        parts["_zero_point"] = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
        numbers = numbers - per_block(zeros - 8, 1, size, shape)
    return parts, numbers.to(torch.bfloat16) * per_block(scale, 1, size, shape)


def nvfp4_of_modelopt(shape: tuple[int, ...]) -> Made:
    packed, scale = random_bytes(shape[0], shape[1] // 2), positive_fp8(shape[0], shape[1] // 16)
    common = scales()
    dense = E2M1[nibbles(packed)] * per_block(scale.float() * common, 1, 16, shape)
    return {"": packed, "_scale": scale, "_scale_2": common}, dense


def nvfp4_of_compressed_tensors(shape: tuple[int, ...]) -> Made:
    packed, scale = random_bytes(shape[0], shape[1] // 2), positive_fp8(shape[0], shape[1] // 16)
    common = 1 / scales(1)
    dense = E2M1[nibbles(packed)] * per_block(scale.float() / common, 1, 16, shape)
    parts = {"_packed": packed, "_scale": scale, "_global_scale": common}
    return parts, dense.to(torch.bfloat16)


def mxfp4(shape: tuple[int, ...]) -> Made:
    """Of [e, i, o]; the files hold [e, o, i] in groups of 16 (32 when published)."""
    count, width, height = shape
    blocks = random_bytes(count, height, width // 16, 8)
    exponents = torch.randint(110, 125, (count, height, width // 16), dtype=torch.uint8)
    dense = E2M1[nibbles(blocks)] * 2.0 ** (exponents.int() - 127)[..., None]
    return {"_blocks": blocks, "_scales": exponents}, dense.flatten(-2).mT


COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


def group(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


LINEAR = r".*layers\..*_proj\.weight"
FORMATS: dict[str, tuple[str, str, Callable[[tuple[int, ...]], Made], dict[str, Any]]] = {
    "block FP8": (
        "deepseek v3", LINEAR, fp8_in_blocks,
        {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"},
    ),
    "block FP8 in whole blocks": (
        "qwen3 with experts", LINEAR, fp8_in_blocks,
        {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"},
    ),
    "FP8 by tensor, ModelOpt": (
        "llama", LINEAR, fp8_by_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
    "FP8 by row": (
        "qwen3", LINEAR, fp8_by_row,
        COMPRESSED | {"format": "float-quantized"}
        | group(num_bits=8, type="float", strategy="channel"),
    ),
    "INT4 in groups": (
        "qwen3 with experts", r".*\.experts\..*_proj\.weight", int4_in_groups,
        COMPRESSED | {"format": "pack-quantized"}
        | group(num_bits=4, type="int", strategy="group", group_size=16),
    ),
    "INT4 with zero points": (
        "llama", LINEAR, lambda shape: int4_in_groups(shape, 32, asymmetric=True),
        COMPRESSED | {"format": "pack-quantized"}
        | group(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
    ),
    "NVFP4, ModelOpt": (
        "qwen2, tied", LINEAR, nvfp4_of_modelopt,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    ),
    "NVFP4, compressed-tensors": (
        "mixtral", r".*layers\..*(_proj|w\d)\.weight", nvfp4_of_compressed_tensors,
        COMPRESSED | {"format": "nvfp4-pack-quantized"}
        | group(num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "MXFP4": ("gpt_oss", r".*(gate_up|down)_proj", mxfp4, {"quant_method": "mxfp4"}),
}  # fmt: skip
"""Name -> (case of `models`, pattern of weights, maker, quantization_config)."""


def make(name: str, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a model in a format to `directory`/quantized, and its weights to `directory`/dense.

    Args:
        dtype: of the other weights, and of all weights in `dense`.
    """
    case, pattern, maker, config = FORMATS[name]
    model = saved(case, directory / "dense")
    del model
    torch.manual_seed(11)
    file, config_file = "model.safetensors", "config.json"
    dense: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for key, tensor in load_file(directory / "dense" / file).items():
        dense[key] = tensor.to(dtype)
        if re.fullmatch(pattern, key) is None:
            stored[key] = dense[key]
            continue
        parts, weight = maker(tuple(tensor.shape))
        stored |= {key + suffix: part.contiguous() for suffix, part in parts.items()}
        dense[key] = weight.to(dtype).contiguous()
    fields = json.loads((directory / "dense" / config_file).read_text())
    fields["dtype"] = str(dtype).removeprefix("torch.")
    stored |= {"model.layers.0.self_attn.k_proj.k_scale": torch.ones(())}
    for kind, tensors, more in (
        ("dense", dense, {}), ("quantized", stored, {"quantization_config": config}),
    ):  # fmt: skip
        (directory / kind).mkdir(exist_ok=True)
        save_file(tensors, directory / kind / file, {"format": "pt"})
        (directory / kind / config_file).write_text(json.dumps(fields | more))
