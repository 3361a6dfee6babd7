"""Ranks on several machines that announce their loopback address are told so, and what to set."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.core.foundation.errors import TopologyError
from megatron.resilience.node_health import State
from megatron.training.launch import addresses
from megatron.training.launch.addresses import Announced, address_of, check_addresses, problem_with
from tools.doctor import network_findings


def announced(host: str, address: str, *interfaces: str) -> Announced:
    return Announced(host, f"network of {host}", address, interfaces)


HERE = announced("a", "127.0.0.1", "eth0")


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([HERE, HERE], None),
        ([announced("a", "10.0.0.1"), announced("b", "10.0.0.2")], None),
        (
            [HERE, HERE, announced("b", "127.0.1.1", "ens3")],
            "rank 0 on a (127.0.0.1), rank 2 on b (127.0.1.1); there is ens3, eth0.",
        ),
        ([announced("a", "10.0.0.1"), announced("b", "::1")], "rank 1 on b (::1)."),
    ],
    ids=["one machine", "reachable", "both wrong", "one wrong"],
)
def test_only_addresses_that_cannot_work_are_a_problem(ranks, expected):
    found = problem_with(ranks)
    assert found is expected or found.endswith(expected)


def test_all_ranks_raise_the_same(monkeypatch):
    """Rank 1 is on another machine; both stop before gloo tries, and waits, in vain."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_rank = iter([announced("a", "127.0.0.1"), announced("b", "127.0.0.1", "eth7")])
    monkeypatch.setattr(Announced, "by_this_process", lambda: next(of_rank))

    def error_of(rank: int) -> str:
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        with pytest.raises(TopologyError) as caught:
            check_addresses(client, rank, 2, timedelta(seconds=20))
        return str(caught.value)

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(error_of, range(2))
    assert first == second
    assert "GLOO_SOCKET_IFNAME" in first
    assert "there is eth7" in first


def test_a_named_interface_decides_what_is_announced(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    monkeypatch.delenv(addresses.VARIABLE, raising=False)
    assert Announced.by_this_process().address == "10.1.2.3"
    monkeypatch.setenv(addresses.VARIABLE, "lo")
    assert Announced.by_this_process().address == address_of("lo") == "127.0.0.1"


def test_the_doctor_says_that_a_loopback_address_does_not_do_for_several_machines(monkeypatch):
    monkeypatch.delenv(addresses.VARIABLE, raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    found = {finding.name: finding for finding in network_findings()}["this host"]
    assert found.state is State.ABSENT
    assert "set GLOO_SOCKET_IFNAME" in found.text
