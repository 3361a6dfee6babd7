"""Any layout saves, any layout loads, exactly."""

import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.flat_ranges import boxes_of_shard, coverage_problem
from megatron.core.dist_checkpointing.parameter_shards import sharded_tensor_for_parameter
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.foundation.errors import CheckpointError
from megatron.core.parameters.param_meta import ParamMeta, shard_of
from tests.unit.dist_checkpointing.ranks import must_succeed, run_ranks
from tests.unit.dist_checkpointing.states import Layout, declare, global_state, values
from tools.checkpoint.state_digest import checkpoint_digest

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(pp=2, dp=2),
    Layout(dp=3),
    Layout(dp=2, is_zero=True),
    Layout(tp=4),
    Layout(tp=2, dp=2, is_zero=True),
    Layout(tp=2, pp=2, dp=2),
    Layout(pp=4),
]


def save(state_of_rank, size: int, directory: Path, **options) -> None:
    must_succeed(
        run_ranks(
            size,
            lambda peers: dist_checkpointing.save(
                state_of_rank(peers.rank), directory, process_group=peers, **options
            ),
        )
    )


def load(state_of_rank, size: int, directory: Path) -> list[dict]:
    return must_succeed(
        run_ranks(
            size,
            lambda peers: dist_checkpointing.load(
                state_of_rank(peers.rank), directory, process_group=peers
            ),
        )
    )


@pytest.mark.parametrize("written", LAYOUTS, ids=str)
def test_every_layout_loads_what_any_layout_saved(tmp_path: Path, written: Layout) -> None:
    full = global_state(seed=1)
    save(lambda r: declare(full, written, r), written.size, tmp_path / "iter_0000001")
    for wanted in LAYOUTS:
        templates = [declare(None, wanted, rank) for rank in range(wanted.size)]
        results = load(lambda r, t=templates: t[r], wanted.size, tmp_path / "iter_0000001")
        for rank, result in enumerate(results):
            expected = values(declare(full, wanted, rank))
            in_place = values(templates[rank])
            assert result.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(result[name], tensor), (wanted, rank, name)
                assert torch.equal(in_place[name], tensor), (wanted, rank, name)


def test_the_digest_is_the_same_in_every_layout_and_notices_one_bit(tmp_path: Path) -> None:
    full = global_state(seed=2)
    digests = set()
    for i, layout in enumerate(LAYOUTS):
        path = tmp_path / f"iter_{i:07d}"
        save(lambda r, n=layout: declare(full, n, r), layout.size, path)
        digests.add(checkpoint_digest(path))
        assert not verify_checkpoint(path).problems
    assert len(digests) == 1
    full["embedding.weight"].view(torch.int32)[3, 3] ^= 1
    save(lambda r: declare(full, Layout(), r), 1, tmp_path / "iter_0000099")
    assert checkpoint_digest(tmp_path / "iter_0000099") not in digests


def test_each_byte_is_written_once_and_replicas_share_the_work(tmp_path: Path) -> None:
    full = global_state(seed=3)
    layout = Layout(dp=4)
    save(lambda r: declare(full, layout, r), layout.size, tmp_path / "spread")
    save(
        lambda r: declare(full, layout, r),
        layout.size,
        tmp_path / "main",
        spread_over_replicas=False,
    )
    tensor_bytes = sum(t.numel() * t.element_size() for t in full.values())
    files = [p.read_bytes() for p in sorted((tmp_path / "spread").glob("__*.safetensors"))]
    sizes = [len(data) - 8 - int.from_bytes(data[:8], "little") for data in files]
    assert len(sizes) == 4
    assert sum(sizes) == tensor_bytes
    assert max(sizes) < 1.4 * min(sizes)
    assert [p.name for p in (tmp_path / "main").glob("__*.safetensors")] == ["__0_0.safetensors"]


