"""Scripts written against Megatron's functions: their own loop gives the curve of `pretrain`."""

import contextlib
import io
import os
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from megatron.training.hooks.log import LinesForFirstRank
from megatron.training.launch.printing import is_last_rank
from megatron.training.run.state import StopReason, TrainState
from tests.distributed.training.test_pretraining import SMALL, losses
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, assert_close
from tests.parity.training_run import read_metrics, train_with_flags


def own_loop(groups: ProcessGroupCollection, words: list[str]) -> list[float]:
    """Train as a third party's script would, with the functions that Megatron has."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.utils import get_model_config
    from megatron.training import (
        build_train_valid_test_data_iterators,
        get_args,
        get_timers,
        get_tokenizer,
        initialize_megatron,
        print_rank_0,
        setup_model_and_optimizer,
        train_step,
    )
    from megatron.training.arguments import core_transformer_config_from_args, parse_args
    from pretrain_gpt import datasets_provider, forward_step, model_provider

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    store = dist.PrefixStore("run", dist.distributed_c10d._get_default_store())
    with contextlib.redirect_stdout(io.StringIO()):
        initialize_megatron(parsed_args=parse_args(args=words), store=store)
        args = get_args()
        print_rank_0(f"{args.num_layers} layers, {get_tokenizer().vocab_size} ids, {get_timers()}")
        config = core_transformer_config_from_args(args)
        assert (config.num_layers, config.ffn_hidden_size) == (4, 128)
        model, optimizer, scheduler = setup_model_and_optimizer(model_provider)
        assert unwrap_model(model)[0].config.hidden_size == 32
        train, _, _ = build_train_valid_test_data_iterators(datasets_provider)
        found = []
        for _ in range(args.train_iters):
            reported, skipped, _, _, _, grad_norm, _ = train_step(
                forward_step, train, model, optimizer, scheduler, get_model_config(model[0]),
                get_forward_backward_func(),
            )  # fmt: skip
            assert not skipped
            assert grad_norm is not None
            args.iteration += 1
            args.consumed_train_samples += args.global_batch_size
            found.append(reported["lm loss"])
    return found


def test_a_loop_of_ones_own_gives_the_same_losses(tmp_path):
    expected = losses(tmp_path, 1, "")
    (found,) = run_distributed(own_loop, 1, SMALL.split(), timeout_s=120.0)
    assert_close(found, expected, EXACT, "losses")


def my_spec(config):
    """A spec as `--spec` names it."""
    return get_gpt_layer_local_spec(normalization=config.normalization)


def test_a_layer_spec_is_taken_from_a_module_of_the_user(tmp_path):
    flags = f"--spec {__name__} my_spec"
    assert losses(tmp_path, 1, flags) == losses(tmp_path, 1, "")


def write_corpus(prefix: Path, num_documents: int = 40) -> None:
    """Write documents of random length over 89 ids, each ended by id 89."""
    random = numpy.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(num_documents):
        length = int(random.integers(5, 30))
        tokens = [*random.integers(0, 89, length).tolist(), 89]
        builder.add_document(torch.tensor(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def test_masks_that_follow_documents_reach_every_stage(tmp_path):
    write_corpus(tmp_path / "corpus")
    base = (
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16"
        " --tokenizer-type NullTokenizer --vocab-size 90 --micro-batch-size 2"
        " --global-batch-size 4 --train-iters 3 --lr 1e-2 --log-interval 1 --num-workers 0"
        f" --data-path {tmp_path}/corpus --split 80,20,0 --eval-interval 3 --full-validation"
    )
    masks = " --reset-attention-mask --reset-position-ids --eod-mask-loss"
    found = {}
    for name, flags, world_size, layout in (
        ("plain", "", 1, {}),
        ("masked", masks, 1, {}),
        ("masked pp 2", masks + " --pipeline-model-parallel-size 2", 2, {"pp": 2}),
    ):
        path = tmp_path / f"{name}.jsonl"
        words = [*base.split(), *flags.split(), "--metrics-jsonl", str(path)]
        run_distributed(train_with_flags, world_size, words, timeout_s=120.0, **layout)
        found[name] = [line["lm loss"] for line in read_metrics(path)]
    assert_close(found["masked pp 2"], found["masked"], FP32_REORDERED_SUM, "losses")
    assert found["masked"][0] != found["plain"][0]


def print_what_the_last_rank_knows(groups: ProcessGroupCollection) -> str:
    relay = LinesForFirstRank([1])
    if is_last_rank():
        relay.write("lm loss: 4.5")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        relay.after_step(TrainState(iteration=1), None)
        relay.after_training(TrainState(iteration=1), StopReason.FINISHED)
        relay.close()
    return out.getvalue()


def test_losses_of_the_last_rank_are_printed_once_by_the_first():
    assert run_distributed(print_what_the_last_rank_knows, 2) == ["lm loss: 4.5\n", ""]
