"""Flip random bits of random tensors on random ranks, and see what the comparisons say.

A run compares its replicas every `INTERVAL` steps, and the norm of its gradient in every step, as
`--check-weight-hash-across-dp-replicas-interval` does. In a random step one bit of one element
changes on one rank: of a weight, of a reduced gradient before the update, of a main weight or of a
moment. By the end of the interval all ranks must have raised the same error, and it must name the
rank and the tensor. Without a flip nothing may be raised.

A flip in one of the lowest bits of a moment may be rounded away by the next update. Where the ranks
hold equal bits everywhere at the end of the interval, it did nothing, and is counted by itself.
"""

import random
import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.foundation.errors import ReplicaMismatchError
from megatron.resilience.replica_check import (
    ReplicaCheck,
    copies_of_gradients,
    copies_of_model,
    copies_of_state,
)
from tests.distributed.checkpointing.gpt_run import Layout, Model, Run
from tests.harness.distributed import run_distributed

INTERVAL = 4
"""Steps between comparisons."""
KINDS = ("weight", "gradient", "fp32 weight", "exp_avg", "exp_avg_sq")
WORDS = {2: torch.int16, 4: torch.int32}

LAYOUTS = (
    (Layout(dp=4), Model(dtype="bf16"), KINDS, 1),
    (Layout(dp=4), Model(), ("weight", "gradient", "exp_avg", "exp_avg_sq"), 1),
    (Layout(dp=2, tp=2), Model(dtype="bf16"), KINDS, 1),
    (Layout(dp=2, pp=2), Model(dtype="bf16"), KINDS, 1),
    (Layout(dp=4, ep=2), Model(experts=4), ("weight", "gradient", "exp_avg"), 1),
    (Layout(dp=4, zero=1), Model(dtype="bf16"), KINDS, 2),
    (Layout(dp=4, zero=3), Model(dtype="bf16"), KINDS[1:], 2),
)
"""Layout, model, what is flipped, and copies of sharded state."""


@dataclass(frozen=True)
class Flip:
    """One bit that changes."""

    layout: Layout
    model: Model
    kind: str
    num_instances: int
    seed: int

    def draw(self) -> tuple[int, int]:
        """Return (rank, step)."""
        chosen = random.Random(self.seed)
        rank = chosen.randrange(self.layout.size)
        if self.layout.zero == 3:
            rank -= rank % 2  # the units of so small a model are whole shards of these
        return rank, chosen.randint(1, INTERVAL)


def flip_in(run: Run, flip: Flip) -> str:
    """Change a bit of a tensor of which there is a copy; return the tensor's name."""
    chosen = random.Random(f"{flip.seed} on the rank")
    found = (
        copies_of_gradients(run.optimizer)
        if flip.kind == "gradient"
        else copies_of_model(run.chunks, run.groups)
        if flip.kind == "weight"
        else copies_of_state(run.optimizer)
    )
    groups = ("dp_cp", "expt_dp", "inter_dist_opt")
    held = {
        name: tensor
        for group in groups
        if getattr(run.groups, group).size() > 1
        for name, tensor in found.get(group, [])
        if name.startswith(f"{flip.kind} ")
    }
    name = chosen.choice(sorted(held))
    words = held[name].detach().view(-1).view(WORDS[held[name].element_size()])
    bit = chosen.randrange(8 * words.element_size())
    mask = (1 << bit) - (1 << 8 * words.element_size()) * (bit == 8 * words.element_size() - 1)
    words[chosen.randrange(words.numel())] ^= mask
    return f"{name}, bit {bit}"


