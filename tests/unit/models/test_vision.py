"""Models that read images: their sizes, positions, parts, and what they refuse."""

import pytest
import torch
import transformers
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from megatron.core.datasets.images.grid import (
    interpolation,
    patch_positions,
    text_and_image_positions,
    windows,
)
from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.cli.parser import parse_command_line
from megatron.training.metrics.model_size import ModelSize
from megatron.training.rules import resolve_and_check
from tests.parity.encoder_case import micro_batches, resolved
from tests.parity.encoders import _ADDS_STATES, _READS_IMAGES, _SHAPE
from tests.parity.layouts import LayoutCase
from tests.parity.vision_case import IMAGE, PADDED_VOCABULARY, build_chunks, dataset

LINE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    " --position-embedding-type mrope --mrope-section 4 2 2 --image-token-id 98 --patch-dim 4"
    " --vision-num-layers 2 --vision-hidden-size 64 --vision-num-attention-heads 4"
    " --vision-ffn-hidden-size 128 --vision-window-size 16 --micro-batch-size 2"
    " --global-batch-size 16 --lr 1e-3 --train-iters 2 --mock-data --tokenizer-type NullTokenizer"
    " --vocab-size 100 --transformer-impl local"
)
GRIDS = [(1, 6, 10), (1, 4, 4), (3, 4, 6), (1, 2, 2)]


def checked(line, architecture="vlm", world_size=8):
    words = line.split()
    return resolve_and_check(
        lambda: parse_command_line(words, args_defaults={"architecture": architecture}),
        lambda config: world_size,
    )


def model_of(words):
    run = resolved(LayoutCase(), (*_SHAPE, *words), "vlm")
    (model,) = build_chunks(run, ProcessGroupCollection.single())
    return run, model


def test_patches_have_the_positions_windows_and_weights_of_transformers():
    thw = torch.tensor(GRIDS)
    assert torch.equal(patch_positions(GRIDS, 2), get_vision_position_ids(thw, 2))
    order, of_block = windows(GRIDS, 2, 2)
    theirs, borders = get_vision_window_index(
        thw, spatial_merge_size=2, window_size=16, patch_size=4
    )
    assert torch.equal(order, theirs)
    lengths = torch.unique_consecutive(of_block, return_counts=True)[1] * 4
    assert torch.equal(lengths.cumsum(0), torch.unique_consecutive(torch.as_tensor(borders))[1:])
    rows, weights = interpolation(GRIDS, 2, 5)
    expected_rows, expected_weights = get_vision_interpolation_indices_and_weights(
        thw, 5, align_corners=True, spatial_merge_size=2
    )
    table = torch.arange(25.0) ** 2
    torch.testing.assert_close(
        (table[rows] * weights).sum(1), (table[expected_rows] * expected_weights).sum(1)
    )


def test_tokens_have_the_positions_of_transformers():
    images = [[5, IMAGE, *[IMAGE] * 14, 7, 8, *[IMAGE] * 4], [1, 2, *[IMAGE] * 1, *range(3, 21)]]
    ids = torch.tensor([row[:20] for row in images])
    ids[0, 16:] = IMAGE
    ids[0, 1:16], ids[0, 16] = IMAGE, 9
    grids = [[(1, 6, 10)], [(1, 2, 2)]]
    ids[0, 17:] = 11
    config = transformers.Qwen2_5_VLConfig(
        image_token_id=IMAGE,
        text_config={"vocab_size": 100, "num_hidden_layers": 1, "hidden_size": 16,
                     "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8,
                     "bos_token_id": 1, "eos_token_id": 2,
                     "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 8,
                       "out_hidden_size": 16},
    )  # fmt: skip
    thw = torch.tensor([grid for row in grids for grid in row])
    expected, _ = Qwen2_5_VLModel(config).get_rope_index(
        ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=thw
    )
    for row, own in enumerate(grids):
        mine = text_and_image_positions(ids[row] == IMAGE, own, 2)
        assert torch.equal(mine, expected[:, row])


@pytest.mark.parametrize("words", [_READS_IMAGES, (*_READS_IMAGES, *_ADDS_STATES)])
def test_the_size_of_a_model_is_that_of_its_settings(words):
    run, model = model_of(words)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert ModelSize.from_settings(run, PADDED_VOCABULARY).total_parameters == count


@pytest.mark.parametrize(
    ("part", "prefixes"),
    [
        ("--freeze-LM", ("embedding.", "decoder.", "output_layer.")),
        ("--freeze-ViT", ("vision_model.patch_embed.", "vision_model.decoder.")),
        ("--freeze-projection", ("vision_model.merger.",)),
    ],
)
def test_a_part_that_is_frozen_is_one_of_three(part, prefixes):
    _, model = model_of((*_READS_IMAGES, part))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != name.startswith(prefixes), name


def test_tokens_without_their_patches_are_refused(tmp_path):
    _, model = model_of(_READS_IMAGES)
    batch = next(micro_batches(dataset(tmp_path, False), 0, 2))
    positions = batch["position_ids"].transpose(0, 1)
    given = {"patches": batch["patches"], "image_grid_thw": batch["image_grid_thw"]}
    missing = {"patches": given["patches"][:-4], "image_grid_thw": given["image_grid_thw"]}
    for wrong in ({}, missing):
        with pytest.raises(DataError, match="images: "):
            model(batch["tokens"], positions, None, labels=batch["labels"], **wrong)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("--mrope-section 4 4 4", "--mrope-section [4, 4, 4] for heads of 8 pairs"),
        ("--vision-num-attention-heads 3", "--vision-hidden-size 64 with 3 heads"),
        ("--vision-window-size 12", "--vision-window-size 12 with blocks of 8 pixels"),
        ("--vision-full-attention-layers 5", "layers [5] of an image encoder with 2 layers"),
        (
            "--tensor-model-parallel-size 8 --num-attention-heads 8 --mrope-section 2 1 1",
            "with tensor-parallel size 8",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(change, found):
    with pytest.raises(ConfigError) as raised:
        checked(f"{LINE} {change}")
    assert any(found in str(problem) for problem in raised.value.problems), raised.value


def test_parts_of_images_belong_to_models_that_read_them():
    with pytest.raises(ConfigError, match="architecture gpt"):
        checked(f"{LINE} --freeze-ViT", architecture="gpt")
