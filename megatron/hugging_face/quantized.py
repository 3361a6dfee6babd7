"""Read weights in 8 or 4 bits, and write block FP8.

The files hold codes and scales. A box of a weight is dequantised when it is read: only the codes
and scales of this box are read, in pieces of at most `_PIECE` elements. The tensors beside
`X.weight`, or in its place, determine its format:

- `weight_scale_inv` or `scale`: FP8, or E2M1 in int8, in blocks. DeepSeek-AI, "DeepSeek-V3
  Technical Report", section 3.3, arXiv 2412.19437.
- `weight_scale`: FP8 or int8; one scale for each tensor, row or block.
- `weight_scale`, `weight_scale_2`: NVFP4 of ModelOpt. NVIDIA, "Pretraining Large Language Models
  with NVFP4", section 2, arXiv 2509.25149.
- `weight_packed`, `weight_scale`, `weight_global_scale`: NVFP4 of compressed-tensors.
- `weight_packed`, `weight_scale`, `weight_shape`, `weight_zero_point`: integers of 1 to 8 bits.
- `X_blocks`, `X_scales`, or `weight_packed` with bytes as scales: MXFP4. "OCP Microscaling Formats
  (MX) Specification" 1.0, sections 5.3 and 5.4.

The product of a code and its scale is computed in fp32 and rounded once, to the dtype of the
parameter. compressed-tensors first rounds it to the dtype of the scale, or to bf16 if the scale has
8 bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.dist_checkpointing.interop.stored_view import (
    StoredBytes,
    StoredView,
    ViewReader,
    contiguous_stride,
)
from megatron.core.foundation.errors import CheckpointError, MegatronError, shown

METHODS = ("fp8", "fbgemm_fp8", "mxfp4", "mxfp8", "compressed-tensors", "modelopt")
_FORMATS = (
    "float-quantized", "naive-quantized", "int-quantized", "pack-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
_ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION",
)  # fmt: skip
FP8_BLOCK = 128
_PIECE = 1 << 22
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat([_E2M1, -_E2M1])
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OF_ACTIVATIONS = re.compile(
    r".*\.((input|output|activation)_(scale|global_scale|zero_point)|qscale_act"
    r"|[qkv]_(scale|zero_point))"
)
"""Scales of activations and of the cache of keys and values."""


def stated_quantization(fields: Mapping[str, object]) -> Any:
    """Return the description of the quantisation in a `config.json`, or None."""
    text = fields.get("text_config")
    for place in (fields, text if isinstance(text, dict) else {}):
        for name in ("quantization_config", "compression_config"):
            if place.get(name) is not None:
                return place[name]
    return None


def unsupported(config: object) -> str | None:
    """Return the rule that a `quantization_config` breaks, or None."""
    if not isinstance(config, dict):
        return "a quantization_config is an object"
    method = _method(config)
    if method not in METHODS:
        return f"known values of quant_method are {', '.join(METHODS)}"
    if method == "modelopt" and config.get("quant_algo", "FP8") not in _ALGORITHMS:
        return f"known values of quant_algo are {', '.join(_ALGORITHMS)}"
    if method != "compressed-tensors":
        return None
    groups, sparsity = config.get("config_groups") or {}, config.get("sparsity_config") or {}
    objects = [groups, sparsity, *(groups.values() if isinstance(groups, dict) else ())]
    if not all(isinstance(one, dict) for one in objects):
        return "config_groups, its groups and sparsity_config are objects"
    formats = [config.get("format"), *(group.get("format") for group in groups.values())]
    if any(name is not None and name not in _FORMATS for name in formats):
        return f"known formats of compressed-tensors are {', '.join(_FORMATS)}"
    if config.get("quantization_status", "compressed") != "compressed":
        return "only quantization_status = 'compressed' is supported"
    if sparsity.get("format", "dense") != "dense" or config.get("transform_config"):
        return "a sparsity_config or transform_config of compressed-tensors is not supported"
    return None


def _method(config: Mapping[str, Any]) -> str:
    name = str(config.get("quant_method") or ("modelopt" if "quant_algo" in config else ""))
    return "modelopt" if name in ("modelopt_fp4", "modelopt_mixed") else name


def _weights(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the `weights` entry of each group of compressed-tensors."""
    stated = [group.get("weights") for group in (config.get("config_groups") or {}).values()]
    return [weights for weights in stated if isinstance(weights, dict)]


