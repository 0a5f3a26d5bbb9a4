"""``clusterrun [OVERRIDES]``: submit one run, or with -m one per point."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from clusterrun.cli.common import is_sweep, over_configs
from clusterrun.cli.following import announce
from clusterrun.cli.verbs import VERBS
from clusterrun.errors import ConfigError

if TYPE_CHECKING:
    from clusterrun.config.schema import RunConfig


def main(argv: list[str]) -> int:
    if "-sc" in argv or "--shell-completion" in argv:
        # Hydra completes overrides; it knows nothing of verbs.
        typed = os.environ.get("COMP_LINE", "")
        if not typed and any(a.startswith("query=") for a in argv):
            raise ConfigError(
                '--shell-completion query: shells ask this; set up with: eval "$(clusterrun -sc install=bash)"'
            )
        os.environ["COMP_LINE"] = re.sub(rf"^(\S+\s+)(?:{'|'.join(VERBS)})\s+", r"\1", typed)
    if {"--quiet", "-q"} & set(argv):
        rest = [a for a in argv if a not in ("--quiet", "-q")]
        if is_sweep(rest):
            raise ConfigError("--quiet: not with -m, whose table says which job each point is")
        return over_configs(rest, _submit_quietly)
    if is_sweep(argv):
        from clusterrun.cli.sweeping import run_sweep

        return run_sweep(argv)
    return over_configs(argv, _submit_one)


def _submit_one(config: RunConfig) -> int:
    from clusterrun.operate import api

    return announce(api.submitted(api.submit(config)), config.wait)


def _submit_quietly(config: RunConfig) -> int:
    """Print the run id alone, for scripts: id=$(clusterrun --quiet ...)."""
    from clusterrun.config.schema import Executor
    from clusterrun.operate import api

    run = api.submit(config)
    print(run.id, flush=True)
    waits = config.cluster.executor is Executor.local if config.wait is None else config.wait
    return run.wait() if waits else 0
