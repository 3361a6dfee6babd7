"""Run a test body on N ranks: persistent gloo processes on the CPU.

    @distributed(world_size=4, tp=2, pp=2)
    def test_something(groups): ...

    results = run_distributed(body, 4, argument, tp=2, pp=2)   # body(groups, argument)

The body is found by module and name in each worker, so it is a module-level function; its
arguments are pickled. It runs under the caller's warning filters. `groups` is the
`ProcessGroupCollection` of the layout, which is also the current one.
"""

import inspect
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool import POOL, REPOSITORY
from tests.harness.worker import LAYOUT_SIZES, FunctionAddress, Outcome

DEFAULT_TIMEOUT_S = 60.0


class DistributedFailure(AssertionError):
    """At least one rank failed; the message holds every rank's traceback, the first one first."""

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        failed = sorted((o for o in outcomes if o.failed), key=lambda o: o.failed_at)
        ranks = ", ".join(str(o.rank) for o in sorted(failed, key=lambda o: o.rank))
        lines = [f"{name}: {len(failed)} of {len(outcomes)} ranks failed (ranks {ranks})"]
        for outcome in failed:
            body = outcome.trace.rstrip() or f"{outcome.error_type}: {outcome.error_message}"
            lines += [f"----- rank {outcome.rank} -----", body]
        super().__init__("\n".join(lines))


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    kwargs: dict[str, Any] | None = None,
    **layout: Any,
) -> list[Any]:
    """Call `function(groups, *args, **kwargs)` on every rank and return the results by rank.

    Args:
        function: module-level function.
        world_size: number of ranks, 1 to 8.
        layout: tp, pp, vp, cp, ep, expt_tp, order, ...: sizes of axes; see `LAYOUT_SIZES`.
        timeout_s: after it, the ranks are killed and their stacks reported. The environment
            variable TEST_TIMEOUT_SCALE multiplies it, for slow or crowded machines.
    Raises:
        DistributedFailure: a rank raised, died or hung.
    """
    unknown = sorted(set(layout) - set(LAYOUT_SIZES))
    if unknown:
        raise TypeError(f"unknown layout keywords {unknown}; known are {sorted(LAYOUT_SIZES)}")
    outcomes = POOL.run(
        address_of(function),
        world_size,
        pickle.dumps((args, kwargs or {})),
        layout,
        timeout_s * float(os.environ.get("TEST_TIMEOUT_SCALE", "1")),
    )
    if any(outcome.failed for outcome in outcomes):
        raise DistributedFailure(function.__qualname__, outcomes)
    return [pickle.loads(outcome.result) for outcome in outcomes]


def distributed(
    world_size: int | tuple[int, ...], *, timeout_s: float = DEFAULT_TIMEOUT_S, **layout: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test run its body on `world_size` ranks, or on each of several numbers of them.

    The body's first parameter is `groups`. Other parameters come from `pytest.mark.parametrize` or
    from fixtures whose values can be pickled. Sizes of axes (tp=, pp=, ...) are as in
    `run_distributed`.
    """

    sizes = (world_size,) if isinstance(world_size, int) else world_size

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(body)
        parameters = list(signature.parameters.values())
        if not parameters or parameters[0].name != "groups":
            raise TypeError(f"{body.__qualname__} must take `groups` as its first parameter")

        @wraps(body)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            size = arguments.pop("num_ranks", sizes[0])
            run_distributed(body, size, timeout_s=timeout_s, kwargs=arguments, **layout)

        if len(sizes) > 1:
            parameters.append(inspect.Parameter("num_ranks", inspect.Parameter.KEYWORD_ONLY))
            test = pytest.mark.parametrize("num_ranks", sizes)(test)
        test.__signature__ = signature.replace(parameters=parameters[1:])  # type: ignore
        test.distributed_body = body  # type: ignore[attr-defined]
        return pytest.mark.distributed(test)

    return decorate


def address_of(function: Callable[..., Any]) -> FunctionAddress:
    """Return where a worker finds `function`: its dotted path below the repository root.

    The path, not the name pytest gave the module, because that depends on the import mode.
    """
    if "<locals>" in function.__qualname__ or function.__name__ == "<lambda>":
        raise TypeError(f"{function.__qualname__} must be a module-level function")
    module = sys.modules[function.__module__]
    file = getattr(module, "__file__", None)
    if file is not None and (path := Path(file).resolve()).is_relative_to(REPOSITORY):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        # Code installed below the repository (a virtual environment) keeps its own name.
        if all(part.isidentifier() for part in parts):
            return FunctionAddress(".".join(parts), function.__qualname__)
    return FunctionAddress(function.__module__, function.__qualname__)
