"""GRPO with a rule for a reward: write the prompt's token again and again.

    torchrun --nproc-per-node 2 examples/reinforcement_learning/train_grpo.py

Two replicas by default; flags of pretrain_gpt.py choose another layout or a larger model, for
example --tensor-model-parallel-size 2. Each step draws samples with the generator of this library,
rewards them, and takes two clipped steps.
"""

import sys
import time
from functools import partial

import torch
from policy import TINY, Policy, mean_of_replicas, reference_model

from megatron.core import parallel_state
from megatron.inference.generate import generate
from megatron.inference.sampling import Sampling
from megatron.post_training.log_probs import compute_log_probs
from megatron.post_training.loss_functions import group_advantages, grpo_loss_func
from megatron.training import get_args, initialize_megatron, print_rank_0

PROMPTS, SAMPLES, NEW_TOKENS, UPDATES = 16, 16, 7, 2
LOSS = partial(grpo_loss_func, clip_ratio=0.2, kl_coef=0.01)


def roll_out(policy: Policy, step: int) -> tuple[list[dict[str, torch.Tensor]], float]:
    """Draw samples of this replica's prompts; return micro batches and the mean reward."""
    args, rank = get_args(), parallel_state.get_data_parallel_rank()
    draw = torch.Generator().manual_seed(1000 * step + rank)
    words = torch.randint(policy.num_valid, (PROMPTS, 1), generator=draw)
    prompts = words.repeat_interleave(SAMPLES, 0)
    rows = generate(
        policy.model,
        prompts.tolist(),
        max_new_tokens=NEW_TOKENS,
        vocab_size=policy.num_valid,
        max_sequence_length=args.seq_length,
        sampling=Sampling(temperature=1.0, seed=1000 * step + rank),
        max_rows=len(prompts),
    )
    text = torch.tensor(rows)
    answers = text[:, 1:]
    rewards = (answers == prompts).float().mean(-1)
    advantages = group_advantages(rewards.view(PROMPTS, SAMPLES)).flatten()
    whole = {
        "tokens": text[:, :-1].contiguous(),
        "labels": answers.contiguous(),
        "advantages": advantages[:, None].expand(answers.shape).contiguous(),
    }
    parts = zip(*(tensor.split(args.micro_batch_size) for tensor in whole.values()), strict=True)
    return [dict(zip(whole, part, strict=True)) for part in parts], float(rewards.mean())


def main() -> None:
    """Train, and print the reward of every fifth step."""
    begin = time.monotonic()
    initialize_megatron(args_defaults=TINY)
    policy, reference = Policy(), reference_model()
    for step in range(1, get_args().train_iters + 1):
        batches, reward = roll_out(policy, step)
        old = policy.log_probs(batches)
        anchors = compute_log_probs(reference, batches)
        for batch, log_probs, anchor in zip(batches, old, anchors, strict=True):
            batch["old_log_probs"], batch["reference_log_probs"] = log_probs, anchor.log_probs
        reports = [policy.update(batches, LOSS) for _ in range(UPDATES)]
        reward = mean_of_replicas(reward)
        if step == 1 or step % 5 == 0:
            rest = ", ".join(f"{name} {value:.3f}" for name, value in reports[-1].items())
            print_rank_0(f"step {step}: reward {reward:.3f}, {rest}")
    buckets = list(policy.weights())
    names = [name for bucket in buckets for name in bucket]
    print_rank_0(f"{len(names)} tensors for a generator elsewhere, from {names[0]} to {names[-1]}")
    print_rank_0(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    torch.distributed.destroy_process_group()
