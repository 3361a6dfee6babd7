"""The process in which a chat template is rendered, as its user sees it.

No torch import.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.optional_imports import require
from megatron.core.settings.flags import flag

_SCRIPT = Path(__file__).with_name("_template_sandbox.py")
_LEAST_MIB = 64


@dataclass(frozen=True, kw_only=True)
class TemplateLimits:
    """Limits of rendering with a chat template."""

    seconds: float = flag(10.0, name="chat_template_seconds", metavar="S")
    """Processor time in which a template must have written a conversation (%(default)g); it takes
    about a millisecond."""
    memory_mib: int = flag(1024, name="chat_template_mib", metavar="MIB")
    """Memory of the process that renders; a text may have a character for 16 bytes of it
    (%(default)s)."""

    def __post_init__(self) -> None:
        if not (0 < self.seconds < math.inf):
            raise ConfigError(
                f"--chat-template-seconds {self.seconds:g}: no time to render in.",
                rule="it is the processor time that one rendering may take",
                flags=["--chat-template-seconds"],
                fix="give a positive number of seconds, for example 10",
            )
        if self.memory_mib < _LEAST_MIB:
            raise ConfigError(
                f"--chat-template-mib {self.memory_mib} is less than Python itself needs.",
                rule=f"the process that renders gets at least {_LEAST_MIB} MiB",
                flags=["--chat-template-mib"],
                fix="--chat-template-mib 1024",
            )


class RenderingRefusedError(Exception):
    """The template does not write this, or is no template."""


class RenderingLimitError(Exception):
    """A limit ended the rendering; the message names limit and flag."""


class TemplateProcess:
    """Renders in a child process that is started when it is needed; for any thread.

    A process that was forked, or that unpickles it, starts a child of its own.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], limits: TemplateLimits
    ) -> None:
        self._template = {
            "source": source,
            "special_tokens": dict(special_tokens),
            "seconds": limits.seconds,
            "memory_bytes": limits.memory_mib * 2**20,
        }
        self._limits = limits
        self._forget()

    def _forget(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._lock, self._owner = threading.Lock(), os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"_template": self._template, "_limits": self._limits}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def ask(self, request: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Send a request, see `_template_sandbox.py`; None compiles the template and no more.

        Raises:
            RenderingRefusedError: the template refuses, or is no template.
            RenderingLimitError: it takes more than the limits.
        """
        if self._owner != os.getpid():
            self._forget()
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._start()
                self._exchange(self._template)
            return {} if request is None else self._exchange(request)

    def _start(self) -> None:
        require("jinja2", purpose="chat templates")
        self._end()
        self._child = subprocess.Popen(
            [sys.executable, str(_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._end = weakref.finalize(self, _end, self._child, self._owner)

    def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        is_answered = False
        try:
            line = _line_of(request)
            try:
                child.stdin.write(line)
                child.stdin.flush()
                answered = child.stdout.readline()
            except BrokenPipeError:
                answered = b""
            if not answered.endswith(b"\n"):
                raise RenderingLimitError(self._why_it_ended(child.wait()))
            answer: dict[str, Any] = json.loads(answered)
            # One that did not compile is started again for the next question.
            is_answered = request is not self._template or "ready" in answer
        finally:
            if not is_answered:
                self._end()
                self._child = None
        if "over" in answer:
            raise RenderingLimitError(self._over(answer["over"]))
        if "refused" in answer:
            raise RenderingRefusedError(answer["refused"])
        return answer

    def _why_it_ended(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return (
                f"it took more than {self._limits.seconds:g} s of processor time "
                "(--chat-template-seconds)"
            )
        ended = f"signal {-status}" if status < 0 else f"status {status}"
        return f"the process that renders ended with {ended}: {self._over('memory')}"

    def _over(self, what: str) -> str:
        mib = f"{self._limits.memory_mib} MiB of memory allow (--chat-template-mib)"
        if what == "text":
            return f"it writes a longer text than {mib}"
        return f"it takes more than {mib}"


def _line_of(request: Mapping[str, Any]) -> bytes:
    # What a column of a parquet file may hold besides JSON's types, a date for one, is its text.
    return json.dumps(request, default=str).encode() + b"\n"


def _end(child: subprocess.Popen[bytes], owner: int) -> None:
    """End the child; a fork of its owner only lets go of it."""
    if os.getpid() == owner:
        child.kill()
        child.wait()
    else:
        child.returncode = 0
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not written cannot be any more
                pipe.close()
