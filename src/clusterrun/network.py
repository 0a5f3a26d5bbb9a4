"""Addresses and ports of this host. Names are avoided on purpose: they resolve to 127.0.1.1, to IPv6 or to an FQDN that
differs, and the rendezvous then waits for a host that never comes (known with torchrun's c10d backend)."""

from __future__ import annotations

import fcntl
import hashlib
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_LOWEST_PORT = 20_000


def interfaces() -> dict[str, str]:
    """Network interface -> its first IPv4 address; interfaces without one are left out."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(packed[20:24])
    return found


def address_toward(peer: str) -> str:
    """This host's own address on the route to ``peer`` (an address). Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def own_address(peer: str, interface: str | None) -> str:
    """The address other nodes reach this host by: of the named interface, else the one on the route to ``peer``.

    Raises:
        OSError: no such interface, no IPv4 address on it, or no route.
    """
    if interface is None:
        return address_toward(peer)
    known = interfaces()
    if interface not in known:
        raise OSError(
            f"interface {interface}: not here or without an IPv4 address (there are: {', '.join(sorted(known))})"
        )
    return known[interface]


def head_address(launch_address: str | None = None) -> str:
    """An address of this host that other hosts can use: Slurm's word first, else the first that is not loopback."""
    if launch_address and not launch_address.startswith("127."):
        return launch_address
    return next((a for a in interfaces().values() if not a.startswith("127.")), "127.0.0.1")


def interface_of(address: str) -> str | None:
    """The interface that holds an address."""
    return next((name for name, own in interfaces().items() if own == address), None)


def socket_environment(address: str) -> dict[str, str]:
    """Variables that point Gloo and NCCL's sockets at the interface of an address of this host."""
    name = interface_of(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def is_free(address: str, port: int) -> bool:
    """Whether a listener could be opened right now on this port, on every address (torch's store takes them all)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except OSError:
            return False
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        return probe.connect_ex((address, port)) != 0


def free_port(address: str, key: str, tries: int = 200) -> int | None:
    """A port seen free on this host, outside the range the kernel hands to outgoing connections.

    ``key`` (run id and attempt) spreads runs that share a host over different ports.
    """
    low, high = _port_range()
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big")
    for i in range(tries):
        port = low + (start + i * 7) % (high - low)
        if is_free(address, port):
            return port
    return None


def _port_range() -> tuple[int, int]:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        ephemeral = int(text.split()[0])
    except (OSError, ValueError, IndexError):
        ephemeral = 32_768
    return (_LOWEST_PORT, ephemeral) if ephemeral > _LOWEST_PORT + 1000 else (_LOWEST_PORT, 65_000)
