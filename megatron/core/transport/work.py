"""Communication in flight: one handle for all transports."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Generic, Protocol, TypeVar, overload

from torch import Tensor

from megatron.core.foundation.flight_recorder import PROGRESS

Result = TypeVar("Result")
Next = TypeVar("Next")


class Handle(Protocol):
    """One operation of a backend: the methods of Work in `torch.distributed`."""

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        ...

    def wait(self) -> object:
        """Return when the operation is complete; on an accelerator only the stream waits."""
        ...


Steps = Generator[Sequence[Handle], None, Result]
"""Start operations, yield their handles, continue when they are complete, return the result. An
error of a handle is raised at the `yield`. Only transports and compression write steps; others
chain `Work` by `then`."""


class Work(Generic[Result]):
    """Communication in flight. Do not touch its tensors until `wait` has returned."""

    __slots__ = ("_handles", "_place", "_result", "_steps", "destination", "num_steps_done")

    def __init__(self, steps: Steps[Result], destination: Result | None = None) -> None:
        self._steps = steps
        self.destination = destination
        """The tensor of the result, if it is known; its values are undefined until `wait`."""
        self._result: Result
        self._handles: Sequence[Handle] | None
        self.num_steps_done = 0
        self._resume(lambda: next(steps))
        self._place = PROGRESS.newest

    @staticmethod
    def of(handles: Sequence[Handle], result: Result) -> Work[Result]:
        """Return the work that ends with `result` when all handles are complete."""

        def steps() -> Steps[Result]:
            yield handles
            return result

        return Work(steps(), result)

    @staticmethod
    def completed(result: Result) -> Work[Result]:
        """Return work that is done."""
        return Work(_no_steps(result))

    @overload
    def then(self, step: Callable[[Result], Work[Next]]) -> Work[Next]: ...

    @overload
    def then(self, step: Callable[[Result], Next]) -> Work[Next]: ...

    def then(self, step: Callable[[Result], Work[Next] | Next]) -> Work[Next]:
        """Return the work that continues with `step(result)`, which may be other work."""

        def steps() -> Steps[Next]:
            following = step((yield from self))
            return (yield from following) if isinstance(following, Work) else following

        return Work(steps())

    def is_completed(self) -> bool:
        """Return whether the result is available."""
        return self._handles is None

    def wait(self) -> Result:
        """Return the result; may be called again. On an accelerator only the stream waits."""
        while self._handles is not None:
            self.advance()
        return self._result

    def poll(self) -> None:
        """Take the next step if it does not wait; no effect if the backend cannot test for it."""
        if self._handles is not None and all(handle.is_completed() for handle in self._handles):
            self.advance()

    def advance(self) -> None:
        """Wait for the operations in flight, compute on their results, and start the next step."""
        if self._handles is None:
            return
        problem = None
        PROGRESS.wait_in(self._place)
        try:
            for handle in self._handles:
                handle.wait()
        except Exception as error:
            problem = error
        PROGRESS.wait_in(0)
        self._go_on(problem)

    def __iter__(self) -> Steps[Result]:
        """Continue inside another operation: `result = yield from work`."""
        while self._handles is not None:
            problem = None
            try:
                yield self._handles
            except Exception as error:
                problem = error
            self._go_on(problem)
        return self._result

    def _go_on(self, problem: Exception | None) -> None:
        """Take the next step, after what waiting raised."""
        newest = PROGRESS.newest
        if problem is None:
            self._resume(lambda: next(self._steps))
        else:
            self._resume(lambda: self._steps.throw(problem))
        self.num_steps_done += 1
        if PROGRESS.newest != newest:
            self._place = PROGRESS.newest

    def _resume(self, step: Callable[[], Sequence[Handle]]) -> None:
        try:
            self._handles = step()
        except StopIteration as end:
            self._handles, self._result = None, end.value


def _no_steps(result: Result) -> Steps[Result]:
    return result
    yield


AnyWork = Work[Tensor] | Work[None]
"""Work whose result is not used."""


def wait_all(works: Sequence[AnyWork]) -> None:
    """Wait for several works, and advance all of them meanwhile.

    Always advances the first of the works with the fewest steps. After polling, works are at
    different steps on each rank: if one rank waited for a late step of one work while the others
    wait for an early step of another work, all ranks would wait forever.
    """
    num_done = 0
    while not all(work.is_completed() for work in works):
        for work in works:
            if work.num_steps_done == num_done:
                work.advance()
        num_done += 1
