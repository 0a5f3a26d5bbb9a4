"""``clusterrun init``: a starter cluster configuration for this site."""

from __future__ import annotations

from pathlib import Path

from clusterrun.cli.common import add_quiet, verb_parser
from clusterrun.errors import ClusterrunError, ConfigError


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "init",
        "Write conf/cluster/NAME.yaml for this site, from what sinfo, scontrol, sacctmgr and NVML say.",
        "clusterrun init mysite --partition gpu; clusterrun plan +cluster=mysite train=ddp_linear",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="default: the name that Slurm has for the cluster")
    parser.add_argument("--partition", help="default: the one with GPUs")
    parser.add_argument("--print", action="store_true", help="show it, write nothing")
    parser.add_argument("--force", action="store_true", help="replace a file of that name")
    add_quiet(parser)
    options = parser.parse_args(argv)
    from clusterrun.config.compose import compose
    from clusterrun.errors import CommandError
    from clusterrun.launch.site import read_site
    from clusterrun.operate import api
    from clusterrun.operate.init import choose_partition, draft, write
    from clusterrun.topology.node import read_node

    try:
        site = read_site()
    except CommandError as error:
        raise ConfigError(f"init: Slurm can't be asked here ({error}); run it on a login node or a GPU node") from None
    name = options.name or site.name or "mysite"
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigError(f"init {name}: letters, digits, '.', '_' and '-' only")
    made = draft(name, site, choose_partition(site, options.partition), read_node())
    if options.print:
        print(made.text, end="")
        return 0
    path = Path("conf") / "cluster" / f"{name}.yaml"
    write(made.text, path, options.force)
    try:
        api.plan(compose([f"cluster={name}"]))
    except ClusterrunError as error:  # it is there to be corrected, but nobody should find out at submission
        raise ClusterrunError(f"{path}: written, but it does not plan yet: {error}") from None
    if not options.quiet:
        print(f"wrote {path}; look through it, then: clusterrun plan +cluster={name} train=ddp_linear")
    return 0
