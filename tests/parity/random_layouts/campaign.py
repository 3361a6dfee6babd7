"""Many cases on several jobs, and what is told of them."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.parity.random_layouts.cases import Case
from tests.parity.random_layouts.outcomes import Kind, Result, Verdict, compare
from tests.parity.random_layouts.runner import Runner
from tests.parity.random_layouts.shrink import shrink

Say = Callable[[str], None]


class Bench:
    """The runners of one job: one for each width, started when first needed."""

    def __init__(self) -> None:
        self._runners = {is_wide: Runner(is_wide=is_wide) for is_wide in (True, False)}

    def started(self) -> set[bool]:
        """Return the widths whose ranks are there already."""
        return {is_wide for is_wide, runner in self._runners.items() if runner.is_started}

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        """Return the verdicts on cases of one model, which is run once in one process."""
        runner = self._runners[cases[0].is_wide]
        serial = runner.run(cases[0].serial)
        if serial.kind is not Kind.EQUAL:
            alone = Verdict(cases[0].serial, serial.kind, serial.text)
            return [alone, *(replace(alone, kind=Kind.REFUSED) for _ in cases[1:])]
        return [self._verdict(case, runner.run(case), serial) for case in cases]

    @staticmethod
    def _verdict(case: Case, result: Result, serial: Result) -> Verdict:
        if case.ranks == 1 and case == case.serial:
            return Verdict(case, result.kind, result.text)
        return compare(case, result, serial)

    def close(self) -> None:
        """End all ranks."""
        for runner in self._runners.values():
            runner.close()


class Campaign:
    """Runs models by several jobs at a time.

    Args:
        say: takes each line of the report.
        shrinks: whether the first failure of each signature is made small.
    """

    def __init__(self, models: Sequence[Sequence[Case]], say: Say, *, shrinks: bool) -> None:
        self.verdicts: list[Verdict] = []
        self.shrunk: dict[str, Verdict] = {}
        self._waiting = [list(cases) for cases in models if cases]
        self._say, self._shrinks = say, shrinks
        self._lock = threading.Lock()
        self._jobs = 0
        self._started_at = time.monotonic()
        self._problems: list[BaseException] = []

    def run(self, jobs: int) -> None:
        """Judge all models."""
        threads = [
            threading.Thread(target=self._work, args=(number % 2 == 0,)) for number in range(jobs)
        ]
        self._jobs = jobs
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._problems:
            raise self._problems[0]

    def seconds(self) -> float:
        """Return how long it has been running."""
        return time.monotonic() - self._started_at

    def _work(self, prefers_wide: bool) -> None:
        bench = Bench()
        try:
            while cases := self._next(bench.started(), prefers_wide):
                verdicts = bench.judge(cases)
                self._take(verdicts, bench)
        except BaseException as problem:
            self._problems.append(problem)
            raise
        finally:
            with self._lock:
                self._jobs -= 1
            bench.close()

    def _next(self, started: set[bool], prefers_wide: bool) -> list[Case]:
        """Return the next model, if possible one for which ranks are there."""
        with self._lock:
            for place, cases in enumerate(self._waiting):
                if cases[0].is_wide in (started or {prefers_wide}):
                    return self._waiting.pop(place)
            # Starting ranks of the other width takes as long as a few models, which other jobs do.
            may_start = not started or len(self._waiting) > 4 or self._jobs == 1
            return self._waiting.pop(0) if may_start and self._waiting else []

    def _take(self, verdicts: Sequence[Verdict], bench: Bench) -> None:
        with self._lock:
            self.verdicts += verdicts
            new = {v.signature: v for v in verdicts if v.is_failure}
            new = {name: v for name, v in new.items() if name not in self.shrunk}
            self.shrunk |= new
        for signature, verdict in new.items():
            if self._shrinks:
                verdict = shrink(verdict, lambda case: bench.judge([case])[0])
            with self._lock:
                self.shrunk[signature] = verdict
                self._say(f"FAILURE {verdict.kind.value}\n{described(verdict)}")
        with self._lock:
            if self._has_passed_a_hundred(len(verdicts)):
                self._say(f"{len(self.verdicts)} cases, {self.seconds():.0f} s")

    def _has_passed_a_hundred(self, added: int) -> bool:
        count = len(self.verdicts)
        return count // 100 > (count - added) // 100


def described(verdict: Verdict) -> str:
    """Return what a person needs of a failure: commands, what is wrong, the line for the data."""
    case = verdict.case
    text = verdict.text.splitlines()
    shown = text[:8] if verdict.kind is Kind.DIFFERENT else text[-12:]
    lines = [*(f"  {line}" for line in shown), f"  {case.command()}"]
    if case.ranks > 1:
        lines.append(f"  beside {case.serial.command()}")
    return "\n".join([*lines, f"  {case}"])
