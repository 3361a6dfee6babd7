"""Sparse attention: the choice, the output and the indexer's loss as their formulas say them."""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.kernels.sparse_attention import Choice, choose, choose_keys
from megatron.core.kernels.windows import Windows
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import sparse_attention
from megatron.core.transformer.config.layer_kinds import ATTENTION_AND_MLP, LayerKind
from megatron.core.transformer.indexer import finish_indexer_step
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, assert_close

HEADS, PLAIN, ROTARY, VALUE, LATENT, HIDDEN = 3, 8, 4, 6, 10, 24
INDEX_HEADS, INDEX_WIDTH, TOPK, LENGTH, BATCH = 5, 6, 4, 12, 2
FIELDS = {
    "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "kv_lora_rank": LATENT,
    "q_lora_rank": 14, "qk_head_dim": PLAIN, "qk_pos_emb_head_dim": ROTARY, "v_head_dim": VALUE,
    "qk_layernorm": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "add_bias_linear": False, "init_method_std": 0.3, "rope_type": "rope",
    "experimental_attention_variant": "dsa", "dsa_indexer_head_dim": INDEX_WIDTH,
    "dsa_indexer_n_heads": INDEX_HEADS, "dsa_indexer_topk": TOPK,
}  # fmt: skip


def make_like(module):
    """The same attention with an indexer of its own, which chooses within each block."""
    copied = make_attention()
    copied.load_state_dict(module.state_dict())
    return copied


def make_attention(kind=None, layer_number=1, **fields):
    torch.manual_seed(5 + layer_number)
    config = MLATransformerConfig(**{**FIELDS, **fields})
    spec = get_gpt_layer_local_spec(
        multi_latent_attention=config.multi_latent_attention,
        qk_layernorm=True,
        kind=kind or LayerKind("dsa"),
    )
    return build_module(spec.submodules.self_attention, config=config, layer_number=layer_number)


def factors(module):
    """The factors [s, 1, n, 1] of queries, from the learned numbers of their heads, if any."""
    if module.query_scale is None:
        return 1.0
    logarithms = torch.arange(1, LENGTH + 1).double().log()
    scale, bias = (p.double() for p in module.query_scale.parameters())
    return (logarithms[:, None] * scale + bias)[:, None, :, None]


