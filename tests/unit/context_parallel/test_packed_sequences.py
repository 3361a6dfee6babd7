"""Packed sequences: documents see themselves only, and descriptions that cannot be are refused."""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

CPU = torch.device("cpu")


def lengths(*borders):
    return torch.tensor(borders, dtype=torch.int32)


def test_lengths_and_ids_say_the_same():
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths(0, 3, 3, 5))
    assert packed.resolve(1, 5, CPU).ids.tolist() == [[0, 0, 0, 2, 2]]
    padded = PackedSeqParams(cu_seqlens_q=lengths(0, 2, 3), cu_seqlens_q_padded=lengths(0, 4, 6))
    assert padded.resolve(1, 6, CPU).ids.tolist() == [[0, 0, 0, 0, 1, 1]]
    given = PackedSeqParams(seq_idx=torch.tensor([[0, 0, 1]]))
    assert given.resolve(2, 3, CPU).ids.tolist() == [[0, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize(
    ("packed", "batch", "found"),
    [
        (PackedSeqParams(), 1, "neither lengths nor seq_idx"),
        (PackedSeqParams(cu_seqlens_q=lengths(0, 3, 7)), 1, "add up to 7, the row has 8"),
        (PackedSeqParams(cu_seqlens_q=lengths(1, 8)), 1, "do not rise from 0"),
        (PackedSeqParams(cu_seqlens_q=lengths(0, 5, 4, 8)), 1, "do not rise from 0"),
        (PackedSeqParams(cu_seqlens_q=lengths(0, 8)), 2, "the micro batch has 2"),
        (
            PackedSeqParams(cu_seqlens_q=lengths(0, 8), cu_seqlens_kv=lengths(0, 4, 8)),
            1,
            "keys and of queries differ",
        ),
        (PackedSeqParams(seq_idx=torch.zeros(1, 4)), 1, r"seq_idx has shape \(1, 4\)"),
        (PackedSeqParams(seq_idx=torch.tensor([[0, 0, 1, 1, 0, 0, 0, 0]])), 1, "falls"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(packed, batch, found):
    with pytest.raises(DataError, match=found):
        packed.resolve(batch, 8, CPU)


def make_core():
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0.0
    )
    return DotProductAttention(config, 1, AttnMaskType.causal, "self")


def test_packed_documents_attend_as_if_alone():
    q, k, v = (torch.randn(7, 1, 2, 8) for _ in range(3))
    core = make_core()
    together = core(q, k, v, None, packed_seq_params=PackedSeqParams(cu_seqlens_q=lengths(0, 3, 7)))
    for part in (slice(0, 3), slice(3, 7)):
        alone = core(q[part], k[part], v[part], None)
        assert_close(together[part], alone, FP32_REORDERED_SUM, "a document")


def test_a_matrix_of_masks_beside_documents_is_refused():
    q, k, v = (torch.randn(4, 1, 2, 8) for _ in range(3))
    packed = PackedSeqParams(cu_seqlens_q=lengths(0, 4))
    with pytest.raises(ConfigError, match="an attention_mask, documents together"):
        make_core()(q, k, v, torch.zeros(1, 1, 4, 4, dtype=torch.bool), packed_seq_params=packed)
