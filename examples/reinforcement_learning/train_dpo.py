"""DPO: prefer answers that repeat the prompt's token to answers at random; then save and load.

    torchrun --nproc-per-node 2 examples/reinforcement_learning/train_dpo.py

Flags of pretrain_gpt.py choose another layout, for example --tensor-model-parallel-size 2
--sequence-parallel, or --pipeline-model-parallel-size 2.
"""

import shutil
import tempfile
from functools import partial

import torch
from policy import TINY, Batch, Policy, reference_model

from megatron.core import parallel_state
from megatron.post_training.log_probs import compute_log_probs
from megatron.post_training.loss_functions import dpo_loss_func
from megatron.training import get_args, initialize_megatron, print_rank_0

LENGTH, MICRO_BATCHES = 8, 2


def preferences(policy: Policy, step: int) -> list[Batch]:
    """Return micro batches of pairs: each even sample is preferred to the next sample."""
    rank = parallel_state.get_data_parallel_rank()
    draw = torch.Generator().manual_seed(1000 * step + rank)
    rows = get_args().micro_batch_size * MICRO_BATCHES
    text = torch.randint(policy.num_valid, (rows, LENGTH + 1), generator=draw)
    text[::2, 1:] = text[::2, :1]
    text[1::2, 0] = text[::2, 0]
    parts = text.split(get_args().micro_batch_size)
    return [{"tokens": part[:, :-1].clone(), "labels": part[:, 1:].clone()} for part in parts]


def main() -> None:
    """Train, print the metrics of the loss, and continue from a checkpoint."""
    initialize_megatron(args_defaults=TINY | {"train_iters": 20, "lr": 1e-3})
    policy, reference = Policy(), reference_model()
    for step in range(1, get_args().train_iters + 1):
        batches = preferences(policy, step)
        anchors = compute_log_probs(reference, batches)
        for batch, anchor in zip(batches, anchors, strict=True):
            batch["reference_log_probs"] = anchor.log_probs
        report = policy.update(batches, partial(dpo_loss_func, beta=0.1))
        if "dpo loss" in report and step % 5 == 0:  # on the last stage
            figures = ", ".join(f"{name} {value:.3f}" for name, value in report.items())
            print(f"step {step}: {figures}", flush=True)
    place = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(place)
    policy.save(f"{place[0]}/checkpoint")
    other = Policy()
    other.load(f"{place[0]}/checkpoint")
    both = [one.log_probs(preferences(policy, 0))[0] for one in (policy, other)]
    print_rank_0(f"loaded again: the same log-probabilities: {torch.equal(*both)}")
    torch.distributed.barrier()
    if place[0] and torch.distributed.get_rank() == 0:
        shutil.rmtree(place[0])


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
