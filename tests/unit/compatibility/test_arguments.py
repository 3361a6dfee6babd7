"""Arguments of Megatron's signatures act, or are refused; none is dropped where it would matter."""

import contextlib
import io
import logging
from argparse import Namespace

import pytest
import torch

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.foundation.errors import CheckpointError, ConfigError, MegatronError
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    get_num_microbatches,
)
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.data import broadcast_data
from megatron.core.tensor_parallel.random import (
    CheckpointWithoutOutput,
    CudaRNGStatesTracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import divide
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron_lattice import deepspeed
from megatron_lattice.deepspeed.ops.adam import DeepSpeedCPUAdam


def small_block() -> TransformerBlock:
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    return TransformerBlock(config, get_gpt_layer_local_spec())


@pytest.mark.parametrize(
    "given",
    [
        {"rotary_pos_cos_sin": torch.zeros(1)},
        {"sequence_len_offset": torch.tensor([3])},
        {"extract_layer_indices": [0]},
        {"dynamic_inference_decode_only": True},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_block_refuses_what_it_would_not_follow(given):
    block = small_block()
    with pytest.raises(ConfigError, match=next(iter(given))):
        block(torch.zeros(4, 1, 16), None, **given)
    assert block(torch.zeros(4, 1, 16), None, extract_layer_indices=[]).shape == (4, 1, 16)


def test_a_layer_and_its_attention_refuse_what_they_would_not_follow():
    layer = small_block().layers[0]
    hidden = torch.zeros(4, 1, 16)
    for module, given in (
        (layer, {"rotary_pos_cos_sin": hidden}),
        (layer, {"sequence_len_offset": 3}),
        (layer.self_attention, {"rotary_pos_cos_sin": hidden}),
        (layer.self_attention, {"sequence_len_offset": 3}),
    ):
        with pytest.raises(ConfigError, match=next(iter(given))):
            module(hidden, None, **given)


def test_fp8_is_refused_by_the_specs_of_both_backends():
    for make in (get_gpt_layer_with_transformer_engine_submodules, get_gpt_layer_local_spec):
        with pytest.raises(ConfigError, match="fp8"):
            make(fp8="e4m3")


@pytest.mark.parametrize(
    "given", [{"gtp_remat_rank": 1}, {"gtp_remat_world_size": 2}, {"egtp_remat_rank": 1}]
)
def test_seeds_by_an_axis_that_does_not_exist_are_refused(given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        model_parallel_cuda_manual_seed(1, **given)


def test_one_rank_of_an_axis_that_does_not_exist_is_fine():
    model_parallel_cuda_manual_seed(1, gtp_remat_rank=0, gtp_remat_world_size=1)


def test_packed_sequences_refuse_ranks_of_their_own():
    packed = PackedSeqParams("thd", torch.tensor([0, 4]), local_cp_size=2)
    with pytest.raises(ConfigError, match="local_cp_size"):
        packed.resolve(1, 4, torch.device("cpu"))


class Tiny(torch.nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(2)))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return {
            prefix + name: ShardedTensor.from_rank_offsets(prefix + name, parameter.detach())
            for name, parameter in self.named_parameters()
        }


def settings(directory) -> Namespace:
    return Namespace(save=str(directory), load=str(directory))


def test_strict_false_keeps_what_the_checkpoint_lacks_and_says_so(tmp_path, caplog):
    args = settings(tmp_path)
    saved, loaded = Tiny("a"), Tiny("a", "b")
    with torch.no_grad():
        saved.a.fill_(5.0)
    with contextlib.redirect_stdout(io.StringIO()):
        save_checkpoint(3, [saved], None, None, 0.0, args=args)
        with pytest.raises(CheckpointError, match="not in the checkpoint"):
            load_checkpoint([loaded], None, None, args=args)
        with caplog.at_level(logging.WARNING):
            assert load_checkpoint([loaded], None, None, strict=False, args=args)[0] == 3
    assert (loaded.a.tolist(), loaded.b.tolist()) == ([5.0, 5.0], [1.0, 1.0])
    assert "b" in caplog.text


def test_ranks_of_another_process_and_a_load_of_nothing_are_refused(tmp_path):
    args, model = settings(tmp_path), [Tiny("a")]
    for given in ({"pipeline_rank": 1}, {"tensor_rank": 2}, {"expert_rank": 1}):
        with pytest.raises(ConfigError, match=next(iter(given))):
            save_checkpoint(3, model, None, None, 0.0, args=args, **given)
    with pytest.raises(ConfigError, match="skip_load_to_model_and_opt"):
        load_checkpoint(model, None, None, skip_load_to_model_and_opt=True, args=args)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: divide(10, 4), "10 is not divisible by 4"),
        (lambda: divide(10, 0), "10 is not divisible by 0"),
        (lambda: ProcessGroupCollection.use_mpu_process_groups(["tp", "xp"]), "xp"),
        (lambda: DynamicGradScaler(2.0, 4.0), "--min-loss-scale"),
        (lambda: CudaRNGStatesTracker().fork("no").__enter__(), "no random stream 'no'"),
        (lambda: broadcast_data(["text"], None, torch.int64), "text"),
        (get_num_microbatches, "init_num_microbatches_calculator"),
    ],
)
def test_what_others_pass_is_checked_by_errors_that_python_cannot_switch_off(call, words):
    destroy_num_microbatches_calculator()
    with pytest.raises(MegatronError, match=words):
        call()


def test_a_random_stream_is_added_once():
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    for name, seed in (("a", 2), ("b", 1)):
        with pytest.raises(ConfigError, match="exists already"):
            tracker.add(name, seed)


def test_what_would_change_a_result_is_refused_by_name():
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    layer = small_block().layers[0]
    hidden = torch.zeros(4, 1, 16)
    for words, call in (
        ("key_value_states", lambda: layer.self_attention(hidden, None, key_value_states=hidden)),
        ("intermediate", lambda: layer.mlp(hidden, intermediate_tensors=hidden)),
        ("fp8_input_store", lambda: bias_swiglu_impl(hidden, None, fp8_input_store=True)),
        ("fp8", lambda: CheckpointWithoutOutput(fp8=True)),
        ("dtype", lambda: deepspeed.zero.Init(dtype=torch.half).__enter__()),
        ("fp32_optimizer_states", lambda: DeepSpeedCPUAdam([hidden], fp32_optimizer_states=False)),
        (
            "tokentype_ids",
            lambda: LanguageModelEmbedding(config, 8, 8)(
                torch.zeros(1, 4, dtype=torch.int64), None, torch.zeros(1, 4, dtype=torch.int64)
            ),
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            call()
