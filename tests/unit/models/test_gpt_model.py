"""GPTModel by itself: names, initial weights, dropout, stages, refusals."""

import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from megatron.core.extensions import transformer_engine
from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters.initialization import canonical_names
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.groups import fake_groups
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, assert_close

H, F_, N, G, D, V, P = 16, 24, 4, 2, 4, 64, 12
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "num_query_groups": G,
}


def make_model(groups=None, *, family="gpt2", tied=False, model_options=None, **fields):
    """Build a 4-layer model, or one stage of it."""
    is_llama = family == "llama"
    config = TransformerConfig(
        **{
            "num_layers": 4, "hidden_size": H, "num_attention_heads": N, "ffn_hidden_size": F_,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, **(LLAMA if is_llama else {}),
            **fields,
        }
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
    options = {
        "vocab_size": V,
        "max_sequence_length": P,
        "share_embeddings_and_output_weights": tied,
        "position_embedding_type": "rope" if is_llama else "learned_absolute",
        "pg_collection": groups or ProcessGroupCollection.single(),
        **(model_options or {}),
    }
    return GPTModel(config, spec, **options)


def make_stages(p=2, v=1, **options):
    """Build all p*v chunks of a pipeline in this process, in model order."""
    chunks = []
    for stage in range(p * v):
        vp_stage, rank = divmod(stage, p)
        chunk_options = {
            "pre_process": stage == 0,
            "post_process": stage == p * v - 1,
            "vp_stage": vp_stage if v > 1 else None,
        }
        chunks.append(
            make_model(
                fake_groups(pp=(rank, p)),
                model_options=chunk_options,
                pipeline_model_parallel_size=p,
                virtual_pipeline_model_parallel_size=v if v > 1 else None,
                **options,
            )
        )
    return chunks


def run_stages(chunks, tokens, labels):
    hidden = None
    for chunk in chunks:
        chunk.set_input_tensor(hidden)
        hidden = chunk(tokens, None, None, labels=labels)
    return hidden


def text(b=2, s=P):
    ids = torch.randint(V, (b, s + 1))
    return ids[:, :-1], ids[:, 1:]


def layer_table(i, family, qk_norm):
    """Names and shapes of a layer in the format's table, as the local spec has them."""
    prefix, gated, bias = f"decoder.layers.{i}.", family == "llama", family == "gpt2"
    groups = G if family == "llama" else N
    rows = (N + 2 * groups) * D
    table = {
        "input_layernorm.weight": (H,),
        "self_attention.linear_qkv.weight": (rows, H),
        "self_attention.linear_proj.weight": (H, N * D),
        "pre_mlp_layernorm.weight": (H,),
        "mlp.linear_fc1.weight": (2 * F_ if gated else F_, H),
        "mlp.linear_fc2.weight": (H, F_),
    }
    if bias:
        table |= {
            "input_layernorm.bias": (H,),
            "self_attention.linear_qkv.bias": (rows,),
            "self_attention.linear_proj.bias": (H,),
            "pre_mlp_layernorm.bias": (H,),
            "mlp.linear_fc1.bias": (F_,),
            "mlp.linear_fc2.bias": (H,),
        }
    if qk_norm:
        table |= {f"self_attention.{x}_layernorm.weight": (D,) for x in "qk"}
    return {prefix + name: shape for name, shape in table.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "qk_norm"), [("gpt2", False), ("llama", False), ("llama", True)]
)
def test_names_and_shapes_are_those_of_the_format(family, qk_norm, tied):
    model = make_model(family=family, tied=tied, qk_layernorm=qk_norm)
    expected = {"embedding.word_embeddings.weight": (V, H), "decoder.final_layernorm.weight": (H,)}
    if family == "gpt2":
        expected["embedding.position_embeddings.weight"] = (P, H)
        expected["decoder.final_layernorm.bias"] = (H,)
    if not tied:
        expected["output_layer.weight"] = (V, H)
    for i in range(4):
        expected |= layer_table(i, family, qk_norm)
    actual = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert actual == expected
    extra = set(model.state_dict()) - set(expected)
    assert all(re.search(r"(linear_\w+|output_layer)\._extra_state$", n) for n in extra), extra