def random_boxes(shape: tuple[int, ...], rng: random.Random) -> list[tuple]:
    """Cut a box at random into boxes."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(rng.randint(0, 6)):
        offset, size = boxes.pop(rng.randrange(len(boxes)))
        axis = rng.randrange(len(shape))
        cut = rng.randint(0, size[axis])
        for begin, length in ((0, cut), (cut, size[axis] - cut)):
            boxes.append(
                (
                    tuple(o + begin if d == axis else o for d, o in enumerate(offset)),
                    tuple(length if d == axis else n for d, n in enumerate(size)),
                )
            )
    return [box for box in boxes if all(box[1])]


def shards_of(key: str, full: torch.Tensor, boxes: list[tuple], rng: random.Random) -> list:
    """Declare boxes of a tensor, each cut again into flat ranges."""
    shards = []
    for offset, size in boxes:
        box = full[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].clone()
        cut = rng.randint(0, box.numel())
        for window in (slice(0, cut), slice(cut, box.numel())):
            if window.start == window.stop:
                continue
            is_flat = rng.random() < 0.5 or window.stop - window.start < box.numel()
            shards.append(
                ShardedTensor(
                    key=key,
                    data=box.reshape(-1)[window].clone() if is_flat else box,
                    dtype=full.dtype,
                    local_shape=size,
                    global_shape=tuple(full.shape),
                    global_offset=offset,
                    flattened_range=window if is_flat else None,
                )
            )
    return shards


@pytest.mark.parametrize("seed", range(12))
def test_random_boxes_and_flat_ranges_round_trip(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.uint8]
    tensors = {}
    for i in range(4):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))
        tensors[f"t{i}"] = torch.randint(0, 2, shape).to(dtypes[rng.randrange(len(dtypes))])
    writers, readers = rng.randint(1, 3), rng.randint(1, 3)
    per_writer: list[list] = [[] for _ in range(writers)]
    per_reader: list[list] = [[] for _ in range(readers)]
    for key, full in tensors.items():
        for shard in shards_of(key, full, random_boxes(tuple(full.shape), rng), rng):
            per_writer[rng.randrange(writers)].append(shard)
        for shard in shards_of(key, full, random_boxes(tuple(full.shape), rng), rng):
            per_reader[rng.randrange(readers)].append(shard)
    expected = [[s.data.clone() for s in shards] for shards in per_reader]
    for shards in per_reader:
        for shard in shards:
            shard.data.zero_()
    save(lambda r: {"x": per_writer[r]}, writers, tmp_path / "c")
    load(lambda r: {"x": per_reader[r]}, readers, tmp_path / "c")
    for shards, wanted in zip(per_reader, expected, strict=True):
        for shard, tensor in zip(shards, wanted, strict=True):
            assert torch.equal(shard.data, tensor)
    whole = dist_checkpointing.load_plain_tensors(tmp_path / "c")
    assert all(torch.equal(whole[key], full) for key, full in tensors.items())


@st.composite
def split_tensors(draw):
    """A tensor, how it is split, and where each rank's flattened shard is cut."""
    dim, num_dims = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    dim, size, stride = dim % num_dims, draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(num_dims)]
    shape[dim] *= stride
    count = math.prod(shape)
    cuts = [sorted({0, count, *draw(st.sets(st.integers(0, count)))}) for _ in range(size)]
    return tuple(shape), dim, size, stride, cuts


@given(split_tensors())
def test_the_boxes_of_all_shards_make_up_the_tensor_however_they_are_cut(case) -> None:
    shape, dim, size, stride, cuts = case
    full_shape = tuple(n * size if d == dim else n for d, n in enumerate(shape))
    held = [
        (offset, box[1])
        for rank in range(size)
        for flat_range in pairwise(cuts[rank])
        for box, offset in boxes_of_shard(
            shape, dim, rank=rank, size=size, stride=stride, flat_range=flat_range
        )
    ]
    assert coverage_problem(full_shape, held) is None


@given(split_tensors())
def test_declared_views_hold_the_elements_of_their_boxes(case) -> None:
    shape, dim, size, stride, cuts = case
    full_shape = tuple(n * size if d == dim else n for d, n in enumerate(shape))
    full = torch.arange(math.prod(full_shape)).view(full_shape)
    meta = ParamMeta(split_dim=dim, split_axis="tp", stride=stride)
    for rank in range(size):
        shard = shard_of(full, meta, rank, size).contiguous()
        for bounds in [None, *(slice(*pair) for pair in pairwise(cuts[rank]))]:
            declared = sharded_tensor_for_parameter(
                "w",
                shard if bounds is None else shard.flatten()[bounds],
                meta,
                tp_rank=rank,
                tp_size=size,
                dp_replica=0,
                flattened_range=bounds,
                local_shape=shape,
            )
            parts = declared.build() if isinstance(declared, ShardedTensorFactory) else [declared]
            for (offset, lengths), view in (piece for part in parts for piece in part.pieces()):
                box = tuple(slice(o, o + n) for o, n in zip(offset, lengths, strict=True))
                assert torch.equal(view, full[box])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"global_offset": (0,)}, "2 global axes, 1 offsets"),
        ({"global_offset": (3, 0)}, r"box \[3:5, 0:3\] outside of global shape \(4, 3\)"),
        ({"dtype": torch.bfloat16}, "dtype torch.bfloat16 and data of torch.float32"),
        ({"local_shape": (1, 3)}, r"data of shape \(2, 3\) where \(1, 3\) is declared"),
        ({"flattened_range": slice(0, 6, 2)}, "step of 2"),
    ],
)
def test_a_declaration_that_contradicts_itself_says_what_is_wrong(change, found) -> None:
    fields = {
        "key": "w", "data": torch.zeros(2, 3), "dtype": torch.float32, "local_shape": (2, 3),
        "global_shape": (4, 3), "global_offset": (2, 0),
    }  # fmt: skip
    ShardedTensor(**fields)
    with pytest.raises(CheckpointError, match=found):
        ShardedTensor(**fields | change)


