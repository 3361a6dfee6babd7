"""A rank's side of the launcher: wait for a place, hear that the others give up, and do so.

A rank that waits in a collective of gloo hears of the end of those that it is connected with, and
of nobody else's; gloo has no call that ends the wait. Closing the connections does, on both sides.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.core.foundation.heartbeat.place import PLACE
from megatron.training.inprocess.coordinator import Place

ENDPOINT, PROCESS, NODE = "LATTICE_LAUNCHER", "LATTICE_PROCESS", "LATTICE_NODE"
"""Variables that the launcher sets: HOST:PORT of its store, the name of this process, its node."""
_ESTABLISHED = "01"
_LONG = timedelta(days=30)
CONNECT_TIMEOUT = timedelta(seconds=120)
LOST_PEER_S, OWN_ERROR_S = 60.0, 3.0
"""How long a rank waits for word that its generation is broken: after an error that another rank
has caused, and after one that may be its own."""


def launcher_store() -> Any:
    """Return a new connection to the launcher's store."""
    host, _, port = os.environ[ENDPOINT].rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=CONNECT_TIMEOUT)  # type: ignore[attr-defined]


class Membership:
    """This process among those that the launcher started."""

    def __init__(self) -> None:
        self.process, self.node = os.environ[PROCESS], int(os.environ[NODE])
        self._store = launcher_store()

    @classmethod
    def of_this_process(cls) -> Membership | None:
        """Return it; None if another launcher, or none, started this process."""
        return cls() if ENDPOINT in os.environ else None

    def join(self) -> Place:
        """Wait for a place in the next generation, and tell everybody who reads the environment."""
        number = self._store.add("num_joined", 1)
        said = {"process": self.process, "node": self.node}
        self._store.set(f"joined/{number}", json.dumps(said))
        key = f"place/{self.process}/{number}"
        self._store.wait([key], _LONG)
        place = Place(**json.loads(self._store.get(key)))
        os.environ.update(
            RANK=str(place.rank),
            LOCAL_RANK=str(place.local_rank),
            WORLD_SIZE=str(place.world_size),
            LOCAL_WORLD_SIZE=str(place.local_world_size),
            GROUP_RANK=str(place.node),
            TORCHELASTIC_RESTART_COUNT=str(place.generation),
        )
        return place

    def report_failure(self, place: Place) -> None:
        """Tell the launcher that the ranks do not get on together."""
        number = self._store.add("num_failed", 1)
        said = {"process": self.process, "generation": place.generation}
        self._store.set(f"failed/{number}", json.dumps(said))


class Watch:
    """Hears that a generation is given up, and then calls `abort` until the rank has left it."""

    def __init__(self, place: Place, abort: Callable[[], None]) -> None:
        self._place, self._abort = place, abort
        self._store = launcher_store()
        self._lock = threading.Lock()
        self._has_left = False
        self._is_broken = threading.Event()
        self.reason = ""
        self._grows = False
        threading.Thread(target=self._listen, name="membership", daemon=True).start()

    def leave(self) -> None:
        """Abort nothing from now on."""
        with self._lock:
            self._has_left = True

    def waits_to_grow(self) -> bool:
        """Return whether ranks wait to join after this step."""
        return self._grows

    def is_broken_within(self, seconds: float) -> bool:
        """Return whether the generation is broken, or will be so soon."""
        return self._is_broken.wait(seconds)

    def _listen(self) -> None:
        generation = self._place.generation
        try:
            if self._place.may_grow:
                self._store.wait([f"change/{generation}"], _LONG)
                self._grows = True
            self._store.wait([f"broken/{generation}"], _LONG)
            self.reason = self._store.get(f"broken/{generation}").decode()
        except RuntimeError:  # the launcher is gone, which another thread answers
            return
        self._is_broken.set()
        while True:
            with self._lock:
                if self._has_left:
                    return
                self._abort()
            time.sleep(0.2)


class Connections:
    """The TCP connections that this process opens after this object was made."""

    def __init__(self) -> None:
        self._earlier = set(_connected())

    def abort(self) -> None:
        """Close them, and let who waits for a peer in shared memory raise.

        Called beside the training thread, again and again until that has noticed: it may be opening
        more. The communicators of NCCL are aborted (not tried on GPUs).
        """
        PLACE.is_aborted = True
        for inode, descriptor in _connected().items():
            if inode not in self._earlier:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
                    end.shutdown(socket.SHUT_RDWR)
        if dist.is_initialized() and dist.get_backend() != dist.Backend.GLOO:
            with contextlib.suppress(Exception):
                dist.distributed_c10d._abort_process_group()


def _connected() -> dict[str, int]:
    """Return inode -> descriptor of the connected TCP sockets of this process."""
    connected: set[str] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    connected.add(fields[9])
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inode = os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]")
            if inode in connected:
                found[inode] = int(name)
    return found
