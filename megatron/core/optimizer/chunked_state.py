"""Optimizer state of shards in the columns of one store, updated chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.parameter_shard import MainParamShard
from megatron.core.distributed.sharding_arithmetic import BLOCK
from megatron.core.foundation.device import is_host_memory
from megatron.core.kernels import triton_kernels
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request
from megatron.core.offload.state_stores import StateStore
from megatron.core.optimizer.definition import (
    ADAM,
    ADAMW,
    OTHER_UPDATE,
    ElementwiseUpdate,
    Pieces,
)
from megatron.core.optimizer.state_codec import (
    BFloat16Codec,
    Codec,
    Float32Codec,
    join_remainder,
    random_bits,
    split_remainder,
)
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.parameters.rng import derive_seed

MAIN = "fp32_param"
"""Name of the main weight among the state tensors."""

NOISE_SHIFTS = (0, 12, 6)
"""Shifts of an element's hash that give the random bits of its first, second and third state. No
type drops more than 20 bits of fp32, so the first two states share 8 of their 20 bits, which have
different significance in each."""


_ADAM_NUMBERS = ("lr", "eps", "weight_decay")
update_blocks: Callable[..., None] = triton_kernels.deferred("adam", "update_blocks")


@dataclass(frozen=True)
class StateField:
    """One state tensor of every shard: a column of the store."""

    name: str
    codec: Codec
    is_remainder: bool = False
    """The column holds the differences between fp32 main weights and bf16 model weights."""


def storage_kind(field: StateField) -> int:
    """Return the number that identifies the form of a column in Adam's kernel."""
    if field.is_remainder:
        return 4
    if isinstance(field.codec, Float32Codec):
        return 0
    if isinstance(field.codec, BFloat16Codec):
        return 1
    return 2 if getattr(field.codec, "dtype", None) == torch.float16 else 3


@dataclass(frozen=True)
class _Segment:
    """The part of a shard that is in a chunk."""

    item: MainParamShard
    begin: int
    end: int
    """[begin, end) of the shard's elements."""
    offset: int
    """Index in the chunk of the element `begin`."""

    def of_chunk(self, flat: Tensor) -> Tensor:
        """Return the segment of a flat tensor over the chunk."""
        return flat[self.offset : self.offset + self.end - self.begin]

    def of_shard(self, tensor: Tensor) -> Tensor:
        """Return the segment of a tensor of the shard's shape."""
        return tensor.view(-1)[self.begin : self.end]


@dataclass(frozen=True)
class ChunkUpdate:
    """One update of all shards; each chunk applies its part.

    Attributes:
        gradient_of, settings_of: by the id of the main tensor; shards without a gradient are not
            updated.
    """

    rule: ElementwiseUpdate
    gradient_of: Mapping[int, Tensor]
    settings_of: Mapping[int, Mapping[str, Any]]
    step: int
    factor: float


