"""One engine on all ranks, fed by the rank that serves.

Before each step the serving rank tells the others what was asked and what was given up; then all
take the step. Clients are answered from what the serving rank's own engine returns.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron.core.foundation.errors import MegatronError
from megatron.core.transport.object_collectives import ControlGroup
from megatron.inference.engine import Engine, Request, Token

HEARTBEAT_S = 5.0
"""Ranks meet at least so often, so that nobody takes a quiet hour for a lost neighbour."""


@dataclass
class BatchUpdate:
    """What changes before the next step; the same on all ranks."""

    add: list[Request] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    ends: bool = False


class ServiceError(MegatronError):
    """The engine no longer runs."""


Deliver = Callable[[int, "Token | ServiceError"], None]
"""Takes the place of a sequence in its ticket, and what happened to it."""


class Submission:
    """Sequences of one client."""

    def __init__(self, requests: Sequence[Request], deliver: Deliver) -> None:
        self.requests = list(requests)
        self.deliver = deliver
        self.numbers: list[int] = []
        """What the engine calls them, once it knows them."""


class Service:
    """The engine of the serving rank. `submit` and `cancel` may be called from any thread.

    Args:
        engine: this rank's.
        peers: all ranks of the run; rank 0 serves.
        max_queued: sequences that may wait.
    """

    def __init__(self, engine: Engine, peers: ControlGroup, max_queued: int) -> None:
        self.engine, self.peers = engine, peers
        self.failure: ServiceError | None = None
        self.crash: Exception | None = None
        """What ended `run`, if something went wrong."""
        self._most = engine.max_rows + max_queued
        self._inbox: queue.SimpleQueue[tuple[str, Submission | None, int]] = queue.SimpleQueue()
        self._sequence_of: dict[int, tuple[Submission, int]] = {}
        self._new: list[Submission] = []
        self._unfinished = 0
        self._lock = threading.Lock()

    @property
    def num_unfinished(self) -> int:
        """Sequences that were submitted and have not ended."""
        return self._unfinished

    def has_capacity_for(self, count: int) -> bool:
        """Whether so many sequences may be submitted. Ask and submit from one thread."""
        return self._unfinished + count <= self._most

    def submit(self, requests: Sequence[Request], deliver: Deliver) -> Submission:
        """Queue sequences that `engine.check` found nothing wrong with.

        Args:
            deliver: called in the engine's thread.
        """
        submission = Submission(requests, deliver)
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._unfinished += len(submission.requests)
            self._inbox.put(("add", submission, 0))
        return submission

    def cancel(self, submission: Submission, index: int) -> None:
        """Give up a sequence; nothing happens if it has ended."""
        self._inbox.put(("cancel", submission, index))

    def stop(self) -> None:
        """End the engine on all ranks."""
        self._inbox.put(("stop", None, 0))

    def run(self) -> None:
        """Serve until `stop`: the serving rank's thread.

        Communication:
            a broadcast of a small Python object a step on all ranks, and those of the model.
        Raises:
            whatever ended the engine, after every waiting client was told.
        """
        try:
            while True:
                update = self._next_update()
                self.peers.broadcast(update)
                if update.ends:
                    self._give_up("the server is stopping")
                    return
                self._apply(update)
        except Exception as error:
            self._give_up(f"the engine ended: {error}")
            raise

    def follow(self) -> None:
        """Take part until the serving rank stops: every other rank's main thread."""
        while True:
            update = self.peers.broadcast(None)
            if update.ends:
                return
            for number in update.cancel:
                self.engine.cancel(number)
            for request in update.add:
                self.engine.add(request)
            self.engine.step()

    def _next_update(self) -> BatchUpdate:
        """Collect what has come; wait for it if there is nothing else to do."""
        update = BatchUpdate()
        self._new = []
        timeout: float | None = HEARTBEAT_S if self.engine.is_idle else None
        while True:
            try:
                kind, submission, index = self._inbox.get(
                    block=timeout is not None, timeout=timeout
                )
            except queue.Empty:
                return update
            timeout = None
            if kind == "stop":
                update.ends = True
                return update
            assert submission is not None
            if kind == "add":
                update.add += submission.requests
                self._new.append(submission)
            elif submission.numbers:
                self._forget(submission.numbers[index], update)
            else:  # it came in this very order
                self._inbox.put((kind, submission, index))
                return update

    def _forget(self, number: int, update: BatchUpdate) -> None:
        if self._sequence_of.pop(number, None) is not None:
            self._ended_one()
            update.cancel.append(number)

    def _ended_one(self) -> None:
        with self._lock:
            self._unfinished -= 1

    def _apply(self, update: BatchUpdate) -> None:
        for number in update.cancel:
            self.engine.cancel(number)
        for submission in self._new:
            for index, request in enumerate(submission.requests):
                number = self.engine.add(request)
                submission.numbers.append(number)
                self._sequence_of[number] = submission, index
        for token in self.engine.step():
            found = self._sequence_of.get(token.request)
            if found is None:
                continue
            if token.finish_reason is not None:
                del self._sequence_of[token.request]
                self._ended_one()
            submission, index = found
            submission.deliver(index, token)

    def _give_up(self, why: str) -> None:
        with self._lock:
            self.failure = ServiceError(why, fix="start the server again")
        unknown = [submission for submission in self._new if not submission.numbers]
        while not self._inbox.empty():
            kind, queued, _ = self._inbox.get()
            if kind == "add" and queued is not None:
                unknown.append(queued)
        waiting = list(self._sequence_of.values())
        waiting += [
            (submission, index)
            for submission in unknown
            for index in range(len(submission.requests))
        ]
        for submission, index in waiting:
            submission.deliver(index, self.failure)