@dataclass(frozen=True, kw_only=True)
class QuantizedView(StoredView):
    """A weight [..., rows, columns] of codes and scales; strides and offset count its elements."""

    full: tuple[int, ...]
    """Shape of the whole weight."""
    codes: StoredView
    """[..., rows, columns / codes in an element], contiguous."""
    bits: int | None
    """Of a code, if an element has several: E2M1 in bytes, integers in int32."""
    scales: StoredView
    """[..., row blocks, column blocks]."""
    block: tuple[int, int]
    """Number of rows and columns with one scale."""
    common: StoredView | None
    """A scale of the whole weight, [] or [1]."""
    divides: bool
    """Scales are divided by `common`, not multiplied."""
    zero_points: StoredView | None
    """Like the scales, or packed along rows: [rows / codes in an element, column blocks]."""
    rounded: torch.dtype | None
    """Dtype of the product; None is fp32."""

    def fill(self, into: Tensor, reader: ViewReader) -> None:
        """Dequantise this view into a tensor of its shape, any dtype and device."""
        if into.numel() > _PIECE:
            spans = [(n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)]
            axis = spans.index(max(spans))
            half = self.shape[axis] // 2
            for begin, length in ((0, half), (half, self.shape[axis] - half)):
                corner = tuple(begin if d == axis else 0 for d in range(len(spans)))
                size = tuple(length if d == axis else n for d, n in enumerate(self.shape))
                piece = self.narrow((corner, size))
                piece.fill(into.narrow(axis, begin, length), reader)
            return
        # The view is a grid of elements inside a box of the whole weight.
        steps, rest = contiguous_stride(self.full), self.offset
        starts: list[int] = []
        for step in steps:
            index, rest = divmod(rest, step)
            starts.append(index)
        sizes, axes = [1] * len(steps), []
        for n, stride in zip(self.shape, self.stride, strict=True):
            axis, step = 0, 0
            if n > 1:
                axis = next(i for i, s in enumerate(steps) if s <= stride and self.full[i] > 1)
                step = stride // steps[axis]
                sizes[axis] += (n - 1) * step
            axes.append((axis, step))
        values = self._values(reader, starts, sizes)
        strides = [values.stride(axis) * step for axis, step in axes]
        into.copy_(values.as_strided(self.shape, strides))

    def _values(self, reader: ViewReader, corner: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of the whole weight, [...] contiguous."""

        def read(view: StoredView, rows: int, columns: int) -> Tensor:
            """Read a box of elements; an element holds `rows` x `columns` weights."""
            units = [*[1] * (len(corner) - 2), rows, columns]
            begin = tuple(b // u for b, u in zip(corner, units, strict=True))
            end = [-(-(b + n) // u) for b, n, u in zip(corner, sizes, units, strict=True)]
            counts = tuple(e - b for b, e in zip(begin, end, strict=True))
            return reader.read_full(view.narrow((begin, counts)))

        def spread(found: Tensor) -> Tensor:
            """Repeat the scales of blocks for their elements."""
            for dim, unit in ((-1, self.block[1]), (-2, self.block[0])):
                if unit > 1 and found.shape[dim] > 1:
                    repeated = found.unsqueeze(dim)
                    shape = list(repeated.shape)
                    shape[dim] = unit
                    found = repeated.expand(shape).flatten(dim - 1, dim)
                    found = found.narrow(dim, corner[dim] % unit, sizes[dim])
            return found

        each = 1 if self.bits is None else self.codes.dtype.itemsize * 8 // self.bits
        codes = read(self.codes, 1, each)
        values = self._decoded(codes).narrow(-1, corner[-1] % each, sizes[-1])
        if self.zero_points is not None and self.zero_points.shape == self.scales.shape:
            values = values - spread(read(self.zero_points, *self.block).float())
        elif self.zero_points is not None:
            packed = read(self.zero_points, each, self.block[1]).transpose(-1, -2)
            zeros = self._decoded(packed).narrow(-1, corner[-2] % each, sizes[-2])
            values = values - spread(zeros.transpose(-1, -2))
        scales = read(self.scales, *self.block)
        scales = _power_of_two(scales) if scales.dtype == torch.uint8 else scales.float()
        if self.common is not None:
            common = reader.read_full(self.common).float().reshape(())
            scales = scales / common if self.divides else scales * common
        product = values * spread(scales)
        return product if self.rounded is None else product.to(self.rounded)

    def _decoded(self, codes: Tensor) -> Tensor:
        """Return the numbers of codes, [..., n] -> [..., n times the codes in an element], fp32.

        A table of the numbers of each byte is several times faster than casts of FP8 and shifts.
        """
        table = torch.arange(256, dtype=torch.uint8)
        if self.bits is None:
            table = table.view(codes.dtype).float()[:, None]
        else:
            table = table[:, None] >> torch.arange(0, 8, self.bits) & ((1 << self.bits) - 1)
            table = _E2M1[table] if codes.dtype == torch.uint8 else table - (1 << self.bits - 1)
        positions = codes.clone(memory_format=torch.contiguous_format).view(torch.uint8).flatten()
        return table.float().index_select(0, positions.int()).view(*codes.shape[:-1], -1)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^(exponents - 127), the numbers of E8M0 bytes [...], in fp32."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)


def dequantized(
    stored: Mapping[str, StoredView], fields: Mapping[str, object], path: Path
) -> dict[str, StoredView]:
    """Return the tensors of a model under their usual names: weights in few bits are one tensor.

    Args:
        stored: name -> tensor in the files.
        fields: of `config.json`.
        path: of the model, for messages.
    Raises:
        CheckpointError: codes and scales do not belong together.
    """
    config = stated_quantization(fields)
    if config is None:
        odd = [name for name, view in stored.items() if view.dtype in _FP8]
        if odd:
            raise _refused(path, f"{odd[0]!r} is in FP8, and config.json has no scales for it")
        return dict(stored)
    reading, left = _Reading(path, config, _dtype(fields)), dict(stored)
    for name in stored:
        usual = re.sub(r"\.(scale|qscale_weight)$", ".weight_scale_inv", name)
        weight = stored.get(usual.removesuffix("_scale_inv"))
        if usual != name and weight is not None and weight.dtype.itemsize == 1:
            left[usual] = left.pop(name)
    found: dict[str, StoredView] = {}
    with ViewReader() as reader:
        for name in list(left):
            weight_name = name.removesuffix("_packed").removesuffix("_blocks")
            suffixes = [s for s in ("_scale_inv", "_scale", "_scales") if weight_name + s in left]
            if name in left and left[name].dtype in _CODES and suffixes:
                found[weight_name] = reading.weight(name, weight_name, suffixes[0], left, reader)
    for name in [name for name in left if _OF_ACTIVATIONS.fullmatch(name)]:
        del left[name]
    odd = [name for name, view in left.items() if view.dtype in _FP8]
    if odd:
        raise _refused(path, f"{odd[0]!r} is in FP8, and no tensor holds its scales")
    return left | found


_CODES = (*_FP8, torch.int8, torch.uint8, torch.int32)


def _dtype(fields: Mapping[str, object]) -> torch.dtype:
    """Return the dtype of the model: of its weights that have all bits."""
    text = fields.get("text_config")
    for place in (fields, text if isinstance(text, dict) else {}):
        name = str(place.get("dtype") or place.get("torch_dtype"))
        if name in ("float32", "float16", "bfloat16"):
            dtype: torch.dtype = getattr(torch, name)
            return dtype
    return torch.bfloat16


@dataclass(frozen=True)
class _Reading:
    """A quantised model."""

    path: Path
    config: Mapping[str, Any]
    dtype: torch.dtype

    def weight(
        self, name: str, weight: str, suffix: str, left: dict[str, StoredView], reader: ViewReader
    ) -> QuantizedView:
        """Return a weight, and remove its tensors from `left`.

        Args:
            name, weight: of the codes; of the weight.
            suffix: of the scales.
        """
        codes, scales = left.pop(name), left.pop(weight + suffix)
        common = left.pop(weight + "_scale_2", None)
        divides = common is None
        common = left.pop(weight + "_global_scale", None) if common is None else common
        stated, zeros = left.pop(weight + "_shape", None), left.pop(weight + "_zero_point", None)
        bits, is_blocks = None, name.endswith("_blocks")
        if len(codes.shape) < 2 + is_blocks:
            raise _refused(self.path, f"{name!r} has the shape {codes.shape}")
        if is_blocks:
            codes = codes.reshaped((*codes.shape[:-2], codes.shape[-2] * codes.shape[-1]))
        if codes.dtype == torch.int8 and suffix == "_scale_inv":
            codes = replace(codes, dtype=torch.uint8)  # Transformers' name for E2M1 in pairs
        shape = codes.shape
        if codes.dtype == torch.uint8:
            bits, shape = 4, (*shape[:-1], shape[-1] * 2)
        elif codes.dtype == torch.int32:
            if stated is None or stated.shape != (len(shape),):
                raise _refused(self.path, f"{weight + '_shape'!r} must hold the shape of a weight")
            shape = tuple(int(n) for n in reader.read_full(stated))
            known = [weights.get("num_bits") for weights in _weights(self.config)]
            fitting = [b for b in (4, 8, 2, 1) if b in known and _packs(shape, b, codes.shape)]
            if len(fitting) != 1:
                raise _refused(
                    self.path,
                    f"{name!r} of shape {codes.shape} does not hold {shape} integers of"
                    f" {shown(known)} bits",
                )
            bits = fitting[0]
        grid = (*scales.shape, *[1] * (len(shape) - len(scales.shape)))
        block = tuple(
            _block(n, g, sizes)
            for n, g, sizes in zip(shape[-2:], grid[-2:], self._block_sizes(), strict=True)
        )
        is_one = set(grid) == {1}
        if len(grid) != len(shape) or 0 in block or not (is_one or grid[:-2] == shape[:-2]):
            raise _refused(
                self.path,
                f"{weight + suffix!r} of shape {scales.shape} does not fit a weight of {shape}",
            )
        is_e8m0 = scales.dtype in (torch.uint8, torch.float8_e8m0fnu) or suffix == "_scale_inv"
        if codes.dtype == torch.uint8 and not is_e8m0 and common is None:
            raise _refused(self.path, f"there is no {weight + '_scale_2'!r} of an NVFP4 weight")
        if common is not None and math.prod(common.shape) != 1:
            raise _refused(self.path, f"the scale of {weight!r} has the shape {common.shape}")
        scales = scales.reshaped(grid)
        if is_one and len(shape) > 2:
            scales = replace(scales, shape=(*shape[:-2], 1, 1), stride=(0,) * len(shape))
        if zeros is not None:
            packed = (-(-shape[0] * (bits or 8) // 32), *grid[1:])
            if zeros.shape not in (scales.shape, grid, packed):
                raise _refused(self.path, f"{weight + '_zero_point'!r} has the shape {zeros.shape}")
            zeros = zeros if zeros.shape == packed else zeros.reshaped(grid)
        rounded = None
        if _method(self.config) == "compressed-tensors":
            rounded = scales.dtype if scales.dtype.itemsize > 1 else torch.bfloat16
        size = math.prod(shape) * self.dtype.itemsize
        storage = StoredBytes(codes.storage.path, codes.storage.begin, size)
        view = QuantizedView(
            storage, self.dtype, shape, contiguous_stride(shape), full=shape, codes=codes,
            bits=bits, scales=scales, block=(block[0], block[1]), common=common, divides=divides,
            zero_points=zeros, rounded=rounded,
        )  # fmt: skip
        if is_blocks:  # the model has [e, in, out], the files have [e, out, in]
            order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
            view = replace(
                view,
                shape=tuple(view.shape[i] for i in order),
                stride=tuple(view.stride[i] for i in order),
            )
        return view

    def _block_sizes(self) -> tuple[list[int], list[int]]:
        """Return the heights and the widths of blocks that the config states."""
        stated = _weights(self.config)
        blocks = [self.config.get("weight_block_size"), *(w.get("block_structure") for w in stated)]
        both = [block for block in blocks if isinstance(block, list) and len(block) == 2]
        heights = [block[0] for block in both]
        widths = [*(block[1] for block in both), *(w.get("group_size") for w in stated)]
        return [n for n in heights if type(n) is int], [n for n in widths if type(n) is int]


def _packs(shape: Sequence[int], bits: int, packed: Sequence[int]) -> bool:
    return tuple(packed) == (*shape[:-1], -(-shape[-1] * bits // 32))


def _block(count: int, blocks: int, sizes: Iterable[int]) -> int:
    """Return how many of `count` rows or columns share a scale; 0 if no size fits."""
    if blocks == 1:
        return count
    fitting = [size for size in sizes if size > 0 and -(-count // size) == blocks]
    return fitting[0] if fitting else count // blocks if blocks and count % blocks == 0 else 0


def _refused(path: Path, what: str) -> MegatronError:
    return CheckpointError(
        f"{path}: {what}.",
        rule="a directory holds the scales of each weight in 8 or 4 bits, by quantization_config",
        flags=["--load-hf"],
        fix="download the model again, or convert it to bf16 with Transformers",
    )


def is_quantizable(megatron_name: str, shape: Sequence[int]) -> bool:
    """Return whether block FP8 stores a Hugging Face weight.

    These are the weights of linear layers in transformer layers. Transformers computes the size of
    blocks from the number of scales, so a dimension is one short block or consists of whole blocks.
    """
    is_linear = re.match(r"decoder\.layers\..*\.linear_(?!weights)\w+\.weight$", megatron_name)
    is_whole = all(n < FP8_BLOCK or n % FP8_BLOCK == 0 for n in shape)
    return is_linear is not None and len(shape) == 2 and is_whole


def num_blocks(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of block FP8."""
    return tuple(-(-n // FP8_BLOCK) for n in shape)


def to_block_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight [r, c] to E4M3; return it and its scales [r / 128, c / 128] in fp32."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    rows, columns = num_blocks(weight.shape)
    missing = (rows * FP8_BLOCK - weight.shape[0], columns * FP8_BLOCK - weight.shape[1])
    blocks = F.pad(weight.float(), (0, missing[1], 0, missing[0]))
    blocks = blocks.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    amax = blocks.abs().amax((1, 3))
    factors = torch.where(amax > 0, largest / amax, 1.0)
    codes = (blocks * factors[:, None, :, None]).clamp_(-largest, largest)
    codes = codes.flatten(2).flatten(0, 1)[: weight.shape[0], : weight.shape[1]]
    return codes.to(torch.float8_e4m3fn).contiguous(), 1.0 / factors
