"""The other side of `pool.py`: a process that runs one rank of one job after another."""

import faulthandler
import functools
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.harness.global_state import reset_global_state

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Resolving the host name is slow or impossible on machines without a network.
    "GLOO_SOCKET_IFNAME": "lo",
    # A failed rank breaks the connections of the others; their C++ warnings drown the cause.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # The workers stand for ranks on any machine; a GPU of this one must not change results.
    "LATTICE_DEVICE": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}

LAYOUT_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "hierarchical_cp": "hierarchical_context_parallel_sizes",
    "hybrid_cp": "hybrid_context_parallel",
    "ep": "expert_model_parallel_size",
    "expt_tp": "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances": "num_distributed_optimizer_instances",
    "order": "order",
}
"""Keyword of a job's layout -> argument of `initialize_model_parallel`."""


@dataclass(frozen=True)
class FunctionAddress:
    """Where a module-level function is found again in another process."""

    module: str
    qualname: str

    def resolve(self) -> Callable[..., Any]:
        """Import the module and return the function, without its test decorator."""
        found: Any = importlib.import_module(self.module)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        return getattr(found, "distributed_body", found)


@dataclass(frozen=True)
class Job:
    """One rank's part of a job; `arguments` is a pickled (args, kwargs)."""

    number: int
    function: FunctionAddress
    rank: int
    world_size: int
    arguments: bytes
    layout: dict[str, Any]
    timeout_s: float
    store_port: int
    warning_filters: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What one rank has to say: a pickled result, or the text of its failure."""

    job_number: int
    rank: int
    result: bytes = b""
    error_type: str = ""
    error_message: str = ""
    trace: str = ""
    failed_at: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether this rank did not finish its function."""
        return bool(self.error_type)


def worker_main(connection: Connection, stack_file: str, hosts_store: bool) -> None:
    """Serve jobs from `connection` until it closes. The first failure ends the process.

    Args:
        stack_file: receives this process' Python stacks when it gets SIGUSR1.
        hosts_store: whether this worker owns the rendezvous of its pool; it reports the port
            before the first job.
    """
    # A session of its own: it can be killed with its children, and Ctrl-C reaches pytest only.
    os.setsid()
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays: `gc.collect` need not look at it
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        server = None
        if hosts_store:
            server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            connection.send_bytes(pickle.dumps(server.port))
        while True:
            try:
                job: Job = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return
            outcome = run_job(job)
            # Process groups that a model refers to in a circle keep their threads until then, of
            # which every one wakes a hundred times a second.
            gc.collect()
            connection.send_bytes(pickle.dumps(outcome))
            if outcome.failed:
                # Closing the sockets wakes peers that wait for this rank in a collective.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)


def _exit_with_parent() -> None:
    """End this process when the pytest process has gone, even in the middle of a hang."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def run_job(job: Job) -> Outcome:
    """Form the world, build the groups, call the function, and leave no trace of it."""
    environment, directory = dict(os.environ), os.getcwd()
    try:
        with warnings.catch_warnings():
            _use_warning_filters(job.warning_filters)
            reset_global_state()
            groups = _form_world(job)
            args, kwargs = pickle.loads(job.arguments)
            value = job.function.resolve()(groups, *args, **kwargs)
            result = pickle.dumps(value)
            parallel_state.destroy_model_parallel()
            if dist.is_initialized():
                dist.destroy_process_group()
        return Outcome(job.number, job.rank, result=result)
    except BaseException as error:  # also pytest's outcomes, which are not Exceptions
        return Outcome(
            job.number,
            job.rank,
            error_type=type(error).__name__,
            error_message=str(error),
            trace=_trace_below_harness(error),
            failed_at=time.monotonic(),
        )
    finally:
        os.chdir(directory)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)


def _form_world(job: Job) -> ProcessGroupCollection:
    """Join the job's ranks in a gloo world and arrange them by the job's layout."""
    timeout = timedelta(seconds=job.timeout_s)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"job{job.number}", _store_client(job.store_port)),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timeout,
    )
    sizes = {LAYOUT_SIZES[name]: value for name, value in job.layout.items()}
    groups = parallel_state.initialize_model_parallel(**sizes)
    # gloo connects each pair from one side: without this, a rank whose function communicates with
    # nobody could leave while a slower one still waits for the connection, and take it down.
    dist.barrier()
    return groups


@functools.cache
def _store_client(port: int) -> dist.TCPStore:
    """Connect to the pool's rendezvous once: about one new connection in 200 takes 5 s."""
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def _use_warning_filters(filters: list[tuple[Any, ...]]) -> None:
    """Put another process' filters in force; the caller restores its own."""
    warnings.resetwarnings()
    # Appending keeps their order; the public functions insert at the front.
    warnings.filters.extend(filters)  # type: ignore[attr-defined]


def _trace_below_harness(error: BaseException) -> str:
    """Format the traceback from the test's own first line on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    # A failure of the harness itself (rendezvous, layout) keeps its full trace.
    shown = frames or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, shown))