def test_offsets_that_fit_no_grid_are_refused() -> None:
    with pytest.raises(CheckpointError, match="does not fit a tensor of 1 axes"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2), (1, 0, 2))
    with pytest.raises(CheckpointError, match=r"offset \(2,\) in a grid of shape \(2,\)"):
        ShardedObject("o", 1, global_shape=(2,), global_offset=(2,))


def test_a_vocabulary_padded_for_another_layout_keeps_its_own_padding(tmp_path: Path) -> None:
    meta = ParamMeta(split_dim=0, split_axis="tp")

    def shard(full: torch.Tensor, rank: int, size: int):
        return sharded_tensor_for_parameter(
            "embedding",
            shard_of(full, meta, rank, size).clone(),
            meta,
            tp_rank=rank,
            tp_size=size,
            dp_replica=0,
            allow_shape_mismatch=True,
        )

    vocabulary = torch.randn(10, 4)
    padded_to_12 = torch.cat([vocabulary, torch.full((2, 4), 7.0)])
    save(lambda r: {"e": shard(padded_to_12, r, 3)}, 3, tmp_path / "c")
    templates = [shard(torch.full((16, 4), -1.0), rank, 4) for rank in range(4)]
    load(lambda r: {"e": templates[r]}, 4, tmp_path / "c")
    whole = torch.cat([t.data for t in templates])
    assert torch.equal(whole[:12], padded_to_12)
    assert (whole[12:] == -1).all()
    small = shard(torch.zeros(10, 4), 0, 1)
    load(lambda r: {"e": small}, 1, tmp_path / "c")
    assert torch.equal(small.data, vocabulary)


def test_reading_a_slice_touches_only_its_blocks(tmp_path: Path, monkeypatch) -> None:
    from megatron.core.dist_checkpointing import shard_file, shard_reader

    for module in (shard_file, shard_reader):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr("megatron.core.dist_checkpointing.manifest.BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(shard_reader, "SLAB_BYTES", 1 << 14)
    full = torch.randn(512, 256)  # 512 KiB, rows of 1 KiB
    save(lambda r: {"w": ShardedTensor.from_rank_offsets("w", full)}, 1, tmp_path / "c")
    for rank, axis in ((3, 0), (1, 1)):
        piece = full.chunk(8, axis)[rank]
        into = torch.zeros_like(piece).contiguous()
        template = {"w": ShardedTensor.from_rank_offsets("w", into, (axis, rank, 8))}
        report = dist_checkpointing.load_with_report(template, tmp_path / "c")
        assert torch.equal(into, piece)
        if axis == 0:
            assert report.bytes_read == piece.numel() * 4


def test_shards_that_overlap_or_leave_gaps_are_refused_on_every_rank(tmp_path: Path) -> None:
    def overlap(peers):
        shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 0, 2))
        shard.global_offset = (peers.rank,)
        shard.global_shape = (3,)
        dist_checkpointing.save({"w": shard}, tmp_path / "c", process_group=peers)

    def gap(peers):
        shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, peers.rank, 3))
        dist_checkpointing.save({"w": shard}, tmp_path / "c", process_group=peers)

    def no_main(peers):
        shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2), replica_id=1 + peers.rank)
        dist_checkpointing.save({"w": shard}, tmp_path / "c", process_group=peers)

    def two_mains(peers):
        shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        dist_checkpointing.save({"w": shard}, tmp_path / "c", process_group=peers)

    for body, words in (
        (overlap, "overlap"),
        (gap, "cover 4 of 6"),
        (no_main, "no rank declares"),
        (two_mains, "several do"),
    ):
        for result in run_ranks(2, body):
            assert isinstance(result, CheckpointError)
            assert words in str(result)
            assert "'w'" in str(result)
    assert not list(tmp_path.iterdir())