def train_and_compare(groups: Any, flip: Flip | None, case: Flip) -> dict[str, Any]:
    """Train for an interval with a flip in it; return what was said, and what was flipped."""
    ddp = {"num_distributed_optimizer_instances": case.num_instances}
    run = Run(groups, case.layout, case.model, ddp=ddp)
    run.train(INTERVAL)
    rank, step = (-1, 0) if flip is None else flip.draw()
    done: dict[str, Any] = {"name": "", "said": "", "step": step, "noticed_at": 0}
    check = ReplicaCheck(run.chunks, run.optimizer, groups)
    check.compare(INTERVAL)
    run.optimizer.norm_checks.append(
        lambda norm: check.before_update(norm, run.train_state.iteration + 1)
    )
    take_step = run.optimizer.step

    def step_with_flip() -> Any:
        is_now = run.train_state.iteration + 1 == INTERVAL + step
        if is_now and flip is not None and flip.kind == "gradient" and dist.get_rank() == rank:
            done["name"] = flip_in(run, flip)
        return take_step()

    run.optimizer.step = step_with_flip
    try:
        for number in range(1, INTERVAL + 1):
            done["noticed_at"] = number
            run.train(1)
            is_now = flip is not None and number == step and flip.kind != "gradient"
            if is_now and dist.get_rank() == rank:
                done["name"] = flip_in(run, flip)
        check.compare(run.train_state.iteration)
    except ReplicaMismatchError as error:
        done["said"] = error.found
    return done


def judge(flip: Flip, results: list[dict[str, Any]]) -> str:
    """Return "noticed", or what is wrong."""
    rank, _ = flip.draw()
    said = results[0]["said"]
    name = results[rank]["name"].rsplit(", bit", 1)[0]
    if any(result["said"] != said for result in results):
        return "ranks do not agree"
    if not said:
        # Everything has been compared: what was flipped is equal again.
        return "rounded away" if flip.kind.startswith("exp_avg") else "missed"
    first = said.split("\n")[1]
    parameter = name.split(" ", 1)[1]
    if parameter not in said:
        return f"another tensor than {name}: {first}"
    # "on global ranks [2] differs from [0, 1, 3]", or of two "between global ranks [[0], [1]]".
    blamed = first.split("global ranks")[1].split("differs from")[0]
    ranks = [int(number) for number in re.findall(r"\d+", blamed)]
    # Without a majority both sides are named. Ranks of a machine that share the memory of gathered
    # weights are on one side.
    if rank not in ranks or ("differs from" in first and ranks != [rank]):
        return f"another rank than {rank}: {first}"
    return "noticed"


def cases(num_flips: int, seed: int) -> list[Flip]:
    """Return layouts and kinds in turn."""
    every = [(*rest, kind) for *rest, kinds, _ in LAYOUTS for kind in kinds]
    sizes = {(str(layout), model): number for layout, model, _, number in LAYOUTS}
    chosen = []
    for index in range(num_flips):
        layout, model, kind = every[index % len(every)]
        number = sizes[str(layout), model]
        chosen.append(Flip(layout, model, kind, number, seed * 10_000 + index))
    return chosen


def run_case(case: Flip, *, flips: bool = True) -> list[dict[str, Any]]:
    """Run on the ranks of the case's layout."""
    return run_distributed(
        train_and_compare, case.layout.size, case if flips else None, case,
        **case.layout.axes(), num_distributed_optimizer_instances=case.num_instances,
    )  # fmt: skip


def campaign(num_cases: int, seed: int) -> bool:
    """Flip bits in all layouts and kinds of tensors in turn; return whether all were noticed."""
    counts: Counter[str] = Counter()
    by_kind: Counter[tuple[str, str]] = Counter()
    is_right = True
    began = time.monotonic()
    chosen = cases(num_cases, seed)
    for case in chosen:
        results = run_case(case)
        verdict = judge(case, results)
        rank, step = case.draw()
        known = verdict if verdict in ("noticed", "rounded away") else "wrong"
        is_right &= known != "wrong"
        counts[known] += 1
        by_kind[case.kind, known] += 1
        late = results[0]["noticed_at"] - step
        print(
            f"{verdict}: {case.layout} {case.model.dtype} rank {rank} step {step}"
            f" {results[rank]['name']}" + (f", {late} steps later" if results[0]["said"] else ""),
            flush=True,
        )
    quiet = {(str(c.layout), c.model): c for c in chosen}.values()
    alarms = sum(bool(result["said"]) for c in quiet for result in run_case(c, flips=False))
    print(f"{len(quiet)} layouts without a flip: {alarms} alarms")
    for (kind, verdict), count in sorted(by_kind.items()):
        print(f"{kind:12} {verdict:14} {count}")
    print(f"{sum(counts.values())} flips in {time.monotonic() - began:.0f} s: {dict(counts)}")
    return is_right and not alarms
