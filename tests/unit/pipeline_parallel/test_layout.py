"""Which layers live on which stage."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.foundation.errors import ConfigError
from megatron.core.pipeline_parallel.layout import (
    PipelineLayout,
    PipelineParallelLayerLayout,
    loss_rank,
    pipeline_layout,
)
from megatron.core.pipeline_parallel.layout_string import parse_layout
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class Settings:
    """The fields that decide a layout."""

    num_layers: int
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: Any = None
    pipeline_schedule: str = "1f1b"


def layers(layout: PipelineLayout) -> list[list[list[int]]]:
    """Return the layer ids by chunk, then rank."""
    return [
        [list(layout.layers(rank, chunk)) for rank in range(layout.num_ranks)]
        for chunk in range(layout.num_chunks)
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(4), [[[0, 1, 2, 3]]]),
        (Settings(8, 4), [[[0, 1], [2, 3], [4, 5], [6, 7]]]),
        (Settings(8, 2, 2), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (Settings(8, 2, 4), [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]]),
        (Settings(7, 3, None, 2, 1), [[[0, 1], [2, 3, 4, 5], [6]]]),
        (Settings(7, 3, None, None, 1), [[[0, 1, 2], [3, 4, 5], [6]]]),
        (Settings(3, 2, None, 1, 2), [[[0], [1, 2]]]),
        (Settings(10, 3, 2, 2, 4), [[[0], [1, 2], [3, 4]], [[5], [6, 7], [8, 9]]]),
        (Settings(7, 4, None, None, None, True), [[[0], [1, 2], [3, 4], [5, 6]]]),
        (Settings(6, 4, None, None, None, True, True), [[[0], [1, 2], [3, 4], [5]]]),
        (Settings(6, 2, 2, None, None, True, True), [[[0], [1, 2]], [[3, 4], [5]]]),
        (Settings(2, 2, 2, None, None, True, True), [[[], [0]], [[1], []]]),
        (Settings(5, 2, 2, None, None, False, False, "Et|tttt|L|"), None),
        (Settings(5, 2, 2, None, None, False, False, "Et|t*4||L"), [[[0], [1, 2, 3, 4]], [[], []]]),
    ],
)  # fmt: skip
def test_layers_are_dealt_as_asked(settings, expected):
    if expected is None:
        with pytest.raises(ConfigError, match="no L in its last stage"):
            pipeline_layout(settings)
        return
    layout = pipeline_layout(settings)
    assert layers(layout) == expected
    last = (layout.num_ranks - 1, layout.num_chunks - 1)
    places = [(r, c) for r in range(layout.num_ranks) for c in range(layout.num_chunks)]
    assert [place for place in places if layout.has_embedding(*place)] == [(0, 0)]
    assert [place for place in places if layout.has_loss(*place)] == [last]


@given(
    p=st.integers(1, 8),
    v=st.integers(1, 4),
    per_stage=st.integers(1, 3),
    embedding=st.booleans(),
    loss=st.booleans(),
)
def test_every_layer_lives_on_exactly_one_stage_in_order(p, v, per_stage, embedding, loss):
    num_layers = p * v * (per_stage + 1) - embedding - loss
    settings = Settings(num_layers, p, v, None, None, embedding, loss)
    layout = pipeline_layout(settings)
    in_order = [i for chunk in layers(layout) for rank in chunk for i in rank]
    assert in_order == list(range(num_layers))
    stages = [layout.stage(r, c) for c in range(v) for r in range(p)]
    assert stages == list(range(p * v))


def test_a_layout_string_counts_layers_and_stages():
    layout = PipelineParallelLayerLayout("Et*3|(tt|)*29,m|L", 16)
    assert layout.virtual_pipeline_model_parallel_size == 2
    assert PipelineParallelLayerLayout.get_num_stages_from_str("Et*3|(tt|)*29,m|L") == 32
    layout.validate_layer_layout(num_layers=61, mtp_num_layers=1)
    assert layout.get_layer_id_list(LayerType.decoder, vp_stage=0, pp_rank=0) == [0, 1, 2]
    assert layout.get_layer_offset(LayerType.decoder, vp_stage=1, pp_rank=0) == 33
    assert layout.get_num_layers_to_build(LayerType.decoder, vp_stage=1, pp_rank=15) == 0
    assert layout.get_num_layers_to_build("mtp", vp_stage=1, pp_rank=14) == 1
    assert layout.layout[15][1] == ["loss"]
    assert layout.flatten_layout[:2] == ["embedding", "decoder"]
    assert "Ettt" in layout.pretty_repr()


def test_a_stage_before_that_of_the_loss_may_predict_later_tokens():
    layout = PipelineParallelLayerLayout("Et|tmm||L", 2).pipeline_layout
    assert layout.mtp_on_earlier_stage and layout.mtp_stage == 1
    assert [layout.num_stacked_hidden_states(stage) for stage in range(4)] == [1, 1, 3, 3]
    assert [layout.reads_tokens(s % 2, s // 2) for s in range(4)] == [True, True, False, True]
    assert layout.embedding_holders(is_tied=False) == [0, 1]
    assert layout.embedding_holders(is_tied=True) == [0, 1, 1]
    ends = PipelineParallelLayerLayout("Et||t|mmL", 2).pipeline_layout
    assert not ends.mtp_on_earlier_stage and ends.mtp_stage == 3
    assert {ends.num_stacked_hidden_states(stage) for stage in range(4)} == {1}
    assert ends.embedding_holders(is_tied=False) == [0, 1]


def test_a_layout_may_be_a_list_of_stages():
    layout = PipelineParallelLayerLayout(
        [["embedding", "decoder"], [LayerType.decoder, LayerType.loss]], 2
    )
    assert layout.pipeline_layout.stages == ("Et", "tL")
    assert PipelineParallelLayerLayout(["Et", "tL"], 2).pipeline_layout == layout.pipeline_layout
    settings = Settings(2, 2, pipeline_model_parallel_layout=layout)
    assert pipeline_layout(settings) == layout.pipeline_layout


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EtL", ["EtL"]),
        ("E t*2 | t, L", ["Ett", "tL"]),
        ("E|||L", ["E", "", "", "L"]),
        ("E(t|)*2L", ["Et", "t", "L"]),
        ("E((t*2|)*2t|)*2L", ["Ett", "tt", "t", "tt", "tt", "t", "L"]),
        ("Et*0|L", ["E", "L"]),
        ("E|*3L", ["E", "", "", "L"]),
    ],
)
def test_layout_strings_expand(text, stages):
    assert parse_layout(text) == stages


@given(st.lists(st.text("EtmL", max_size=5), min_size=2, max_size=6))
def test_a_layout_string_without_repetition_is_its_own_expansion(stages):
    assert parse_layout("|".join(stages)) == stages


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("Etx|L", "'x' is not a layer", 2),
        ("E(t|L", "not closed", 1),
        ("Et)|L", "was not opened", 2),
        ("Et*|L", "a number must follow", 2),
        ("*3tL", "nothing to repeat", 0),
        ("Et*3*2|L", "cannot be repeated", 4),
        ("Et*99999999|L", "too long", 2),
        ("E((t*999999)*999)L", "too long", 12),
        ("", "is empty", 0),
    ],
)
def test_a_layout_string_that_makes_no_sense_is_marked_where_it_stops(text, message, column):
    with pytest.raises(ConfigError, match=message) as failure:
        parse_layout(text)
    lines = str(failure.value).splitlines()
    assert lines[2] == "  " + " " * column + "^"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(7, 2), "7 layers cannot be split over 2 pipeline ranks"),
        (Settings(8, 2, 3), "over 2 pipeline ranks with 3 chunks"),
        (Settings(8, 4, None, None, None, True), "8 layers + embedding cannot"),
        (Settings(8, 4, None, 2, None, True), "counted as a layer while"),
        (Settings(8, 4, None, 3, 2), "leave 3 layers for 2 other ranks"),
        (Settings(8, 2, None, 3, 4), "leave 1 layers for 0 other ranks"),
        (Settings(8, 2, None, 9, None), "leave -1 layers"),
        (Settings(8, 1, None, 4, None), "with pipeline size 1"),
        (Settings(9, 3, 2, 3, 2), "with 3 layers cannot be cut into 2 chunks"),
        (Settings(1, 3, None, None, None, True, True), None),
        (Settings(0, 1, 1, None, None, False, False, "E|L"), "has 2 stages for 1 ranks"),
        (Settings(3, 2, None, None, None, False, False, "Et|t|tL"), "has 3 stages for 2 ranks"),
        (Settings(3, 2, None, None, None, False, False, "Et|tL"), "2 't' instead of 3"),
        (Settings(2, 2, None, None, None, False, False, "Et|tmL"), "1 'm' instead of 0"),
        (Settings(2, 2, None, None, None, False, False, "tE|tL"), "out of order"),
        (Settings(2, 2, None, None, None, False, False, "|EttL"), "no E in its first"),
    ],
)
def test_layouts_that_cannot_be_are_refused(settings, message):
    if message is None:
        assert layers(pipeline_layout(settings)) == [[[], [0], []]]
        return
    with pytest.raises(ConfigError) as failure:
        pipeline_layout(settings)
    assert message in str(failure.value)
    assert failure.value.fix
    assert failure.value.flags


@pytest.mark.parametrize("given", [None, 1, 3])
def test_a_layout_with_other_chunks_than_the_config_is_refused(given):
    with pytest.raises(ConfigError, match=f"4 stages for 2 ranks with {given or 1} chunks"):
        pipeline_layout(Settings(4, 2, given, pipeline_model_parallel_layout="Et|t|t|tL"))


@pytest.mark.parametrize(
    ("layout", "chunks"),
    [
        ("Et|t|t|tL", 2),
        ("Ett|ttL", None),
        ([["embedding", "decoder"], ["decoder"], ["decoder"], ["decoder", "loss"]], 2),
        (PipelineParallelLayerLayout("Et|t|t|tL", 2), 2),
        (None, None),
    ],
)
def test_the_layout_sets_the_virtual_stages_of_a_config_that_leaves_them_out(layout, chunks):
    config = TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_layout=layout,
    )
    assert config.virtual_pipeline_model_parallel_size == chunks
    assert pipeline_layout(config).num_chunks == (chunks or 1)


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_a_v_ends_where_it_begins(schedule):
    settings = Settings(8, 2, 2, pipeline_schedule=schedule)
    layout = pipeline_layout(settings)
    assert [list(layout.layers(rank, chunk)) for rank in (0, 1) for chunk in (0, 1)] == [
        [0, 1], [6, 7], [2, 3], [4, 5],
    ]  # fmt: skip
    assert layout.has_embedding(0, 0) and layout.has_loss(0, 1)
    assert loss_rank(settings) == 0
    settings.virtual_pipeline_model_parallel_size = 3
    with pytest.raises(ConfigError, match="runs 2 chunk"):
        pipeline_layout(settings)