def index_by_formula(module, x, latent, uses_relu=True):
    """The scores [b, s, s] of one query and all keys after the other."""
    w = {name: p.double() for name, p in module.core_attention.indexer.named_parameters()}
    queries = (latent @ w["linear_wq_b.weight"].T).unflatten(-1, (INDEX_HEADS, INDEX_WIDTH))
    queries = queries * factors(module.core_attention.indexer)
    keys = x @ w["linear_wk.weight"].T
    centred = keys - keys.mean(-1, keepdim=True)
    keys = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    keys = keys * w["k_norm.weight"] + w["k_norm.bias"]
    weights = x @ w["linear_weights_proj.weight"].T

    def turned(v, position):
        angle = position / 10000 ** (torch.arange(ROTARY // 2).double() * 2 / ROTARY)
        first, second, rest = v.split([ROTARY // 2, ROTARY // 2, INDEX_WIDTH - ROTARY], -1)
        return torch.cat((first * angle.cos() - second * angle.sin(),
                          second * angle.cos() + first * angle.sin(), rest), -1)  # fmt: skip

    keys = torch.stack([turned(keys[s], s) for s in range(LENGTH)])
    scores = []
    for t in range(LENGTH):
        products = torch.einsum("bji,sbi->bjs", turned(queries[t], t), keys) / INDEX_WIDTH**0.5
        products = products.relu() if uses_relu else products
        scores.append(torch.einsum("bj,bjs->bs", weights[t], products) / INDEX_HEADS**0.5)
    return torch.stack(scores, 1)


def expected_of(module, x, documents=None, uses_sparse_loss=False, uses_relu=True):
    """Output and loss without blocks, in fp64."""
    x = x.double()
    module = module.double().eval()
    others = module.get_query_key_value_tensors(x)
    query, key, value = (part.double() for part in others[:3])
    query = query * factors(module)
    if module.config.q_lora_rank is None:
        latent = module.core_attention.indexer.input_norm(x.detach())
    else:
        latent = module.q_layernorm(module.linear_q_down_proj(x)[0]).detach()
    indexed = index_by_formula(module, x.detach(), latent, uses_relu)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, -1, -1)
    if documents is not None:
        visible = visible & (documents[:, :, None] == documents[:, None])
    chosen = torch.zeros_like(visible)
    for b in range(BATCH):
        for t in range(LENGTH):
            seen = visible[b, t].nonzero().flatten().tolist()
            best = sorted(seen, key=lambda s: (-float(indexed[b, t, s].detach()), s))[:TOPK]
            chosen[b, t, best] = True
    scores = torch.einsum("qbnd,kbnd->bnqk", query, key) / (PLAIN + ROTARY) ** 0.5
    probabilities = scores.masked_fill(~chosen[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("bnqk,kbne->qbne", probabilities, value).flatten(2)
    compared = chosen if uses_sparse_loss else visible
    target = scores.detach().masked_fill(~compared[:, None], -torch.inf).softmax(-1).mean(1)
    found = indexed.masked_fill(~compared, -torch.inf).log_softmax(-1)
    terms = target * (target.log() - found)
    return module.linear_proj(out)[0], terms[compared].sum() / (BATCH * LENGTH), chosen


def gradients(module):
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


@pytest.mark.parametrize("block_elements", [2**24, 3 * INDEX_HEADS * BATCH * LENGTH])
@pytest.mark.parametrize(
    ("fields", "has_documents"),
    [
        ({}, False),
        ({"dsa_indexer_use_sparse_loss": True}, True),
        ({"dsa_indexer_scoring_relu": False}, True),
        ({"q_lora_rank": None, "scalable_softmax": True}, False),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, False),
        ({"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}, False),
    ],
    ids=str,
)
def test_output_loss_and_gradients_are_those_of_the_formulas(
    fields, has_documents, block_elements, monkeypatch
):
    monkeypatch.setattr(sparse_attention, "BLOCK_ELEMENTS", block_elements)
    module = make_attention(dsa_indexer_loss_coeff=0.7, **fields)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "query_scale" in name:
                parameter.add_(torch.randn(len(parameter)) / 2)
    x, direction = torch.randn(2, LENGTH, BATCH, HIDDEN)
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3]) if has_documents else None
    packed = None
    if documents is not None:
        packed = PackedSeqParams(seq_idx=documents.int())
    out, _ = module(x, None, packed_seq_params=packed)
    (out * direction).sum().backward()
    found = gradients(module)
    finish_indexer_step([module], ProcessGroupCollection.single())
    module.zero_grad()
    expected, loss, chosen = expected_of(
        module, x, documents, fields.get("dsa_indexer_use_sparse_loss", False),
        fields.get("dsa_indexer_scoring_relu", True),
    )  # fmt: skip
    assert int(chosen[0].sum(-1).max()) == TOPK
    assert_close(out, expected, FP32_REORDERED_SUM, "output")
    step_loss = module.core_attention.indexer_loss.step_loss
    assert_close(step_loss, loss, FP32_REORDERED_SUM, "loss")
    ((expected * direction).sum() + 0.7 * loss).backward()
    for name, gradient in gradients(module).items():
        assert gradient is not None, name
        assert found[name].abs().max() > 0, name
        assert_close(found[name], gradient, FP32_REORDERED_SUM, name)


def test_of_equal_scores_the_earliest_keys_are_chosen():
    scores = torch.tensor([[[0.0, 0.0, 2.0, 0.0, 0.0]]])
    hidden = torch.tensor([[[False, True, False, False, False]]])
    assert choose_keys(scores, hidden, 3).tolist() == [[[True, False, True, True, False]]]
    assert choose_keys(scores, hidden, 4).tolist() == [[[True, False, True, True, True]]]
    assert choose_keys(scores, hidden, 9).tolist() == [[[True, False, True, True, True]]]


def blocks_of(documents, size):
    """The tokens of each block, in order."""
    found = []
    for document in documents.unique():
        places = (documents == document).nonzero().flatten().tolist()
        found += [places[i : i + size] for i in range(0, len(places), size)]
    return found


@pytest.mark.parametrize("documents", [None, [0] * 13 + [1] * 4 + [2], [0] * 4 + [1] * 14])
@pytest.mark.parametrize(("size", "topk", "num_local"), [(3, 6, 0), (4, 4, 1), (2, 8, 2)])
def test_blocks_are_chosen_as_the_rule_is_written(documents, size, topk, num_local):
    length, rows = 18, 2
    ids = torch.tensor([documents or [0] * length] * rows)
    of_windows = None if documents is None else ids
    hidden = torch.ones(length, length).triu(1).bool() | (ids[:, :, None] != ids[:, None])
    blocks = blocks_of(ids[0], size)
    whole = [block for block in blocks if len(block) == size]
    of_pools = torch.randn(rows, length, length // size)
    of_keys = torch.randn(rows, 3, length, length)
    pools, parts = (
        Choice(topk, Windows.of(length, size, of_windows, ids.device, has_parts=has_parts), local)
        for has_parts, local in ((False, 0), (True, num_local))
    )
    found_pools = choose(of_pools, hidden, pools)
    end = 11  # of a block of queries and the keys that it sees
    part = choose(of_pools[:, :end, : end // size], hidden[:, :end, :end], pools)
    assert torch.equal(part, found_pools[:, :end, :end])
    found_blocks = choose(of_keys, hidden, parts)
    assert int(found_pools.sum(-1).max()) <= pools.most
    for b in range(rows):
        for t in range(length):
            seen = (~hidden[b, t]).nonzero().flatten().tolist()
            able = [n for n, block in enumerate(whole) if set(block) <= set(seen)]
            best = sorted(able, key=lambda n: -float(of_pools[b, t, n]))[: topk // size]
            passed_over = {k for n in able if n not in best for k in whole[n]}
            expected = [k for k in seen if k not in passed_over]
            assert found_pools[b, t].nonzero().flatten().tolist() == expected
            for group in range(3):
                able = [n for n, block in enumerate(blocks) if set(block) & set(seen)]
                local = able[len(able) - num_local :]
                score = {
                    n: float(of_keys[b, group, t, [k for k in blocks[n] if k in seen]].max())
                    for n in able
                }
                order = sorted(able, key=lambda n: (n not in local, -score[n]))
                best = {k for n in order[: topk // size] for k in blocks[n]}
                expected = [k for k in seen if k in best]
                assert found_blocks[b, group, t].nonzero().flatten().tolist() == expected


def test_with_as_many_pools_as_there_are_it_is_attention_to_all_keys():
    made = {"dsa_indexer_block_size": 4, "qk_pos_emb_head_dim": 0}
    few, most = (make_attention(dsa_indexer_topk=topk, **made) for topk in (4, 8))
    dense = make_attention(ATTENTION_AND_MLP, **made)
    dense.load_state_dict(most.state_dict(), strict=False)
    few.load_state_dict(most.state_dict())
    x = torch.randn(LENGTH - 1, BATCH, HIDDEN)
    expected = dense(x, None)[0]
    # Two pools are whole, and every query sees the tokens after them.
    assert_close(most(x, None)[0], expected, FP32_REORDERED_SUM, "output")
    assert (few(x, None)[0] - expected).abs().max() > 1e-2


def test_with_all_keys_chosen_it_is_attention_to_all_of_them_to_the_bit():
    sparse = make_attention(dsa_indexer_topk=LENGTH)
    dense = make_attention(ATTENTION_AND_MLP)
    left_over = dense.load_state_dict(sparse.state_dict(), strict=False)
    assert all("indexer" in name for name in left_over.unexpected_keys)
    assert not left_over.missing_keys
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    found, expected = sparse(x, None)[0], dense(x, None)[0]
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for name, gradient in gradients(dense).items():
        assert torch.equal(gradients(sparse)[name], gradient), name


def test_layers_that_share_keys_attend_to_the_choice_of_the_last_indexer_before_them():
    sharing = {"num_layers": 4, "dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 1}
    config = MLATransformerConfig(**{**FIELDS, **sharing})
    own = [not kind.shares_keys for kind in config.layer_kinds()]
    assert own == [True, False, True, False]
    owner, follower = (make_attention(layer_number=n, **sharing) for n in (3, 4))
    assert not any("indexer" in name for name, _ in follower.named_parameters())
    # The same latents of queries, so that the indexer would choose the same keys in both layers.
    for part in ("linear_q_down_proj", "q_layernorm"):
        getattr(follower, part).load_state_dict(getattr(owner, part).state_dict())
    full = make_attention()
    full.load_state_dict({**owner.state_dict(), **follower.state_dict()})
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    chosen = {}
    found = owner(x, None, chosen_keys=chosen)[0]
    assert_close(found, make_like(owner)(x, None)[0], EXACT, "output")
    assert_close(follower(x, None, chosen_keys=chosen)[0], full(x, None)[0], EXACT, "output")


def test_an_indexer_without_a_loss_is_frozen_and_one_with_it_leaves_the_model_alone():
    frozen = make_attention()
    assert not any(p.requires_grad for p in frozen.core_attention.indexer.parameters())
    learning = make_attention(dsa_indexer_loss_coeff=3.0)
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    for module in (frozen, learning):
        module(x, None)[0].square().sum().backward()
    for name, gradient in gradients(frozen).items():
        if "indexer" not in name:
            assert torch.equal(gradients(learning)[name], gradient), name


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"dsa_indexer_topk": None}, "--dsa-indexer-topk"),
        ({"dsa_indexer_n_heads": 0}, "--dsa-indexer-n-heads"),
        ({"dsa_indexer_head_dim": ROTARY - 1}, "--dsa-indexer-head-dim"),
        ({"dsa_indexer_loss_coeff": -1.0}, "--dsa-indexer-loss-coeff"),
        ({"dsa_indexer_topk_freq": 2}, "--dsa-indexer-skip-topk-offset 1"),
        ({"num_layers": 4, "dsa_indexer_topk_freq": 4, "dsa_indexer_skip_topk_offset": 1,
          "pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
         "layers with an indexer: 1"),
        ({"multi_latent_attention": False}, "--multi-latent-attention"),
        ({"dsa_indexer_block_size": 3}, "use --dsa-indexer-topk 48"),
        ({"dsa_indexer_block_size": 2, "dsa_indexer_loss_coeff": 1.0}, "dsa-indexer-loss-coeff"),
        ({"dsa_indexer_local_blocks": 1}, "--dsa-indexer-local-blocks"),
        ({"multi_latent_attention": False, "dsa_indexer_block_size": 2}, "--dsa-indexer-n-heads 3"),
        ({"multi_latent_attention": False, "dsa_indexer_block_size": 2, "dsa_indexer_n_heads": 3,
          "dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 1}, "dsa-indexer-topk-freq"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_sizes_that_are_no_indexer_are_refused(fields, flag):
    with pytest.raises(ConfigError, match=flag):
        MLATransformerConfig(**{**FIELDS, **fields})