class ChunkedState:
    """State of some shards, laid out one after another in blocks of `BLOCK` elements."""

    def __init__(
        self,
        shards: Sequence[MainParamShard],
        fields: Sequence[StateField],
        make_store: Callable[[list[int], int], StateStore],
    ) -> None:
        """
        Args:
            fields: the optimizer's states, and `MAIN` if model weights are not updated in place.
            make_store: called with the bytes of a block in each column and the number of blocks.
        """
        self.shards, self.fields = list(shards), list(fields)
        self.has_main = any(field.name == MAIN for field in fields)
        self._starts: dict[int, int] = {}
        """id of the main tensor -> first block."""
        num_blocks, positions = 0, []
        for item in shards:
            length = -(-item.main_param.numel() // BLOCK)
            self._starts[id(item.main_param)] = num_blocks
            num_blocks += length
            # Places of elements in the full parameter, which are the same for every sharding, and
            # on every stage that holds a tied weight.
            name = get_param_meta(item.shard.parameter).tied_to or item.shard.name
            first = item.shard.begin // BLOCK + derive_seed("rounding", name) % (1 << 24)
            positions.append(torch.arange(first, first + length, dtype=torch.int32))
        self._places = torch.cat(positions)
        self.store = make_store([field.codec.block_bytes for field in fields], num_blocks)
        self._segments = [self._segments_of(begin, end) for begin, end in self.store.chunks]
        if self.has_main:
            self.reload_main()

    def _segments_of(self, begin: int, end: int) -> list[_Segment]:
        """Return the segments in blocks [begin, end)."""
        found = []
        for item in self.shards:
            first, numel = self._starts[id(item.main_param)], item.main_param.numel()
            start = max(0, (begin - first) * BLOCK)
            stop = min(numel, (end - first) * BLOCK)
            if start < stop:
                offset = (first - begin) * BLOCK + start
                found.append(_Segment(item, start, stop, offset))
        return found

    def update(self, asked: ChunkUpdate) -> None:
        """Update state and weights of all shards."""
        request = Request(self.store.device.type, "float32", frozenset({asked.rule.kind}))
        run = CHUNK_UPDATES.choose(request).kernel.run
        for number, columns in self.store.sweep():
            run(self, number, columns, asked)

    def update_decoded(self, number: int, columns: Sequence[Tensor], asked: ChunkUpdate) -> None:
        """Update one chunk: decode state, update fp32 tensors, encode them."""
        begin, end = self.store.chunks[number]
        works = self._decode(number, columns)
        by_group: dict[int, list[_Segment]] = {}
        for segment in self._segments[number]:
            if id(segment.item.main_param) in asked.gradient_of:
                group = asked.settings_of[id(segment.item.main_param)]
                by_group.setdefault(id(group), []).append(segment)
        for segments in by_group.values():
            self._update_segments(segments, works, asked)
        noise: Tensor | None = None
        for field_index, (field, column) in enumerate(zip(self.fields, columns, strict=True)):
            if field.is_remainder:
                self._write_remainder(number, works[field.name], column)
            elif not field.codec.is_exact:
                if noise is None:
                    blocks = self._places[begin:end].to(self.store.device).unsqueeze(1)
                    within = torch.arange(BLOCK, dtype=torch.int32, device=self.store.device)
                    noise = random_bits(blocks * BLOCK + within, asked.step)
                field.codec.encode(works[field.name], column, noise >> NOISE_SHIFTS[field_index])
        if self.has_main:
            self._publish(number, works[MAIN])

    def update_stored(self, number: int, columns: Sequence[Tensor], asked: ChunkUpdate) -> None:
        """Update one chunk by Adam on the stored form of state, one launch for each segment."""
        begin, _ = self.store.chunks[number]
        column_of = {f.name: (column, f) for f, column in zip(self.fields, columns, strict=True)}
        used = [column_of.get(name) for name in ("exp_avg", "exp_avg_sq", MAIN)]
        kinds = tuple(0 if each is None else storage_kind(each[1]) for each in used)
        for segment in self._segments[number]:
            key, item = id(segment.item.main_param), segment.item
            if key not in asked.gradient_of:
                continue
            block, settings = segment.offset // BLOCK, asked.settings_of[key]
            weight = item.shard.values if self.has_main else item.main_param
            beta1, beta2 = settings["betas"]
            update_blocks(
                segment.of_shard(asked.gradient_of[key]),
                segment.of_shard(weight.detach()),
                tuple(None if each is None else each[0][block:] for each in used),
                kinds,
                int(self._places[begin + block]),  # the key of the random bits
                asked.step,
                asked.factor,
                {"beta1": beta1, "beta2": beta2, **{n: settings[n] for n in _ADAM_NUMBERS}},
                asked.rule.kind == ADAMW,
            )

    def _update_segments(
        self, segments: Sequence[_Segment], works: Mapping[str, Tensor], asked: ChunkUpdate
    ) -> None:
        device = self.store.device
        weights = [
            s.of_chunk(works[MAIN].view(-1))
            if self.has_main
            else s.of_shard(s.item.main_param.detach())
            for s in segments
        ]
        gradients = [
            s.of_shard(asked.gradient_of[id(s.item.main_param)]).to(device, torch.float32)
            for s in segments
        ]
        states = {
            name: [s.of_chunk(works[name].view(-1)) for s in segments]
            for name in asked.rule.state_names
        }
        settings = asked.settings_of[id(segments[0].item.main_param)]
        asked.rule.update(Pieces(weights, gradients, states, settings, asked.step, asked.factor))

    def _decode(self, number: int, columns: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the fp32 values [blocks, BLOCK] of a chunk by name."""
        return {
            field.name: (
                self._read_remainder(number, column)
                if field.is_remainder
                else field.codec.decode(column)
            )
            for field, column in zip(self.fields, columns, strict=True)
        }

    # Main weights ---------------------------------------------------------------------------

    def _publish(self, number: int, main: Tensor) -> None:
        """Write the model's weights from the main weights of a chunk."""
        if any(field.is_remainder for field in self.fields):
            return
        for segment in self._segments[number]:
            shard, new = segment.item.shard, segment.of_chunk(main.view(-1))
            values = segment.of_shard(shard.values.detach())
            if shard.fetch is not None and is_host_memory(self.store.device):
                shard.fetch.send(values, new)
            else:
                values.copy_(new)

    def _write_remainder(self, number: int, main: Tensor, column: Tensor) -> None:
        low = column.view(torch.int16).view(-1)
        for segment in self._segments[number]:
            upper, lower = split_remainder(segment.of_chunk(main.view(-1)))
            segment.of_shard(segment.item.shard.values.detach()).copy_(upper)
            segment.of_chunk(low).copy_(lower)

    def _read_remainder(self, number: int, column: Tensor) -> Tensor:
        low = column.view(torch.int16).view(-1)
        main = torch.zeros(low.numel(), dtype=torch.float32, device=low.device)
        for segment in self._segments[number]:
            values = segment.of_shard(segment.item.shard.values.detach()).to(low.device)
            segment.of_chunk(main).copy_(join_remainder(values, segment.of_chunk(low)))
        return main.view(-1, BLOCK)

    def reload_main(self) -> None:
        """Copy the main weights from the model."""
        field_index = [field.name for field in self.fields].index(MAIN)
        field = self.fields[field_index]
        for number, columns in self.store.sweep():
            if field.is_remainder:
                columns[field_index].zero_()
                continue
            begin, end = self.store.chunks[number]
            main = torch.zeros((end - begin) * BLOCK, device=self.store.device)
            for segment in self._segments[number]:
                segment.of_chunk(main).copy_(segment.of_shard(segment.item.shard.values.detach()))
            field.codec.encode(main.view(-1, BLOCK), columns[field_index], None)

    # State ----------------------------------------------------------------------------------

    def states(self) -> Iterator[tuple[MainParamShard, dict[str, Tensor]]]:
        """Yield each shard with its state tensors, fp32, of its shape.

        State that is stored as fp32 is returned as views (of a mapped file, if it is in a file);
        other state is decoded.
        """
        for item in self.shards:
            yield item, {field.name: self._state(item, i) for i, field in enumerate(self.fields)}

    def state_of(self, item: MainParamShard, name: str) -> Tensor:
        """Return one state tensor of a shard, fp32, of its shape."""
        return self._state(item, [field.name for field in self.fields].index(name))

    def set_state(self, item: MainParamShard, values: Mapping[str, Tensor]) -> None:
        """Store state tensors of a shard, by name, and publish its main weight."""
        for field_index, field in enumerate(self.fields):
            if field.name not in values:
                continue
            value = values[field.name]
            if field.is_remainder:
                upper, lower = split_remainder(value.reshape(-1))
                item.shard.values.detach().view(-1).copy_(upper)
                self._rows(item, field_index).view(torch.int16).view(-1)[: lower.numel()].copy_(
                    lower
                )
                continue
            rows = self._rows(item, field_index)
            padded = torch.zeros(rows.shape[0] * BLOCK, device=rows.device)
            padded[: value.numel()].copy_(value.reshape(-1))
            field.codec.encode(padded.view(-1, BLOCK), rows, None)
            if field.name == MAIN:
                item.shard.values.detach().copy_(value.view_as(item.shard.values))

    def _rows(self, item: MainParamShard, field_index: int) -> Tensor:
        first = self._starts[id(item.main_param)]
        return self.store.column(field_index)[first : first + -(-item.main_param.numel() // BLOCK)]

    def _state(self, item: MainParamShard, field_index: int) -> Tensor:
        field, rows = self.fields[field_index], self._rows(item, field_index)
        if field.is_remainder:
            values = item.shard.values.detach().view(-1).to(rows.device)
            low = rows.view(torch.int16).view(-1)[: values.numel()]
            return join_remainder(values, low).view(item.main_param.shape)
        return (
            field.codec.decode(rows).view(-1)[: item.main_param.numel()].view(item.main_param.shape)
        )


_DECODED = Kernel("decoded", ChunkedState.update_decoded, frozenset({ADAM, ADAMW, OTHER_UPDATE}))

CHUNK_UPDATES: KernelTable[Callable[..., None]] = KernelTable(
    "update of state in low precision",
    {
        "cpu": (_DECODED,),
        OTHER_DEVICES: (
            Kernel(
                "triton",
                ChunkedState.update_stored,
                frozenset({ADAM, ADAMW}),
                missing=triton_kernels.missing,
                library=True,
            ),
            _DECODED,
        ),
    },
)
"""Methods that update one chunk."""
