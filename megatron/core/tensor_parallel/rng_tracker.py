"""Named streams of torch's default generator, on whatever device this process computes.

Shapes: none; states are the opaque byte tensors of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from megatron.core.foundation.device import (
    default_generator_state,
    seed_default_generator,
    set_default_generator_state,
)
from megatron.core.foundation.errors import ConfigError, refuse_given
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import resolve_groups

_MODEL_PARALLEL = "model-parallel-rng"
_EXPERT_PARALLEL = "expert-parallel-rng"
_DATA_PARALLEL = "data-parallel-rng"

MODEL_PARALLEL_SEED_OFFSET = 2718
EXPERT_PARALLEL_SEED_OFFSET = 1024


class CudaRNGStatesTracker:
    """Generator states by name; `fork(name)` makes one of them the default for a while.

    The name is Megatron's; the states are those of the current device, a GPU or the CPU.
    """

    def __init__(self) -> None:
        self.reset()

    def is_initialized(self) -> bool:
        """Return whether any stream was added or set."""
        return self._is_initialized

    def reset(self) -> None:
        """Forget all streams."""
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()
        self._is_initialized = False

    def get_states(self) -> dict[str, Tensor]:
        """Return the states by name; they are never changed in place, so no copies are made."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all states."""
        self._is_initialized = True
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Start a stream. Two streams with one seed would repeat each other: refused."""
        if seed in self.seeds_ or name in self.states_:
            found = f"stream {name!r}" if name in self.states_ else f"a stream with seed {seed}"
            raise ConfigError(
                f"{found} exists already.",
                rule="two streams with one seed or name would repeat each other's numbers",
                fix="add the stream with a name and a seed of its own, or reset() the tracker",
            )
        self._is_initialized = True
        self.seeds_.add(seed)
        outer = default_generator_state()
        seed_default_generator(seed)
        self.states_[name] = default_generator_state()
        set_default_generator_state(outer)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Draw from stream `name` inside; the default generator goes on unchanged afterwards."""
        if name not in self.states_:
            raise ConfigError(
                f"there is no random stream {name!r}; there are {sorted(self.states_)}.",
                rule="a stream is added before numbers are drawn from it",
                fix="call model_parallel_cuda_manual_seed(seed), or add(name, seed)",
            )
        outer = default_generator_state()
        set_default_generator_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = default_generator_state()
            set_default_generator_state(outer)


_TRACKER = CudaRNGStatesTracker()


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Prepare the process' tracker. There is one kind, which serves all the switches.

    Args:
        force_reset: forget the streams that exist.
    """
    if force_reset:
        _TRACKER.reset()


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
) -> CudaRNGStatesTracker:
    """Return the tracker of this process."""
    return _TRACKER


def get_data_parallel_rng_tracker_name() -> str:
    """Name of the stream that is the same on all model-parallel ranks."""
    return _DATA_PARALLEL


def get_expert_parallel_rng_tracker_name() -> str:
    """Name of the stream that differs between expert-parallel ranks."""
    return _EXPERT_PARALLEL


def get_all_rng_states() -> dict[str, Tensor]:
    """Return the states of all streams of the tracker."""
    return _TRACKER.get_states()


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    gtp_remat_rank: int | None = None,
    egtp_remat_rank: int | None = None,
    force_reset_rng: bool = False,
    gtp_remat_world_size: int | None = None,
    egtp_remat_world_size: int | None = None,
) -> None:
    """Seed every source of randomness of this rank.

    The keyed draws of the framework get `seed`, the same everywhere; so does the default
    generator, and with it the eager initialisation of weights. The tracker gets three streams:
    "data-parallel-rng" equal on all ranks, "model-parallel-rng" by tensor-parallel rank, and
    "expert-parallel-rng" by expert-parallel and expert-tensor-parallel rank.

    Args:
        tp_rank, ep_rank, etp_rank: None takes them from the current collection.
        gtp_remat_rank, egtp_remat_rank, gtp_remat_world_size, egtp_remat_world_size: of an axis
            that does not exist here; refused unless it has one rank.
        others: there is one kind of tracker, which is always reset.
    """
    refuse_given(
        "model_parallel_cuda_manual_seed",
        {
            "gtp_remat_rank": bool(gtp_remat_rank),
            "egtp_remat_rank": bool(egtp_remat_rank),
            "gtp_remat_world_size": gtp_remat_world_size not in (None, 1),
            "egtp_remat_world_size": egtp_remat_world_size not in (None, 1),
        },
        rule="weights are sharded over tensor parallel or by ZeRO, not along this axis",
        fix="leave these out",
    )
    collection = resolve_groups(None)
    tp_rank = collection.tp.rank() if tp_rank is None else tp_rank
    ep_rank = collection.ep.rank() if ep_rank is None else ep_rank
    etp_rank = collection.expt_tp.rank() if etp_rank is None else etp_rank

    rng_state().set_seed(seed)
    initialize_rng_tracker(force_reset=True)
    seed_default_generator(seed)
    model_parallel_seed = seed + MODEL_PARALLEL_SEED_OFFSET
    _TRACKER.add(_DATA_PARALLEL, seed)
    _TRACKER.add(_MODEL_PARALLEL, model_parallel_seed + tp_rank)
    _TRACKER.add(
        _EXPERT_PARALLEL,
        model_parallel_seed + EXPERT_PARALLEL_SEED_OFFSET + 100 * ep_rank + etp_rank,
    )
