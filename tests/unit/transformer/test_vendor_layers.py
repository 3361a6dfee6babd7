"""Layers of a vendor library, with stand-ins for what needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.foundation.errors import MissingExtraError
from megatron.core.foundation.optional_imports import require
from megatron.core.parameters.initialization import initialize_parameters
from megatron.core.parameters.param_meta import ParamMeta, get_param_meta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

S, B, N, D = 7, 2, 2, 4


def attention_by_mask(module, query, key, value, **options):
    """Compute what the library does for an arbitrary mask: it reads that alone."""
    assert options["attn_mask_type"] == "arbitrary"
    assert options["window_size"] == (-1, -1)
    scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * D**-0.5
    weights = scores.masked_fill(options["attention_mask"], float("-inf")).softmax(-1)
    return torch.einsum("bnqk,kbnd->qbnd", weights, value).flatten(2)


@pytest.mark.parametrize("window", [None, (2, 0), (2, 1)])
@pytest.mark.parametrize("kind", [AttnMaskType.causal, AttnMaskType.padding])
def test_a_mask_hides_beside_what_the_type_and_the_window_hide(kind, window, monkeypatch):
    config = TransformerConfig(
        num_layers=1, hidden_size=N * D, num_attention_heads=N, attention_dropout=0.0,
        window_size=window,
    )  # fmt: skip
    groups = ProcessGroupCollection.single()
    local = DotProductAttention(config, 1, kind, "self", pg_collection=groups)
    theirs = TEDotProductAttention.__new__(TEDotProductAttention)
    nn.Module.__init__(theirs)
    theirs._cp_group, theirs._attn_mask_type, theirs._window = None, kind, config.window_of(1)
    base = TEDotProductAttention.__mro__[1]
    monkeypatch.setattr(base, "forward", attention_by_mask, raising=False)
    query, key, value = (torch.randn(S, B, N, D) for _ in range(3))
    mask = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    mask[1, ..., 1] = True
    found = theirs(query, key, value, mask)
    assert_close(found, local(query, key, value, mask), FP32_REORDERED_SUM, "attention")


class Remaking(nn.Linear):
    """A layer whose `reset_parameters` makes new parameters, as some libraries do."""

    def reset_parameters(self):
        self.weight = nn.Parameter(torch.full_like(self.weight, 2.0))
        self.bias = nn.Parameter(torch.full_like(self.bias, 3.0))


def test_parameters_that_a_reset_makes_anew_keep_their_metadata():
    layer = Remaking(3, 2)
    parameters = dict(layer.named_parameters())
    drawn = ParamMeta(split_dim=0, split_axis="tp", stride=2, init_method=nn.init.ones_)
    set_param_meta(layer.weight, drawn)
    initialize_parameters(layer, seed=1, axis_rank={"tp": 0}, axis_size={"tp": 1})
    assert dict(layer.named_parameters()) == parameters
    assert get_param_meta(layer.weight) == drawn
    assert layer.weight.eq(1.0).all() and layer.bias.eq(3.0).all()


def test_a_library_that_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("raise RuntimeError('no compiled part')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError) as caught:
        require("flash_attn", purpose="--attention-backend flash")
    assert "'flash_attn', which is installed and cannot be loaded: no compiled" in str(caught.value)
    assert "install flash-attention" in str(caught.value)
