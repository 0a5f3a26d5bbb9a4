"""Why a job waits, or how Slurm says it ended, in words that need no knowledge of Slurm.

The codes are those of Slurm's ``job_state_reason`` (https://slurm.schedmd.com/job_reason_codes.html); a site's plugins
may write texts of their own, which are passed on as they are.
"""

from __future__ import annotations

import re

_NEVER = "it will not start as it was asked for"

_REASONS = {
    "": "Slurm has not looked at it yet",
    "None": "Slurm has not looked at it yet",
    "Priority": "other jobs are ahead of it in the queue",
    "Resources": "it is next, once enough nodes are free",
    "Dependency": "it waits for another job to end",
    "DependencyNeverSatisfied": f"the job it waits for ended in the wrong way: {_NEVER}; cancel it",
    "BeginTime": "its earliest start has not come yet (after a requeue Slurm waits up to two minutes)",
    "JobHeldUser": "you hold it; let it go with: scontrol release JOBID",
    "JobHeldAdmin": "an administrator holds it; ask them",
    "JobHoldMaxRequeue": "it was requeued too often and Slurm holds it; let it go with: scontrol release JOBID",
    "launch_failed_requeued_held": "it failed to launch on a node and Slurm holds it; scontrol release JOBID",
    "JobLaunchFailure": "it could not be launched on a node",
    "PartitionDown": "its partition does not start jobs now (down)",
    "PartitionInactive": "its partition takes no jobs now (inactive)",
    "PartitionNodeLimit": f"it asks for more nodes than the partition allows or has up: {_NEVER}",
    "PartitionTimeLimit": f"its time limit is above the partition's: {_NEVER}; lower cluster.time_limit",
    "PartitionConfig": f"the partition can't hold it (nodes, CPUs or GPUs asked for): {_NEVER}; lower cluster.nodes or "
    "choose another partition",
    "BadConstraints": f"no node of the partition fits what was asked for: {_NEVER}",
    "NodeDown": "a node it needs is down",
    "ReqNodeNotAvail": "nodes it asks for are not available (down, drained, or reserved)",
    "Reservation": "it waits for its reservation to begin",
    "ReservationDeleted": f"its reservation is gone: {_NEVER}",
    "InvalidAccount": f"its account is not valid: {_NEVER}; set cluster.slurm.account",
    "InvalidQOS": f"its QOS is not valid: {_NEVER}; set cluster.slurm.qos",
    "AccountNotAllowed": f"its account may not use this partition: {_NEVER}",
    "QOSNotAllowed": f"its QOS may not be used in this partition: {_NEVER}",
    "QOSUsageThreshold": "the QOS has used too much; it waits",
    "QOSTimeLimit": f"its time limit is above what the QOS allows: {_NEVER}; lower cluster.time_limit",
    "QOSResourceLimit": "a limit of the QOS is reached",
    "QOSJobLimit": "the QOS has as many jobs running as it may have",
    "AssociationJobLimit": "your account has as many jobs running as it may have",
    "AssociationResourceLimit": "your account uses as much as it may use",
    "AssociationTimeLimit": "your account has used up its time",
    "JobArrayTaskLimit": "as many points of its sweep run as may at a time (sweep.array_parallelism)",
    "Licenses": "it waits for a licence",
    "FrontEndDown": "the front-end node is down",
    "Cleaning": "it was requeued, and its last start is still being cleaned up",
    "Prolog": "the nodes are being prepared",
    "Reboot": "its nodes are rebooting",
    "Nodes": "its nodes are not ready yet",
    "NonZeroExitCode": "it ended with an exit code that is not 0",
    "TimeLimit": "it ran into its time limit",
    "RaisedSignal": "it ended by a signal",
    "OutOfMemory": "it used more memory than it asked for",
    "SystemFailure": "Slurm itself failed",
    "InactiveLimit": "it ran into the partition's InactiveLimit",
    "DeadLine": "it can't end before its deadline",
    "AccountingPolicy": "a limit of your account or QOS is reached",
    "SchedDefer": "the scheduler looks at new jobs only now and then",
}

