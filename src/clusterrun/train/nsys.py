"""Between torchrun and a worker: on chosen ranks the worker runs under NVIDIA Nsight Systems, on the others as it is.

    torchrun ... -m clusterrun.train.nsys --ranks 0,8 --output DIR [--marked] [--option X]... -- <python's arguments>

The process becomes what it starts: torchrun sees its worker, or nsys in its place. With ``--marked`` nsys records only
between the marks that the trainer sets (profile.steps), else everything.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from clusterrun.rundir import make_private


def main(argv: list[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="clusterrun.train.nsys")
    parser.add_argument("--ranks", required=True, type=lambda text: {int(rank) for rank in text.split(",")})
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--marked", action="store_true")
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("worker", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    worker = [sys.executable, "-u", *(args.worker[1:] if args.worker[:1] == ["--"] else args.worker)]
    rank = int(os.environ["RANK"])
    if rank not in args.ranks:
        os.execv(worker[0], worker)
    nsys = shutil.which("nsys")
    if nsys is None:
        where = os.environ.get("CLUSTERRUN_NODE", "this node")
        sys.exit(
            f"error: profile.tool=nsys: no nsys on {where} in PATH; install NVIDIA Nsight Systems there "
            "(or load its module in cluster.slurm.setup), or use profile.tool=torch"
        )
    make_private(args.output.parent)
    make_private(args.output)
    os.execv(nsys, nsys_argv(nsys, args.output / f"rank{rank}", marked=args.marked, options=args.option) + worker)


def nsys_argv(nsys: str, output: Path, *, marked: bool, options: list[str]) -> list[str]:
    """Nsight Systems' command line (User Guide, "CLI Profile Command Switch Options") before the program's own."""
    argv = [nsys, "profile", f"--output={output}", "--force-overwrite=true", "--trace=cuda,nvtx,osrt"]
    if marked:
        argv += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    return argv + options


if __name__ == "__main__":
    main()
