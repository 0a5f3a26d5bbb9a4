"""``clusterrun export``: plain weights out of a run's checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from clusterrun.cli.common import verb_parser
from clusterrun.errors import ConfigError

_SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "export",
        "Write a run's weights, of its newest checkpoint or of step N, to one plain file. Digests are checked first.",
        "clusterrun export ddp_linear-laptop-1a2b3c4d -o model.safetensors",
    )
    parser.add_argument("run", metavar="RUN", help="run directory, run id, or the beginning of an id")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="a new file")
    parser.add_argument(
        "--format", choices=("safetensors", "torch"), help="default: by the file's name (.safetensors, .pt, .pth, .bin)"
    )
    parser.add_argument("--step", metavar="N", type=int, help="default: the newest undamaged one")
    parser.add_argument(
        "--shared-dir", type=Path, help="where runs are (default: CLUSTERRUN_SHARED_DIR or ~/clusterrun)"
    )
    options = parser.parse_args(argv)
    form = options.format or _SUFFIXES.get(options.output.suffix)
    if form is None:
        raise ConfigError(f"{options.output}: its name tells no format; give --format safetensors or --format torch")
    from clusterrun.checkpoint.store import Store
    from clusterrun.launch.submit import find_run
    from clusterrun.rundir import default_shared_dir

    shared = options.shared_dir.expanduser() if options.shared_dir else default_shared_dir()
    run = find_run(options.run, [shared])
    from clusterrun.checkpoint.export import Format, export  # torch

    output = options.output.expanduser().absolute()
    if not output.parent.is_dir():
        raise ConfigError(f"{output.parent}: no such directory")
    done = export(Store(run.checkpoints), options.step, Format(form), output)
    for problem in done.skipped:
        print(f"clusterrun: not taken: {problem}", file=sys.stderr)
    for name in done.left_out:
        print(f"clusterrun: left out, no tensor: {name}", file=sys.stderr)
    print(f"{output}: step {done.step}, {done.tensors} tensors, {done.parameters} numbers, {done.bytes} bytes ({form})")
    return 0