def test_checkpoint_keys_are_stacks_and_gated_weights_are_stored_whole():
    declared = make_model(fake_groups(tp=(1, 2)), family="llama",
                          tensor_model_parallel_size=2).sharded_state_dict()  # fmt: skip
    keys = {declaration.key for declaration in declared.values()}
    assert keys == {
        "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight",
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.self_attention.linear_qkv.weight",
        "decoder.layers.self_attention.linear_proj.weight",
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.mlp.linear_fc1.weight", "decoder.layers.mlp.linear_fc2.weight",
    }  # fmt: skip
    gate, up = declared["decoder.layers.2.mlp.linear_fc1.weight"].build()
    assert gate.global_shape == up.global_shape == (4, 2 * F_, H)
    assert gate.global_offset == (2, F_ // 2, 0)
    assert up.global_offset == (2, F_ + F_ // 2, 0)
    proj = declared["decoder.layers.2.self_attention.linear_proj.weight"]
    assert proj.global_offset == (2, 0, N * D // 2)
    assert declared["embedding.word_embeddings.weight"].allow_shape_mismatch


@pytest.mark.parametrize("tied", [False, True])
def test_keys_of_all_stages_cover_each_tensor_once(tied):
    chunks = make_stages(2, 2, tied=tied)
    owners = Counter(
        (d.key, d.global_offset)
        for chunk in chunks
        for d in chunk.sharded_state_dict().values()
        if not any(d.replica_id)
    )
    assert set(owners.values()) == {1}
    serial = make_model(tied=tied).sharded_state_dict()
    assert set(owners) == {(d.key, d.global_offset) for d in serial.values()}
    if tied:
        head = chunks[-1].sharded_state_dict()["output_layer.weight"]
        assert head.key == "embedding.word_embeddings.weight"
        assert head.replica_id[0] == 1


def test_initial_weights_do_not_depend_on_padding_stage_or_dtype():
    rng_state().set_seed(99)
    serial = dict(make_model(tied=True).named_parameters())
    padded = make_model(model_options={"vocab_size": 2 * V}, tied=True)
    name = "embedding.word_embeddings.weight"
    assert_close(dict(padded.named_parameters())[name][:V], serial[name], EXACT, "padded table")
    half = dict(make_model(tied=True, params_dtype=torch.bfloat16).named_parameters())
    assert torch.equal(half[name], serial[name].bfloat16())
    for chunk in make_stages(2, 2, tied=True):
        names = canonical_names(chunk)
        for local, parameter in chunk.named_parameters():
            tied_to = get_param_meta(parameter).tied_to
            assert_close(parameter, serial[tied_to or names[local]], EXACT, local)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("p", "v"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_pipeline_of_chunks_gives_the_bits_of_the_whole_model_with_dropout(family, p, v, tied):
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    rng_state().set_seed(7)
    whole = make_model(family=family, tied=tied, **dropout)
    chunks = make_stages(p, v, family=family, tied=tied, **dropout)
    tokens, labels = text()
    rng_state().begin_step(32, micro_batch_size=2, dp_rank=0, dp_size=1)
    expected = whole(tokens, None, None, labels=labels)
    loss = run_stages(chunks, tokens, labels)
    assert_close(loss, expected, EXACT, "loss")
    expected.sum().backward()
    loss.sum().backward()
    serial = {name: parameter.grad for name, parameter in whole.named_parameters()}
    total: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        names = canonical_names(chunk)
        for local, parameter in chunk.named_parameters():
            name = get_param_meta(parameter).tied_to or names[local]
            total[name] = total[name] + parameter.grad if name in total else parameter.grad
    assert total.keys() == serial.keys()
    for name, grad in total.items():
        assert_close(grad, serial[name], FP32_REORDERED_SUM, f"gradient of {name}")


def test_the_loss_does_not_depend_on_the_padding_of_the_vocabulary():
    rng_state().set_seed(7)
    tokens, labels = text()
    losses = [
        make_model(model_options={"vocab_size": size}, unpadded_vocab_size=V)(
            tokens, None, None, labels=labels
        )
        for size in (V, 2 * V)
    ]
    assert_close(losses[1], losses[0], FP32_REORDERED_SUM, "loss with padding")


def test_the_weight_of_embedding_or_head_is_on_the_first_and_last_stage():
    first, *middle, last = (
        chunk.shared_embedding_or_output_weight() for chunk in make_stages(4, tied=True)
    )
    assert first is not None
    assert middle == [None, None]
    assert last is not None
    assert get_param_meta(last).tied_to == "embedding.word_embeddings.weight"
    assert get_param_meta(first).tied_to is None
    assert get_param_meta(first).is_embedding_or_output
    untied = make_model(tied=False)
    assert untied.shared_embedding_or_output_weight() is untied.embedding.word_embeddings.weight
    *_, last = make_stages(2, tied=False)
    assert last.shared_embedding_or_output_weight() is last.output_layer.weight


def test_position_ids_choose_learned_positions():
    model = make_model()
    tokens, _ = text(2, 5)
    shifted = torch.arange(3, 8).expand(2, 5)
    default = model(tokens, None, None)
    assert torch.equal(model(tokens, torch.arange(5).unsqueeze(0), None), default)
    assert not torch.allclose(model(tokens, shifted, None), default)


def test_an_attention_mask_separates_documents():
    model = make_model(family="llama")
    tokens, _ = text(1, 8)
    document = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    mask = (document[:, None] != document[None])[None, None]
    together = model(tokens, None, mask)
    # Rotary positions are relative, so the second document alone gives the same logits.
    alone = model(tokens[:, 3:], None, None)
    assert_close(together[:, 3:], alone, FP32_REORDERED_SUM, "logits of the second document")


def test_decoder_input_replaces_the_embedding():
    model = make_model()
    tokens, _ = text(2, 6)
    hidden = model.embedding(tokens, None)
    assert torch.equal(model(None, None, None, decoder_input=hidden), model(tokens, None, None))


def test_logit_dtype_changes_returned_logits_only():
    model = make_model(model_options={"logit_dtype": torch.float64})
    tokens, labels = text()
    assert model(tokens, None, None).dtype == torch.float64
    assert model(tokens, None, None, labels=labels).dtype == torch.float32


def test_a_sequence_longer_than_the_learned_positions_is_refused():
    with pytest.raises(ConfigError, match="max-position-embeddings"):
        make_model()(torch.zeros(1, P + 1, dtype=torch.long), None, None)


def test_positions_that_do_not_exist_are_refused_when_the_model_is_built():
    with pytest.raises(ConfigError, match="alibi"):
        make_model(model_options={"position_embedding_type": "alibi"})


@pytest.mark.parametrize("options", [{"fp8": "hybrid"}])
def test_specs_of_layers_that_do_not_exist_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        get_gpt_layer_local_spec(**options)


def test_document_borders_are_brought_into_form_once_for_all_layers(monkeypatch):
    forms = []
    original = PackedSeqParams._document_ids

    def counted(self, *args):
        forms.append(self)
        return original(self, *args)

    monkeypatch.setattr(PackedSeqParams, "_document_ids", counted)
    tokens = torch.randint(0, 13, (1, 8))
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 3, 8], dtype=torch.int32))
    model = make_model(num_layers=3)
    model(tokens, torch.arange(8)[None], None, labels=tokens, packed_seq_params=packed)
    assert len(forms) == 1


@pytest.mark.parametrize("latents", [False, True])
def test_learned_scales_of_queries_count_positions_from_the_start_of_a_document(latents):
    model = make_model(
        family="llama", scalable_softmax=True, **(FUSED_FIELDS["latents"] if latents else {})
    )
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.self_attention.query_scale.scale.normal_()
    tokens = torch.randint(0, 13, (1, 8))
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 3, 8], dtype=torch.int32))
    together = model(tokens, None, None, packed_seq_params=packed)
    apart = [model(part, None, None) for part in tokens.split([3, 5], 1)]
    assert_close(together, torch.cat(apart, 1), FP32_REORDERED_SUM, "logits")


