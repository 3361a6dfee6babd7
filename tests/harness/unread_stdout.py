"""A stdout whose reader has ended."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def unread_stdout() -> Iterator[None]:
    """Let `print` write to a pipe that nobody reads; what is left in it raises at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, contextlib.redirect_stdout(stdout):
        yield
