"""The ranks on this machine: what a survivor can say of those that do not answer."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

from megatron.core.foundation.process_identity import ProcessIdentity, stat_of
from megatron.core.foundation.processes import describe_exit, num_killed_for_memory
from megatron.training.launch.rank_info import RankInfo

MEETING_TIMEOUT = timedelta(seconds=60)


class Peer:
    """The process of a rank on this machine."""

    def __init__(self, rank: int, identity: ProcessIdentity) -> None:
        self.rank, self.identity = rank, identity
        self._ended_with: int | None = None
        self._has_ended = False

    def look(self) -> str | None:
        """Return the letter of its state, T and t if it is stopped; None if it has ended.

        The exit code is there to read from the end of a process until its parent takes note.
        """
        try:
            stat = stat_of(self.identity.number)
        except OSError:
            self._has_ended = True
            return None
        if stat.start != self.identity.start:
            self._has_ended = True
        elif stat.has_ended:
            self._has_ended = True
            self._ended_with = os.waitstatus_to_exitcode(stat.wait_status)
        return None if self._has_ended else stat.letter

    def was_lost(self) -> bool:
        """Return whether it ended otherwise than a whole job does: on its own."""
        self.look()
        return self._has_ended and self._ended_with not in (None, 0, -signal.SIGTERM)

    def describe(self) -> str | None:
        """Return what keeps it from answering; None if it runs."""
        who = f"rank {self.rank} (process {self.identity.number})"
        letter = self.look()
        if letter is not None:
            return f"{who} is stopped (SIGSTOP, or a debugger)" if letter in "Tt" else None
        if self._ended_with is None:
            return f"{who} ended without a word: killed, in most cases for lack of memory"
        return f"{who} {describe_exit(self._ended_with)}"


class LocalPeers:
    """The other ranks of this rank's node."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers
        self._killed_before = num_killed_for_memory()

    @classmethod
    def meet(cls, store: Any, info: RankInfo) -> LocalPeers:
        """Tell the other ranks of this node which process this is, and learn theirs.

        Without a launcher that says which ranks share a node, nobody is known.
        """
        if info.local_rank >= info.local_world_size:
            return cls([])  # the launcher tells where a rank is, not how many share its node
        first = info.rank - info.local_rank
        others = [r for r in range(first, first + info.local_world_size) if r != info.rank]
        try:
            mine = ProcessIdentity.own()
        except OSError:
            return cls([])
        if not others:
            return cls([])
        store.set(f"process/{info.rank}", mine.pack().hex())
        try:
            store.wait([f"process/{rank}" for rank in others], MEETING_TIMEOUT)
        except RuntimeError:  # they are on the way out: this rank will hear why
            return cls([])
        identities = {
            r: ProcessIdentity.unpack(bytes.fromhex(store.get(f"process/{r}").decode()))
            for r in others
        }
        seen = {
            r: i
            for r, i in identities.items()
            if (i.namespace, i.machine) == (mine.namespace, mine.machine)
        }
        return cls([Peer(rank, identity) for rank, identity in seen.items()])

    def any_was_lost(self) -> bool:
        """Return whether a rank of this node has ended on its own."""
        return any(peer.was_lost() for peer in self.peers)

    def describe(self) -> str:
        """Return what is known of those that do not answer; empty if nothing."""
        found = [text for peer in self.peers if (text := peer.describe()) is not None]
        before, killed = self._killed_before, num_killed_for_memory()
        if before is not None and killed is not None and killed > before:
            found.append(
                f"the kernel has killed {killed - before} process(es) of this control group for"
                " lack of memory since the start"
            )
        return "; ".join(found)