@pytest.mark.parametrize("latents", [False, True])
def test_the_factor_on_queries_counts_positions_from_the_start_of_a_document(latents):
    fields = {"query_scale_beta": 0.7, "original_max_position_embeddings": 2}
    fields |= FUSED_FIELDS["latents"] if latents else {}
    model = make_model(family="llama", **fields)
    tokens = torch.randint(0, 13, (1, 8))
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 3, 8], dtype=torch.int32))
    together = model(tokens, None, None, packed_seq_params=packed)
    apart = [model(part, None, None) for part in tokens.split([3, 5], 1)]
    assert_close(together, torch.cat(apart, 1), FP32_REORDERED_SUM, "logits")
    model.config.query_scale_beta = 0.0
    for layer in model.decoder.layers:
        layer.self_attention.config.query_scale_beta = 0.0
    assert not torch.allclose(model(tokens, None, None, packed_seq_params=packed), together)


FUSED_FIELDS = {
    "dense": {},
    "experts": {"num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True},
    "latents": {
        "multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": 8,
        "kv_lora_rank": 8, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("fields", FUSED_FIELDS.values(), ids=FUSED_FIELDS)
def test_layers_under_the_names_of_transformer_engine_compute_the_same(fields, monkeypatch):
    monkeypatch.setattr(transformer_engine, "HAVE_TE", False)
    config = TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=N, ffn_hidden_size=F_,
        hidden_dropout=0.0, attention_dropout=0.0, **(LLAMA | fields),
    )  # fmt: skip
    local, fused = (
        GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=fuses, pp_rank=0),
            vocab_size=V,
            max_sequence_length=P,
            position_embedding_type="rope",
            pg_collection=ProcessGroupCollection.single(),
        )
        for fuses in (False, True)
    )
    named, named_fused = dict(local.named_parameters()), dict(fused.named_parameters())
    declared, declared_fused = local.sharded_state_dict(), fused.sharded_state_dict()
    place = {(declared[n].key, declared[n].global_offset): n for n in named}
    fused_declared = {n: declared_fused[n] for n in named_fused}
    same = {n: place[part.key, part.global_offset] for n, part in fused_declared.items()}
    assert sorted(same.values()) == sorted(named)
    latent = config.multi_latent_attention
    column = "linear_kv_up_proj" if latent else "linear_qkv"
    assert f"decoder.layers.0.self_attention.{column}.layer_norm_weight" in named_fused
    for name in named_fused:  # away from one, which would hide a scale that is not applied
        if "norm" in name:
            with torch.no_grad():
                named[same[name]].uniform_(0.5, 1.5)
        named_fused[name].data.copy_(named[same[name]])
    tokens = torch.randint(0, V, (2, 8))
    for model in (local, fused):
        model(tokens, torch.arange(8)[None], None, labels=tokens).mean().backward()
    for name, parameter in named_fused.items():
        assert_close(parameter.grad, named[same[name]].grad, EXACT, name)
