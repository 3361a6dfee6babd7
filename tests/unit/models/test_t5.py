"""T5 by itself: its buckets, its constructors, its size, and what its flags mean."""

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.common.embeddings.relative_pos_embedding import (
    relative_position_buckets,
)
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import (
    decoder_layer,
    encoder_layer,
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron.core.transformer.backend import LocalBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.cli.parser import parse_command_line
from megatron.training.metrics.model_size import ModelSize
from megatron.training.rules import resolve_and_check

LINE = (
    "--encoder-num-layers 2 --decoder-num-layers 3 --hidden-size 32 --num-attention-heads 4"
    " --kv-channels 12 --ffn-hidden-size 48 --encoder-seq-length 16 --decoder-seq-length 8"
    " --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 16 --lr 1e-3"
    " --train-iters 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
    " --vocab-extra-ids 10 --transformer-impl local"
)


def checked(line, architecture="t5", world_size=8):
    words = line.split()
    return resolve_and_check(
        lambda: parse_command_line(words, args_defaults={"architecture": architecture}),
        lambda config: world_size,
    )


def problem_of(line, **options):
    with pytest.raises(ConfigError) as raised:
        checked(line, **options)
    (problem,) = raised.value.problems
    return problem


def sizes(num_layers):
    return {"num_layers": num_layers, "hidden_size": 32, "num_attention_heads": 4}


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 16), (4, 3)])
def test_distances_have_the_buckets_of_transformers(bidirectional, num_buckets, max_distance):
    options = {"bidirectional": bidirectional, "num_buckets": num_buckets}
    mine = relative_position_buckets(70, 300, max_distance=max_distance, **options)
    distance = torch.arange(300)[None] - torch.arange(70)[:, None]
    theirs = T5Attention._relative_position_bucket(distance, max_distance=max_distance, **options)
    assert torch.equal(mine, theirs)


def test_a_config_for_each_stack_builds_the_model_of_one_config_for_both():
    """Megatron's constructor: the decoder's config, the encoder's, and all layers of each."""
    options = {"vocab_size": 64, "max_sequence_length": 16, "position_embedding_type": "relative"}
    of_each = T5Model(
        TransformerConfig(**sizes(3)),
        TransformerConfig(**sizes(2)),
        get_t5_encoder_with_local_block_spec(2),
        get_t5_decoder_with_local_block_spec(3),
        **options,
    ).eval()
    of_both = T5Model(
        TransformerConfig(**sizes(5), encoder_num_layers=2),
        None,
        encoder_layer(LocalBackend()),
        decoder_layer(LocalBackend()),
        **options,
    ).eval()
    of_each.load_state_dict(of_both.state_dict())  # depth scales initial values: they differ
    read, written = torch.arange(12).view(2, 6), torch.arange(8).view(2, 4)
    assert torch.equal(of_each(read, written), of_both(read, written))


@pytest.mark.parametrize("positions", ["relative", "learned_absolute", "none"])
def test_the_size_is_that_of_the_model(positions):
    run = checked(f"{LINE} --position-embedding-type {positions}")
    model = T5Model(
        run.transformer_config,
        None,
        encoder_layer(LocalBackend()),
        decoder_layer(LocalBackend()),
        vocab_size=128,
        max_sequence_length=16,
        share_embeddings_and_output_weights=True,
        position_embedding_type=positions,
    )
    built = sum(parameter.numel() for parameter in model.parameters())
    assert ModelSize.from_settings(run, 128).total_parameters == built


def test_layers_of_both_stacks_are_counted():
    assert checked(LINE).model.num_layers == 5
    of_encoder = checked(LINE.replace("--encoder-num-layers", "--num-layers")).model
    assert (of_encoder.num_layers, of_encoder.encoder_num_layers) == (5, 2)
    same = checked(LINE.replace(" --decoder-num-layers 3", "")).model
    assert (same.num_layers, same.encoder_num_layers) == (4, 2)


def test_the_flag_of_an_encoder_is_the_number_of_layers_of_one_stack():
    line = LINE.replace(" --decoder-num-layers 3", "")
    assert checked(line, architecture="bert").model.num_layers == 2
    problem = problem_of(f"{line} --num-layers 4", architecture="bert")
    assert problem.flags == ("--encoder-num-layers", "--num-layers")


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--tensor-model-parallel-size 4 --sequence-parallel --decoder-seq-length 6",
         "--decoder-seq-length"),
        ("--decoder-seq-length 20", "--decoder-seq-length"),
        ("--num-layers 9", "--decoder-num-layers"),
        ("--group-query-attention --num-query-groups 1 --tensor-model-parallel-size 2",
         "--num-query-groups"),
        ("--position-embedding-type relative --relative-attention-num-buckets 2",
         "--relative-attention-num-buckets"),
    ],
)  # fmt: skip
def test_what_a_t5_cannot_do_is_refused_by_its_flag(words, flag):
    assert flag in problem_of(f"{LINE} {words}").flags
