"""What a server has done so far, in the text form that Prometheus reads."""

from __future__ import annotations

from collections import Counter


class Counters:
    """Counts of requests and tokens; used from the server's thread alone."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str]] = Counter()
        self._prompt_tokens = self._new_tokens = 0

    def count_request(self, path: str, status: int | None) -> None:
        """Count a request that has ended; `status` None: the client left before an answer."""
        self._requests[path, "none" if status is None else str(status)] += 1

    def count_tokens(self, prompt: int, new: int) -> None:
        """Count the tokens of a request."""
        self._prompt_tokens += prompt
        self._new_tokens += new

    def text(self, num_running: int, num_unfinished: int) -> str:
        """Return all counts.

        Args:
            num_running: sequences that are being continued.
            num_unfinished: those, and the waiting ones.
        """
        lines = ["# TYPE lattice_requests_total counter"]
        lines += [
            f'lattice_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._requests.items())
        ]
        for name, kind, value in (
            ("prompt_tokens_total", "counter", self._prompt_tokens),
            ("new_tokens_total", "counter", self._new_tokens),
            ("sequences_running", "gauge", num_running),
            ("sequences_waiting", "gauge", max(num_unfinished - num_running, 0)),
        ):
            lines += [f"# TYPE lattice_{name} {kind}", f"lattice_{name} {value}"]
        return "\n".join(lines) + "\n"
