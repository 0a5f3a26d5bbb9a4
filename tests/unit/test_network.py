"""Addresses and ports of this host: the real kernel answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterrun import network

LOOPBACK = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        yield one


def _ephemeral() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_loopback_is_an_interface() -> None:
    assert network.interfaces()["lo"] == LOOPBACK
    assert network.interface_of(LOOPBACK) == "lo"
    assert network.interface_of("192.0.2.1") is None


def test_own_address() -> None:
    assert network.own_address(LOOPBACK, None) == LOOPBACK
    assert network.own_address("192.0.2.1", "lo") == LOOPBACK  # the named interface, whatever the route
    for address in network.interfaces().values():
        assert network.address_toward(address) == address


def test_an_interface_that_is_not_here() -> None:
    with pytest.raises(OSError, match=r"interface ib7: not here .*there are: .*lo"):
        network.own_address(LOOPBACK, "ib7")


def test_no_route() -> None:
    with pytest.raises(OSError, match=r"."):
        network.own_address("no address", None)


def test_head_address_prefers_what_others_can_reach() -> None:
    assert network.head_address("10.1.2.3") == "10.1.2.3"
    others = [a for a in network.interfaces().values() if not a.startswith("127.")]
    for useless in (None, "127.0.1.1"):
        assert network.head_address(useless) == (others[0] if others else LOOPBACK)


def test_port_is_free_and_out_of_the_kernels_way() -> None:
    port = network.free_port(LOOPBACK, "run/1")
    assert port is not None
    assert 20_000 <= port < _ephemeral()
    assert network.is_free(LOOPBACK, port)
    with socket.socket() as store:
        store.bind(("", port))


def test_same_key_same_port_different_keys_spread() -> None:
    keys = [f"run/{i}" for i in range(30)]
    ports = [network.free_port(LOOPBACK, key) for key in keys]
    assert ports[0] == network.free_port(LOOPBACK, keys[0])
    assert len(set(ports)) >= 28


@pytest.mark.parametrize("address", [LOOPBACK, "127.0.0.2", "0.0.0.0"])
@pytest.mark.parametrize("reuse", [0, 1])
def test_a_port_in_use_is_passed_over(address: str, reuse: int, listener: socket.socket) -> None:
    port = network.free_port(LOOPBACK, "taken")
    assert port is not None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    listener.bind((address, port))
    listener.listen(1)
    assert not network.is_free(LOOPBACK, port)
    other = network.free_port(LOOPBACK, "taken")
    assert other not in (None, port)


def test_a_port_in_use_over_ipv6_too_is_passed_over() -> None:
    """torch's store listens on :: for both protocols."""
    port = network.free_port(LOOPBACK, "dual")
    assert port is not None
    try:
        store = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with store:
        assert not network.is_free(LOOPBACK, port)


def test_nothing_free() -> None:
    assert network.free_port(LOOPBACK, "run/1", tries=0) is None