_WHOSE = {"Assoc": "your account", "QOS": "the QOS", "Max": "the QOS"}
_WHAT = {
    "jobs": "running jobs",
    "submitjobs": "jobs in the queue",
    "submit": "jobs in the queue",
    "node": "nodes",
    "cpu": "CPU cores",
    "mem": "memory",
    "memory": "memory",
    "gres": "GPUs (or other GRES)",
    "wall": "wall-clock time",
    "wallduration": "wall-clock time",
    "billing": "billing units",
    "energy": "energy",
    "license": "licences",
    "bb": "burst buffer",
    "unknown": "some resource",
}
_WHO = {
    "PerUser": " for each user",
    "PerAccount": " for each account",
    "PerJob": " for one job",
    "PerNode": " per node",
}


def why_pending(reason: str) -> str:
    """A pending job's reason in plain words; Slurm's own word stays behind it where people look it up."""
    code = reason.strip().strip("()")
    if code in _REASONS:
        return _REASONS[code]
    head, _, rest = code.partition(",")
    if head in _REASONS and rest:  # ReqNodeNotAvail, UnavailableNodes:n[1-4]
        return f"{_REASONS[head]}: {_rest(rest.strip())}"
    if code.lower().startswith("nodes required for job are down"):
        return "nodes it needs are down, drained, or reserved for jobs in partitions of higher priority"
    return _limit(code) or code


def _rest(text: str) -> str:
    nodes = re.fullmatch(r"(?:Unavailable|Reserved)?Nodes:(.*)", text)
    return nodes.group(1) or "which ones is not said" if nodes else text[:1].lower() + text[1:]


def _limit(code: str) -> str | None:
    """``AssocGrpGRES``, ``QOSMaxCpuPerUserLimit``, ``MaxGRESPerAccount``: whose limit, and of what."""
    match = re.fullmatch(r"(Assoc|QOS|Max)(Grp|Max|Min)?(.*?)(PerUser|PerAccount|PerJob|PerNode)?(Limit)?", code)
    if not match or (match.group(1) != "Max" and not match.group(2)) or not match.group(3):
        return None
    whose, kind, what, who = _WHOSE[match.group(1)], match.group(2) or "Max", match.group(3), match.group(4)
    spent = re.fullmatch(r"(.*?)(Minutes|RunMinutes|CPUMins|CPURunMins)", what)
    thing = (spent.group(1) or "CPU") if spent else what
    name = _WHAT.get(thing.lower(), thing)
    if spent:
        name = f"the time it may spend on {name}"
    if kind == "Min":
        return f"it asks for less than {whose} must at least: {name}{_WHO.get(who, '')} ({code}): {_NEVER}"
    for_good = who in ("PerJob", "PerNode") or thing.lower() == "wall"
    end = f": {_NEVER}" if for_good else ""
    together = " together" if kind == "Grp" else ""
    return f"{whose} is at its limit of {name}{together}{_WHO.get(who, '')} ({code}){end}"


_ENDED = {
    "BOOT_FAIL": "a node did not boot",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "Slurm says it completed, but it wrote no end in its ledger",
    "DEADLINE": "it missed its deadline",
    "FAILED": "the job failed before the conductor could write down why",
    "NODE_FAIL": "a node of the job died",
    "OUT_OF_MEMORY": "it used more memory than it asked for (cluster.slurm.mem)",
    "PREEMPTED": "it was preempted and not requeued",
    "TIMEOUT": "it ran into its time limit",
    "REVOKED": "another cluster of the federation took it",
}


def how_ended(state: str, exit_code: str = "") -> str:
    """What Slurm's last word on a job means."""
    code = f" (exit code {exit_code.partition(':')[0]})" if state == "FAILED" and exit_code else ""
    return _ENDED.get(state, f"Slurm says {state}") + code
