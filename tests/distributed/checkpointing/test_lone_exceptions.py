"""An exception on one rank, wherever it occurs in a save or a load, is an error on all ranks."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megatron
from megatron.core.dist_checkpointing.collective import AgreeingGroup
from megatron.core.dist_checkpointing.memory_copies import MemoryCopies
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transport.object_collectives import control_group
from megatron.training.checkpointing import CheckpointContext, CheckpointSettings
from megatron.training.checkpointing.memory import MemoryCheckpoints
from megatron.training.run.state import TrainState
from megatron_lattice import deepspeed
from tests.harness.distributed import run_distributed
from tests.unit.dist_checkpointing.runs import TinyModel, checkpointer

ROOT = str(Path(megatron.__file__).parent)
COMMUNICATION = (f"{ROOT}/core/transport/", f"{ROOT}/core/foundation/flight_recorder")
GUARDED = {"SaveInProgress.assign", "SaveInProgress.write", "MemoryReader.__enter__"}
GUARDED |= {"ShardStorage.take_copy", "Mesh.shard_size"}
"""Functions that consist of a `try` or `return` statement: they fail nowhere but inside of it."""
WAITS = {"DistributedDataParallel.summon_full_params", "DistributedDataParallel.finish_param_sync"}
WAITS |= {"ShardedParams.finish_gathers", "CopiesOfGroup._exchange"}
"""Functions that communicate and do nothing else, if there is anything to send."""
Actions = dict[str, Callable[[], object]]


@contextmanager
def watched_calls(see: Callable[[FrameType], None]) -> Iterator[None]:
    """Call `see` with the frame of each call of one of our functions on this thread."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            see(frame)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def steps_of(act: Callable[[], object]) -> list[str]:
    """Return the functions that `act` calls and that do not communicate, in order."""
    called: dict[CodeType, None] = {}
    communicates: set[CodeType] = set()

    def see(frame: FrameType) -> None:
        called.setdefault(frame.f_code)
        if frame.f_code.co_filename.startswith(COMMUNICATION):
            caller: FrameType | None = frame
            while caller is not None:
                communicates.add(caller.f_code)
                caller = caller.f_back

    with watched_calls(see):
        act()
    skipped = GUARDED | WAITS | {c.co_qualname for c in communicates}
    # The first call of a generator may be the end of an earlier one.
    own = [c for c in called if c.co_qualname not in skipped and not c.co_flags & CO_GENERATOR]
    return list(dict.fromkeys(map(name_of, own)))


def name_of(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(Path(ROOT).parent)}:{code.co_qualname}"


def outcome_with_a_bug_in(step: str | None, act: Callable[[], object]) -> str:
    """Return the text of the error that `act` raises if the first call of `step` here fails."""
    is_planted = False

    def see(frame: FrameType) -> None:
        nonlocal is_planted
        if not is_planted and step is not None and name_of(frame.f_code) == step:
            is_planted = True
            raise RuntimeError("a bug")

    try:
        with watched_calls(see):
            act()
    except Exception as error:
        return str(error)
    return "no error"


def engine_actions(directory: Path, stage: int) -> Actions:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
    model[0].requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {}},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(2, 16)).sum())
    engine.step()
    return {
        "save": lambda: engine.save_checkpoint(str(directory), exclude_frozen_parameters=True),
        "load": lambda: engine.load_checkpoint(str(directory), load_module_strict=False),
        "export": lambda: engine.save_16bit_model(str(directory)),
    }


def checkpointer_actions(directory: Path, settings: dict[str, str]) -> Actions:
    own = settings | {"non_persistent_local_ckpt_dir": str(directory / f"node{dist.get_rank()}")}
    model = TinyModel(1.0)
    groups = ProcessGroupCollection.current()
    made = checkpointer(directory / "run", model, peers=dist.group.WORLD, groups=groups, **own)
    state = TrainState(iteration=10)
    actions: Actions = {"save": lambda: made.save(state)}
    if settings:
        actions["save non-persistent"] = lambda: made.save_non_persistent(state)
    return actions | {"load": made.load, "load newest": lambda: made.load_newest(10)}


def memory_actions(directory: Path, _: object) -> Actions:
    groups = ProcessGroupCollection.current()
    context = CheckpointContext(model=[TinyModel(1.0)], groups=groups, args={"lr": 0.1})
    peers = AgreeingGroup(control_group(dist.group.WORLD))
    copies = MemoryCheckpoints(MemoryCopies(), CheckpointSettings(), context, peers, 0)

    def load() -> None:
        copies.find_newest()
        peers.run("loading", copies.load)

    def save() -> None:
        copies.save(TrainState(iteration=10))

    save()  # the first two saves allocate the memory of the two copies
    return {"save": save, "load": load}


def outcomes(
    groups, directory: Path, make: str, argument: object, action: str, failing: int
) -> dict[str, str]:
    """Let each step of an action fail on one rank; return {step: this rank's error}."""
    actions: Actions = globals()[make](directory, argument)
    for act in actions.values():
        act()
    steps = [steps_of(actions[action])]
    dist.broadcast_object_list(steps, src=failing)
    found = {}
    for step in steps[0]:
        here = step if dist.get_rank() == failing else None
        found[step] = outcome_with_a_bug_in(here, actions[action])
    actions[action]()  # which the failures leave possible
    return found


LOCAL = {"non_persistent_ckpt_type": "local"}
GLOBAL = {"non_persistent_ckpt_type": "global"}


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("make", "argument", "action"),
    [
        *(("engine_actions", 3, action) for action in ("save", "load", "export")),
        *(("checkpointer_actions", {}, action) for action in ("save", "load", "load newest")),
        *(("checkpointer_actions", LOCAL, a) for a in ("save non-persistent", "load")),
        *(("checkpointer_actions", GLOBAL, a) for a in ("save non-persistent", "load")),
        *(("memory_actions", None, action) for action in ("save", "load")),
    ],
)
def test_all_ranks_raise_what_one_rank_did_wherever_that_was(
    make: str, argument: object, action: str, failing: int, ram_path: Path
) -> None:
    arguments = (ram_path, make, argument, action, failing)
    found = run_distributed(outcomes, 2, *arguments, timeout_s=240)
    wrong = {
        step: errors
        for step, *errors in ((step, *(each[step] for each in found)) for step in found[0])
        if not all(f"rank {failing}: " in error for error in errors)
    }
    assert len(found[0]) > 10 or action == "export", found[0]
    assert not wrong, wrong
