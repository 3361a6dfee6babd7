"""What each stream has waited for: the vector clocks of torch's CUDA sanitizer."""

from torch.cuda._sanitizer import StreamSynchronizations  # noqa: TID251 (needs no device)

from tests.gpu_without_gpu.process_group_calls import calling_frame

HOST, COMPUTE = -1, 1
"""The program itself, which is ahead of all streams; the stream on which it computes. Threads begin
with stream 0, as they do with CUDA."""


class Clocks(StreamSynchronizations):
    """The clocks of one program, or of the same one without some of its waits.

    Args:
        without: "file.py:function" or "file.py:function:call": what the function waits for, or its
            calls of that name, are taken not to be there. Nothing is the program as it is.
    """

    def __init__(self, without: str = "") -> None:
        super().__init__()
        self.without = without
        self.reports: dict[tuple[str, str], str] = {}
        """A text for each pair of operations."""
        self.num_skipped = 0
        """Calls that were taken not to be there."""
        self._place = (*without.split(":"), "")[:3] if without else None
        self._num_events = 0

    def record(self, stream: int) -> int:
        """Return an event: all that `stream` has been given so far."""
        self._num_events += 1
        self.create_event(self._num_events)
        self.record_state(self._num_events, stream)
        return self._num_events

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for an event."""
        if not self.is_skipped("wait"):
            self.stream_wait_for_event(stream, event)

    def launch(self, stream: int, number: int) -> None:
        """Give a stream the operation with this number."""
        if stream != HOST:  # the host was there when it did
            self._state_wait_for_other(
                self.current_sync_states[stream], self.current_sync_states[HOST]
            )
        self.update_seq_num(stream, number)

    def is_skipped(self, call: str) -> bool:
        """Return whether what is being called is taken not to be there."""
        if self._place is None or self._place[2] not in ("", call):
            return False
        file, function, _ = self._place
        code = calling_frame().f_code
        if code.co_name != function or not code.co_filename.endswith(file):
            return False
        self.num_skipped += 1
        return True
