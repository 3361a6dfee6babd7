"""A `config.json` means here what it means in Transformers, whichever fields it states."""

import pytest
import transformers

from megatron.core.foundation.errors import ConfigError
from megatron.hugging_face import FAMILIES
from tests.parity.stated_fields import (
    ALL_CASES,
    changes,
    compare_logits,
    compare_settings,
    ours,
    spellings,
)
from tests.unit.hugging_face.models import saved


def test_every_family_has_a_config_that_loses_its_fields():
    kinds = {getattr(transformers, kind).model_type for kind, _ in ALL_CASES.values()}
    assert kinds == {family.model_type for family in FAMILIES}


@pytest.mark.parametrize("case", ALL_CASES)
def test_a_field_that_is_absent_means_what_it_does_in_transformers(case):
    wrong = {
        f"{spelling}: {change.what}": result
        for spelling, fields in spellings(case).items()
        for change in changes(fields, {})
        if "absent" in change.what
        for result in [compare_settings(change)]
        if result not in ("equal", "refused", "refused there")
    }
    assert not wrong


@pytest.mark.parametrize("case", ["gemma2", "stablelm"])
def test_without_a_field_logits_are_those_of_transformers(case, tmp_path):
    saved(case, tmp_path)
    absent = [c for c in changes(spellings(case)["older"], {}) if c.what.endswith("absent")]
    results = {change.what: compare_logits(change, tmp_path) for change in absent}
    assert set(results.values()) <= {"equal", "refused", "refused there"}, results
    assert list(results.values()).count("equal") >= 3


@pytest.mark.parametrize(
    ("case", "besides", "named"),
    [
        ("llama", {"rope_theta": 7.0}, r"rope_parameters\.rope_theta = 5000\.0"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("gpt_neox", {"rotary_pct": 0.5}, "rotary_pct"),
        ("gemma3", {"rope_theta": 7.0}, "rope_theta"),
        ("gemma3", {"rope_local_base_freq": 7.0}, "rope_local_base_freq"),
        ("qwen3 with experts", {"num_experts": 7}, "num_experts"),
        ("nemotron_h", {"hybrid_override_pattern": "MMMM"}, "hybrid_override_pattern"),
        ("nemotron_h", {"num_hidden_layers": 5}, "num_hidden_layers"),
        ("granite 4", {"layers_block_type": ["attention"] * 4}, "layers_block_type"),
        ("kimi_linear", {"linear_attn_config": {"num_heads": 2}}, r"linear_attn_config\.num_heads"),
    ],
)
def test_two_fields_that_contradict_each_other_are_refused(case, besides, named):
    fields = spellings(case)["newer"]
    ours(fields)
    with pytest.raises(ConfigError, match=named):
        ours({**fields, **besides})


def test_a_bert_with_a_causal_mask_is_refused():
    fields = spellings("bert")["newer"]
    with pytest.raises(ConfigError, match="is_decoder"):
        ours({**fields, "is_decoder": True})


def test_a_tie_that_transformers_reads_in_one_place_only_is_refused():
    fields = spellings("qwen3 with images")["newer"]
    text = {**fields["text_config"], "tie_word_embeddings": True}
    their_config = transformers.Qwen3VLConfig(**{**fields, "text_config": text})
    assert not their_config.tie_word_embeddings
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        ours({**fields, "text_config": text})
