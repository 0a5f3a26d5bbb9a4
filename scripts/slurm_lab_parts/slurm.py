"""Slurm's files and daemons in the lab, and what Slurm says of the nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lab_commands import LabError, wait_until

from slurm_lab_parts.base import CONF, CONTROLLER, LAB, WAIT_S, Node, Settings, nodes_of, run, tail
from slurm_lab_parts.daemons import daemons, start_daemons
from slurm_lab_parts.net import is_plugged

DEFAULT_CONF = Path("/etc/slurm/slurm.conf")  # where Slurm commands look without SLURM_CONF
USABLE_STATES = {"idle", "mixed", "allocated", "completing", "planned", "reserved"}
SLURM_CONF = """\
# Written by scripts/slurm_lab; changes are lost.
ClusterName=clusterrun-lab
SlurmctldHost=ctl({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued or preempted job starts again only after the life time of its credential: 120 s by
# default, and for any value below 5.
AuthInfo=cred_expire=5
# Listen on the bridge alone, not on the machine's outside addresses.
CommunicationParameters=NoCtldInAddrAny
DisableRootJobs=NO

StateSaveLocation={lab}/ctl/state
SlurmctldPidFile={lab}/ctl/slurmctld.pid
SlurmctldLogFile={lab}/ctl/slurmctld.log
SlurmdSpoolDir={lab}/%n/spool
SlurmdPidFile={lab}/%n/slurmd.pid
SlurmdLogFile={lab}/%n/slurmd.log

# No cgroups: the nodes share the machine's, and containers often have none to write to.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true

SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Believe this file about CPUs and memory, not the machine.
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
KillWait=5
OverTimeLimit=0
InactiveLimit=0
MinJobAge=3600
MaxJobCount=20000
MaxArraySize=1001

{gres_types}
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 \
DefaultTime=60 MaxTime=UNLIMITED State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF DefaultTime=60 MaxTime=UNLIMITED State=UP
"""
# What a host runs inside its new namespaces. Slurm takes the host name from the UTS namespace. Its
# own hosts and resolv.conf, because a look-up that goes to a name server out of reach takes seconds
# (torch's rendezvous does one for each peer).
# Not `ip netns exec`: that remounts /sys, and slurmd stops without the cgroup mounts there.
HOST_SH = """\
set -e
mount --bind "$1" /etc/hosts
if [ -e /etc/resolv.conf ]; then mount --bind "$2" /etc/resolv.conf; fi
hostname "$3"
shift 3
exec "$@"
"""


class SlurmState(NamedTuple):
    state: str
    reason: str


UNKNOWN = SlurmState("unknown", "slurmctld doesn't answer")
DEAD = "without slurmd"


def write_files(settings: Settings) -> None:
    nodes = nodes_of(settings)
    for directory in (LAB, LAB / "ctl", LAB / "dev", *(LAB / node.name / "spool" for node in nodes)):
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)
    hosts = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", f"{CONTROLLER} ctl"]
    hosts += [f"{node.address} {node.name}" for node in nodes]
    (LAB / "hosts").write_text("\n".join(hosts) + "\n")
    # No name server: a look-up of anything else fails at once.
    (LAB / "resolv.conf").write_text("options timeout:1 attempts:1\n")

    gpus = f"Gres=gpu:a100:{settings.gpus}" if settings.gpus else ""
    lines = [
        f"NodeName={node.name} NodeAddr={node.address} CPUs={settings.cpus}"
        f" RealMemory={settings.memory_mb} {gpus} State=UNKNOWN"
        for node in nodes
    ]
    CONF.write_text(
        SLURM_CONF.format(
            controller=CONTROLLER,
            lab=LAB,
            gres_types="GresTypes=gpu" if gpus else "",
            nodes="\n".join(lines),
        )
    )
    # Slurm wants a device for each GPU: with none the node is INVAL, with ordinary files no job gets
    # a CUDA_VISIBLE_DEVICES. Any device will do.
    for number in range(settings.gpus):
        (LAB / "dev" / f"nvidia{number}").symlink_to("/dev/null")
    gres = f"Name=gpu Type=a100 Flags=nvidia_gpu_env File={LAB}/dev/nvidia[0-{settings.gpus - 1}]\n"
    (LAB / "gres.conf").write_text(gres if gpus else "")


def on_host(name: str) -> list[str]:
    """Run what follows with a host name and name look-ups of its own."""
    new = ["unshare", "--uts", "--mount", "--propagation", "private"]
    return [*new, "sh", "-c", HOST_SH, "sh", f"{LAB}/hosts", f"{LAB}/resolv.conf", name]


def start_slurmctld() -> None:
    log = LAB / "ctl" / "slurmctld.log"
    start_daemons({log: [*on_host("ctl"), "slurmctld", "-f", str(CONF)]})

    def answers() -> bool:
        return "is UP" in run("scontrol", "ping", check=False)

    wait_until(lambda: answers() or "slurmctld" not in daemons(), WAIT_S)
    if not answers():
        raise LabError(f"slurmctld doesn't answer{tail(log)}")


def start_slurmds(nodes: Sequence[Node]) -> None:
    starts: dict[Path, Sequence[str]] = {}
    for node in nodes:
        slurmd = ["slurmd", "-f", str(CONF), "-N", node.name]
        starts[node.log] = ["nsenter", f"--net=/run/netns/{node.netns}", *on_host(node.name), *slurmd]
    start_daemons(starts)


def wait_for_nodes(nodes: Sequence[Node]) -> None:
    """Until Slurm can use every node, or a slurmd is dead, for which waiting is no help."""

    def settled() -> bool:
        bad = bad_nodes(nodes)
        return not bad or DEAD in bad.values()

    wait_until(settled, WAIT_S)
    if bad := bad_nodes(nodes):
        worst = next((name for name, why in bad.items() if why == DEAD), next(iter(bad)))
        states = ", ".join(f"{name} is {why}" for name, why in bad.items())
        raise LabError(f"the nodes don't come up: {states}{tail(LAB / worst / 'slurmd.log')}")


def bad_nodes(nodes: Sequence[Node]) -> dict[str, str]:
    """The nodes that no job could run on now, and what is wrong with each."""
    running, states = daemons(), slurm_states()
    bad = {}
    for node in nodes:
        state = states.get(node.name, UNKNOWN).state
        if node.name not in running:
            bad[node.name] = DEAD
        elif not is_plugged(node):  # Slurm takes half a minute to notice
            bad[node.name] = "unplugged"
        elif not is_usable(state):
            bad[node.name] = state
    return bad


def slurm_states() -> dict[str, SlurmState]:
    """Slurm's own word on each node. Empty when slurmctld doesn't answer."""
    if "slurmctld" not in daemons():  # sinfo would wait long for it
        return {}
    try:
        text = run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N|%T|%E", timeout=10)
    except (LabError, OSError):  # OSError: not installed
        return {}
    rows = (line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2)
    return {name: SlurmState(state, "" if reason == "none" else reason) for name, state, reason in rows}


def is_usable(state: str) -> bool:
    """A star means that the node doesn't answer; a minus that backfill has plans for it."""
    return state.rstrip("-") in USABLE_STATES


def link_default_conf() -> None:
    """Make plain `sinfo` work, unless the machine has a Slurm of its own."""
    if DEFAULT_CONF.exists() and not is_our_link():
        return
    DEFAULT_CONF.parent.mkdir(exist_ok=True)
    unlink_default_conf()
    with contextlib.suppress(FileExistsError):  # someone's dangling link: theirs
        DEFAULT_CONF.symlink_to(CONF)


def is_our_link() -> bool:
    return DEFAULT_CONF.is_symlink() and os.readlink(DEFAULT_CONF) == str(CONF)


def unlink_default_conf() -> None:
    if is_our_link():
        DEFAULT_CONF.unlink()
