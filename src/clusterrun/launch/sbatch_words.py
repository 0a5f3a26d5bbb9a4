"""What sbatch says when it refuses a job, as one line: its own words, the setting they are about, and what is offered.

The messages are Slurm's (``slurm_errno.c``); they were met on Slurm 22.05 with and without accounting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from clusterrun.errors import CommandError
from clusterrun.launch.site import Partition, Site, listed, read_site

Asked = Mapping[str, Any]  # what submitit was told: partition, time, additional_parameters, ...


@dataclass(frozen=True)
class _Rule:
    """Words of sbatch -> the setting that they are about, and what the site offers instead."""

    words: str
    setting: Callable[[Asked], str]
    offer: Callable[[Site, Asked], str]


def explain(said: str, asked: Asked, site: Callable[[], Site] = read_site) -> str:
    """One line for a refusal. ``said`` is all that sbatch printed; ``site`` is asked only when it can help."""
    lines = [re.sub(r"^sbatch: (error|fatal): ", "", line.strip()) for line in said.splitlines() if line.strip()]
    lines = [line.removeprefix("Batch job submission failed: ") for line in lines]
    lines = [line for line in lines if not line.startswith('Try "sbatch --help"')]
    words = " / ".join(dict.fromkeys(lines)) or "it said nothing"
    for rule in _RULES:
        if re.search(rule.words, said, re.IGNORECASE):
            setting = rule.setting(asked)
            about = f" ({setting})" if setting else ""
            try:
                offer = rule.offer(site(), asked)
            except CommandError as error:
                offer = f"what it offers can't be asked ({error})"
            return f"sbatch refused: {words}{about}. {offer}".rstrip(". ")
    for pattern, advice in _ADVICE:
        if re.search(pattern, said, re.IGNORECASE):
            return f"sbatch failed: {words}. {advice}"
    return f"sbatch refused: {words}"


def _extra(asked: Asked) -> Mapping[str, Any]:
    found: Mapping[str, Any] = asked.get("additional_parameters") or {}
    return found


def _value(asked: Asked, *names: str) -> str:
    shown = []
    for name in names:
        value = asked.get(name, _extra(asked).get(name))
        if value not in (None, "", False):
            shown.append(f"{_SETTINGS.get(name, f'--{name}')}={value}")
    return ", ".join(shown)


_SETTINGS = {
    "partition": "cluster.slurm.partition",
    "account": "cluster.slurm.account",
    "qos": "cluster.slurm.qos",
    "constraint": "cluster.slurm.constraint",
    "reservation": "cluster.slurm.reservation",
    "mem": "cluster.slurm.mem",
    "mem_per_cpu": "cluster.slurm.mem_per_cpu",
    "mem_per_gpu": "cluster.slurm.mem_per_gpu",
    "licenses": "cluster.slurm.licenses",
    "nodelist": "cluster.slurm.nodelist",
    "dependency": "cluster.slurm.dependency",
    "gpus_per_node": "GPUs per node",
    "gres": "gres",
    "nodes": "nodes with spares",
    "cpus_per_task": "CPU cores per node",
}


def _time(asked: Asked) -> str:
    return f"cluster.time_limit={asked['time']} min" if asked.get("time") else "cluster.time_limit is not set"


def _where(site: Site, asked: Asked) -> Partition | None:
    return site.partition(asked.get("partition"))


def _in_partition(site: Site, asked: Asked, words: Callable[[Partition], str]) -> str:
    """What the job's own partition offers, then the others where they offer something else."""
    own = _where(site, asked)
    if own is None:
        return _partitions(site, asked)
    others = [f"{p.name}: {words(p)}" for p in site.partitions if p is not own and p.up and words(p) != words(own)]
    also = f"; other partitions: {listed(others, 5)}" if others else ""
    return f"Partition {own.name} offers {words(own)}{also}"


def _partitions(site: Site, asked: Asked) -> str:
    found = []
    for p in site.partitions:
        marks = f"{'default, ' if p.default else ''}{'closed now, ' if not p.up else ''}"
        size = f"{p.nodes} node{'s' if p.nodes != 1 else ''}"
        found.append(f"{p.name} ({marks}{size}, {p.gres_words}, up to {p.time_limit or 'any time'})")
    return f"Partitions here: {listed(found)}"


