"""The verbs. Each is the module of its name in this package, with ``main(arguments) -> exit code``."""

from __future__ import annotations

VERBS = (
    "bench",
    "cancel",
    "checkpoints",
    "clean",
    "clusters",
    "estimate",
    "export",
    "init",
    "logs",
    "nodes",
    "plan",
    "preflight",
    "report",
    "requeue",
    "resume",
    "status",
    "topo",
)
