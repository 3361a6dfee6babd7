"""A training script as forks of Megatron have it, with Megatron's own names, trains truly."""

import contextlib
import io
import multiprocessing
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import (
    StragglerDetector,
    check_param_hashes_across_dp_replicas,
    get_batch_on_this_cp_rank,
)
from megatron.resilience.status import RunStatus
from megatron.training import get_args, get_timers, get_tokenizer, inprocess_restart, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.cli.parser import parse_command_line
from megatron.training.setup.initialize import start_session
from megatron.training.training import PretrainCall, run_session
from megatron.training.utils import get_batch_on_this_tp_rank, get_blend_and_blend_per_split
from tests.distributed.training.test_pretraining import SMALL, losses
from tests.harness.distributed import distributed, run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.parity.training_run import read_metrics

stimer = StragglerDetector()


def model_provider(pre_process=True, post_process=True):
    args = get_args()
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(args.num_experts, args.moe_grouped_gemm),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )


def get_batch(data_iterator):
    if not mpu.is_pipeline_first_stage() and not mpu.is_pipeline_last_stage():
        return None, None, None, None, None
    batch = get_batch_on_this_tp_rank(data_iterator)
    return get_batch_on_this_cp_rank(batch).values()


def loss_func(loss_mask, output_tensor):
    losses, mask = output_tensor.float().view(-1), loss_mask.view(-1).float()
    loss, num_tokens = torch.sum(losses * mask), mask.sum()
    get_rerun_state_machine().validate_result(
        result=loss, rejection_func=torch.isnan, message="found NaN in the loss", fatal=True
    )
    reported = torch.stack([loss.detach(), num_tokens])
    return loss, num_tokens.int(), {"lm loss": reported}


def forward_step(data_iterator, model):
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator)
    timers("batch-generator").stop()
    with stimer:
        output = model(tokens, position_ids, attention_mask, labels=labels)
    return output, partial(loss_func, loss_mask)


def is_dataset_built_on_rank():
    is_end = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
    return is_end and mpu.get_tensor_model_parallel_rank() == 0


def datasets_provider(num_samples):
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        kind, num_samples, is_dataset_built_on_rank, config
    ).build()


datasets_provider.is_distributed = True


def train(groups, words):
    """Run the script's `__main__` in a process of the harness."""
    multiprocessing.set_start_method("fork", force=True)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    wrapped, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    assert store is None
    store = dist.PrefixStore("run", dist.distributed_c10d._get_default_store())
    assert wrapped is pretrain
    call = PretrainCall.of(
        (datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step), {}
    )
    with contextlib.redirect_stdout(io.StringIO()):
        session = start_session(lambda: parse_command_line(words), RunStatus(), store=store)
        run_session(session, call)


def test_a_fork_whose_first_tensor_rank_reads_the_data_trains_like_one_process(tmp_path):
    expected = losses(tmp_path, 1, "")
    path = tmp_path / "fork.jsonl"
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    words = [*SMALL.split(), *flags.split(), "--metrics-jsonl", str(path)]
    run_distributed(train, 4, words, timeout_s=120.0, tp=2, pp=2)
    found = [line["lm loss"] for line in read_metrics(path)]
    assert_close(found, expected, FP32_REORDERED_SUM, "losses")


@distributed(world_size=2, tp=2)
def test_only_the_first_tensor_rank_reads_and_all_get_its_batch(groups):
    sample = {
        "tokens": torch.arange(8).view(2, 4) + 10 * dist.get_rank(),
        "loss_mask": torch.ones(2, 4),
        "attention_mask": torch.ones(2, 1, 4, 4, dtype=torch.bool).triu(1),
        "unknown": "x",
    }
    mine = iter([sample]) if dist.get_rank() == 0 else None
    batch = get_batch_on_this_tp_rank(mine)
    assert list(batch) == ["tokens", "labels", "loss_mask", "attention_mask", "position_ids"]
    assert torch.equal(batch["tokens"], torch.arange(8).view(2, 4))
    assert batch["attention_mask"].dtype == torch.bool
    assert batch["labels"] is None
    assert list(get_batch_on_this_tp_rank(None).values()) == [None] * 5


@distributed(world_size=2, tp=2)
def test_a_batch_that_cannot_be_sent_is_refused_on_all_ranks(groups):
    mine = iter([{"tokens": torch.zeros(2, 4, dtype=torch.int32)}])
    with pytest.raises(DataError, match="tokens"):
        get_batch_on_this_tp_rank(mine if dist.get_rank() == 0 else None)


@distributed(world_size=2)
def test_replicas_that_differ_in_one_bit_are_told_apart(groups):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 4)
    assert check_param_hashes_across_dp_replicas([model], cross_check=True)
    if dist.get_rank() == 1:
        model.weight.data.view(torch.int32)[1, 1] ^= 1
    assert not check_param_hashes_across_dp_replicas([model])


@distributed(world_size=2)
def test_groups_that_would_not_be_as_asked_for_are_refused(groups):
    mpu.destroy_model_parallel()
    for given in (
        {"gtp_remat_size": 2},
        {"pipeline_model_parallel_comm_backend": "ucc"},
    ):
        with pytest.raises(ConfigError, match=next(iter(given))):
            mpu.initialize_model_parallel(**given)
    with pytest.warns(UserWarning, match="SHARP"):
        mpu.initialize_model_parallel(use_sharp=True)
