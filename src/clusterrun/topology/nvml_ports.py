"""NVLink ports of a GPU, and how many bonded NVLinks join each pair of GPUs, directly or through NVSwitch.

Follows what NCCL does (src/graph/xml.cc, 2.30.7): ports that can do P2P and are up; a remote PCI id that is empty or
unprintable means NVSwitch; through switches a pair has the smaller of the two GPUs' counts of switch ports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from clusterrun.topology.model import Gpu, Link, LinkKind, NvLinkPort
from clusterrun.topology.nvml_ask import INVALID_ARGUMENT, NOT_SUPPORTED, Ask
from clusterrun.topology.sysfs import bus_id

# Field ids and values of nvml.h; spelled here because old bindings lack the names.
_FIELD_STATE, _FIELD_SPEED = 165, 164  # scope id is the link
_CAP_P2P = 0
_TYPE_GPU, _TYPE_IBMNPU, _TYPE_SWITCH = 0, 1, 2
_STATE_ACTIVE, _STATE_SLEEP = 1, 2
_MAX_PORTS = 36  # NVML_NVLINK_MAX_LINKS of nvidia-ml-py 13; older bindings say 6, 12 or 18
_FIELD_STATE_SINCE = (9, 0)  # compute capability from which nvmlDeviceGetNvLinkState is not reliable (NCCL)


def read_ports(ask: Ask, handle: Any, capability: tuple[int, int] | None) -> tuple[NvLinkPort, ...] | None:
    """The NVLink ports that can reach a peer; empty when the GPU has none; None when NVML can't say."""
    ports = []
    for link in range(_MAX_PORTS):
        code, can_p2p = ask.code("nvmlDeviceGetNvLinkCapability", handle, link, _CAP_P2P)
        if code == INVALID_ARGUMENT:
            break  # past the last port
        if code == NOT_SUPPORTED or (code == 0 and not can_p2p):
            continue  # no such port on this GPU: an answer, not an unknown
        if code != 0:
            return None
        active = _active(ask, handle, link, capability)
        remote, address = _remote(ask, handle, link) if active else (None, None)
        version = ask("nvmlDeviceGetNvLinkVersion", handle, link)
        speed = read_field(ask, handle, _FIELD_SPEED, link)
        ports.append(NvLinkPort(link, active, remote, address, version, speed))
    return tuple(ports)


def read_field(ask: Ask, handle: Any, field: int, scope: int) -> int | None:
    """An unsigned field value of a GPU, or of the link that ``scope`` names; or None.

    Each field carries its own return code, which is looked at.
    """
    values = ask("nvmlDeviceGetFieldValues", handle, [(field, scope)])
    if values is None or values[0].nvmlReturn != 0:
        return None
    wide = values[0].valueType in (2, 3)  # unsigned long, unsigned long long; else unsigned int
    return int(values[0].value.ullVal if wide else values[0].value.uiVal)


def _active(ask: Ask, handle: Any, link: int, capability: tuple[int, int] | None) -> bool | None:
    if capability is not None and capability >= _FIELD_STATE_SINCE:
        state = read_field(ask, handle, _FIELD_STATE, link)
        if state is not None:
            return state in (_STATE_ACTIVE, _STATE_SLEEP)  # asleep means up, in low power
    code, state = ask.code("nvmlDeviceGetNvLinkState", handle, link)
    if code == 0:
        return bool(state)
    return False if code == NOT_SUPPORTED else None


def _remote(ask: Ask, handle: Any, link: int) -> tuple[str | None, str | None]:
    """What is at the other end, and its bus id."""
    kind = ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
    info = ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
    address: str | None = None
    hidden = False
    if info is not None:
        raw = info.busId if isinstance(info.busId, bytes) else str(info.busId).encode()
        text = raw.decode("ascii", errors="replace")
        hidden = not text or not text.isprintable() or "\ufffd" in text
        if not hidden:
            with contextlib.suppress(ValueError):
                address = bus_id(text)
    if kind == _TYPE_SWITCH or hidden:
        return "switch", address
    if kind == _TYPE_GPU:
        return "gpu", address
    return ("ibmnpu", address) if kind == _TYPE_IBMNPU else (None, address)


def bonded(gpus: Sequence[Gpu], i: int, j: int) -> int | None:
    """NVLinks that GPU i has to GPU j; 0 when there are none; None when that can't be known."""
    mine, theirs = gpus[i].ports, gpus[j].ports
    if mine is None or any(port.active is None for port in mine):
        return None
    known = {gpu.bus_id for gpu in gpus if gpu.bus_id}
    direct = sum(1 for port in mine if port.active and gpus[j].bus_id and port.remote_bus_id == gpus[j].bus_id)
    if direct:
        return direct
    if any(port.active and port.remote is None and port.remote_bus_id not in known for port in mine):
        return None  # a link that is up and leads nobody knows where
    switch = _switch_ports(mine)
    if switch == 0:
        return 0
    if theirs is None or any(port.active is None for port in theirs):
        return None
    return min(switch, _switch_ports(theirs))


def _switch_ports(ports: Sequence[NvLinkPort]) -> int:
    return sum(1 for port in ports if port.active and port.remote == "switch")


def nvlink(count: int) -> Link:
    """The link of that many bonded NVLinks."""
    return Link(LinkKind.NVLINK, count)
