"""Check the address that each rank announces to the other ranks before they connect."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from megatron.core.foundation.errors import TopologyError
from megatron.core.foundation.process_identity import ProcessIdentity

VARIABLE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Announced:
    """The address that gloo announces to the other ranks."""

    host: str
    network: str
    """Identifies a machine or container: only its own processes share its loopback address."""
    address: str
    interfaces: tuple[str, ...]
    """Interfaces that could be used instead."""

    @property
    def is_loopback(self) -> bool:
        """Whether the address is only reachable from its own machine or container."""
        return ipaddress.ip_address(self.address).is_loopback

    @classmethod
    def by_this_process(cls) -> Announced:
        """Return the address by gloo's rule: a named interface, or else the host's name."""
        name = os.environ.get(VARIABLE, "").split(",")[0]
        address = "127.0.0.1"  # gloo's default
        with contextlib.suppress(OSError):
            address = address_of(name) if name else socket.gethostbyname(socket.gethostname())
        network = ""
        with contextlib.suppress(OSError):
            network = f"{ProcessIdentity.own().machine.hex()} {os.stat('/proc/self/ns/net').st_ino}"
        return cls(socket.gethostname(), network, address, tuple(other_interfaces()))


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface.

    Raises:
        OSError: there is no such interface, or it has no IPv4 address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        get_address = 0x8915  # SIOCGIFADDR
        found = fcntl.ioctl(probe, get_address, struct.pack("256s", interface[:15].encode()))
    return socket.inet_ntoa(found[20:24])


def other_interfaces() -> list[str]:
    """Return the interfaces whose address is not a loopback address."""
    found = []
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            if not ipaddress.ip_address(address_of(name)).is_loopback:
                found.append(name)
    return found


def problem_with(announced: Sequence[Announced]) -> str | None:
    """Return the problem with the addresses of all ranks, given in the order of ranks, or None."""
    if len({one.network for one in announced}) == 1:
        return None
    wrong = {
        one.network: f"rank {rank} on {one.host} ({one.address})"
        for rank, one in reversed(list(enumerate(announced)))
        if one.is_loopback
    }
    if not wrong:
        return None
    interfaces = sorted({name for one in announced if one.is_loopback for name in one.interfaces})
    could_be = f"; there is {', '.join(interfaces)}" if interfaces else ""
    return (
        "ranks of several machines announce an address that other machines cannot reach: "
        f"{', '.join(reversed(wrong.values()))}{could_be}."
    )


def check_addresses(store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
    """Raise on all ranks if gloo cannot connect them.

    Raises:
        TopologyError: ranks are on several machines, and one announces its loopback address.
    Communication:
        one value per rank and one result through `store`.
    """
    if world_size == 1:
        return
    store.set(f"announced/{rank}", json.dumps(asdict(Announced.by_this_process())))
    if rank == 0:
        announced = [
            Announced(**json.loads(store.get(f"announced/{r}").decode())) for r in range(world_size)
        ]
        store.set("announced/problem", problem_with(announced) or "")
    store.wait(["announced/problem"], timeout)
    problem = store.get("announced/problem").decode()
    if problem:
        raise TopologyError(
            problem,
            rule=f"gloo listens at the address of the host's name or of the interface {VARIABLE}",
            fix=f"export {VARIABLE} on every machine, with the interface that reaches the other"
            " machines (`python tools/doctor.py` lists interfaces)",
        )