def _accounts(site: Site, asked: Asked) -> str:
    own = _where(site, asked)
    only = f"; partition {own.name} takes only {', '.join(own.accounts)}" if own and own.accounts else ""
    if not site.associations:
        return f"Ask your site which account is yours, and set cluster.slurm.account{only}"
    return f"Your accounts: {listed(site.accounts)}{only}"


def _qos(site: Site, asked: Asked) -> str:
    own = _where(site, asked)
    only = f"; partition {own.name} takes only {', '.join(own.qos)}" if own and own.qos else ""
    if not site.associations:
        return f"Ask your site which QOS are yours, and set cluster.slurm.qos{only}"
    of = {a.account: a.qos for a in site.associations}
    return f"Your QOS: {listed(f'{account}: {chr(44).join(qos)}' for account, qos in of.items())}{only}"


def _gpus(p: Partition) -> str:
    return p.gres_words


def _times(p: Partition) -> str:
    return f"at most {p.time_limit}" if p.time_limit else "any time limit"


def _sizes(p: Partition) -> str:
    most = f"at most {p.max_nodes} nodes a job, " if p.max_nodes is not None else ""
    return f"{most}{p.nodes} nodes in all"


def _machines(p: Partition) -> str:
    kinds = [f"{k.count} node{'s' if k.count != 1 else ''} with {k.cpus} CPUs, {k.memory_mb} MB" for k in p.kinds]
    return f"{listed(kinds, 4)}, {p.gres_words}"


def _features(p: Partition) -> str:
    found = dict.fromkeys(f for k in p.kinds for f in k.features)
    return f"features {listed(found)}" if found else "no features"


def _limits(site: Site, asked: Asked) -> str:
    return "Wait until jobs of yours have ended, ask for less, or choose another QOS. " + _qos(site, asked)


_RULES = (
    _Rule("invalid partition", lambda a: _value(a, "partition"), _partitions),
    _Rule("group not permitted|partition configuration not available", lambda a: _value(a, "partition"), _partitions),
    _Rule("invalid account",
          lambda a: _value(a, "account", "partition") or "cluster.slurm.account is not set", _accounts),
    _Rule("invalid qos", lambda a: _value(a, "qos") or "cluster.slurm.qos is not set", _qos),
    _Rule("QOS|accounting/QOS policy|Assoc(Grp|Max)", lambda a: _value(a, "account", "qos"), _limits),
    _Rule("time limit", _time, lambda s, a: _in_partition(s, a, _times)),
    _Rule("memory specification", lambda a: _value(a, "mem", "mem_per_cpu", "mem_per_gpu"),
          lambda s, a: _in_partition(s, a, _machines)),
    _Rule("generic resource|gres", lambda a: _value(a, "gpus_per_node", "gres"),
          lambda s, a: _in_partition(s, a, _gpus)),
    _Rule("node configuration is not available|more processors|task count|cpu count",
          lambda a: _value(a, "nodes", "cpus_per_task", "gpus_per_node", "gres", "constraint"),
          lambda s, a: _in_partition(s, a, _machines)),
    _Rule("node count", lambda a: _value(a, "nodes"), lambda s, a: _in_partition(s, a, _sizes)),
    _Rule("invalid feature", lambda a: _value(a, "constraint"), lambda s, a: _in_partition(s, a, _features)),
    _Rule("invalid node name", lambda a: _value(a, "nodelist", "exclude"), lambda s, a: _in_partition(s, a, _sizes)),
)  # fmt: skip

_ADVICE = (
    ("unable to contact slurm controller|socket timed out|connect failure|unexpected message",
     "This is no refusal: slurmctld did not answer; try again in a minute"),
    ("reservation is invalid", "See the reservations with: scontrol show reservation"),
    ("invalid license", "See the licences with: scontrol show licenses"),
    ("unrecognized option", "This Slurm has no such option; take it out of cluster.slurm.extra"),
    ("dependency problem|job dependency", "The job it should wait for is not known to Slurm any more"),
    ("access/permission denied|user id", "Ask your site whether you may submit here"),
    ("auth|credential|munge", "munge does not work on this machine; ask your site"),
)  # fmt: skip
