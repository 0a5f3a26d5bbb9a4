"""The lab's network: a bridge, a namespace and a cable for each node; cables pulled and slowed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from lab_commands import LabError

from slurm_lab_parts.base import CONTROLLER, Node, run, run_ok
from slurm_lab_parts.daemons import pids

BRIDGE = "crlab0"


def firewall(*rule: str) -> bool:
    """Where bridged packets go through iptables (docker turns that on, and drops what it doesn't
    know), the nodes need a rule to reach each other."""
    if shutil.which("iptables") is None:
        return False
    return run_ok("iptables", "--wait", *rule, "--in-interface", BRIDGE, "--out-interface", BRIDGE, "--jump", "ACCEPT")


def make_network(nodes: Sequence[Node]) -> None:
    for node in nodes:
        run("ip", "netns", "add", node.netns)
    lines = [
        f"link add {BRIDGE} type bridge",
        f"addr add {CONTROLLER}/24 dev {BRIDGE}",
        f"link set {BRIDGE} up",
    ]
    for node in nodes:
        lines += [
            f"link add {node.cable} type veth peer name eth0 netns {node.netns}",
            f"link set {node.cable} master {BRIDGE} up",
        ]
    run("ip", "-batch", "-", stdin="\n".join(lines) + "\n")
    firewall("--insert", "FORWARD")
    for node in nodes:
        inside = f"link set lo up\naddr add {node.address}/24 dev eth0\nlink set eth0 up\n"
        run("ip", "-netns", node.netns, "-batch", "-", stdin=inside)


def network_exists(nodes: Sequence[Node]) -> bool:
    """False after a reboot, where /run outlives it."""
    return all(Path(f"/sys/class/net/{name}").exists() for name in [BRIDGE, *(node.cable for node in nodes)])


def lab_netns() -> list[str]:
    """The lab's network namespaces on this machine, whatever the settings say."""
    with contextlib.suppress(OSError):
        return [path.name for path in Path("/run/netns").iterdir() if path.name.startswith("crlab-c")]
    return []


def pids_in_nodes() -> list[int]:
    """Every process inside the lab's network namespaces: slurmd, job steps and what they left."""
    ours = [os.stat(f"/run/netns/{name}") for name in lab_netns()]
    found = []
    for pid in pids():
        with contextlib.suppress(OSError):
            its = os.stat(f"/proc/{pid}/ns/net")
            if any(os.path.samestat(its, one) for one in ours):
                found.append(pid)
    return found


def is_plugged(node: Node) -> bool:
    try:
        return Path(f"/sys/class/net/{node.cable}/operstate").read_text().strip() == "up"
    except OSError:
        return False


def plug(node: Node) -> None:
    run("ip", "link", "set", node.cable, "up")


def burst_of(rate: str) -> int:
    """Bytes that tbf may send at once: 10 ms worth, since on a busy machine its timer comes late and what was not sent
    until then is lost (with 64 kB a link of 1gbit reached 0.7 of it)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.lower())
    if match is None:
        raise LabError(f"--rate {rate}: write it as 100mbit or 1gbit", 2)
    bits = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]
    return max(65536, int(bits / 8 * 0.01))


def slow(node: Node, rate: str | None, delay: str | None) -> None:
    """Both directions, as a bad cable would be: each end shapes what it sends."""
    if delay:
        shape = ["netem", "limit", "10000", "delay", delay, *(["rate", rate] if rate else [])]
    elif rate:  # netem could do this too, but small kernels have only tbf
        shape = ["tbf", "rate", rate, "burst", str(burst_of(rate)), "latency", "400ms"]
    else:
        raise LabError("slow needs --rate or --delay (or both)", 2)
    try:
        run("tc", "qdisc", "replace", "dev", node.cable, "root", *shape)
        run("tc", "-netns", node.netns, "qdisc", "replace", "dev", "eth0", "root", *shape)
    except LabError as error:
        if "kind is unknown" in str(error):
            raise LabError(f"this kernel was built without {shape[0]} (module sch_{shape[0]})") from None
        raise


def unslow(node: Node) -> None:
    # Fails if there is nothing to remove.
    run("tc", "qdisc", "delete", "dev", node.cable, "root", check=False)
    run("tc", "-netns", node.netns, "qdisc", "delete", "dev", "eth0", "root", check=False)
