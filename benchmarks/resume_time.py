"""Finding, verifying and loading a checkpoint of 1 GiB, against `torch.load` of the same tensors from one file.

    python benchmarks/resume_time.py [--rounds 5] [--directory DIR] [--mib 1024]

One rank; rounds alternate; medians. Cold: the files' pages are dropped before, so both read from the disk. Warm: from
memory. Ours reads every byte twice, once to hold it against its digest; torch.load checks nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from checkpoint_parts import checkpointer, forget, joined, state


def main() -> None:
    import torch

    from clusterrun.checkpoint import dcp

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the temporary directory")
    parser.add_argument("--mib", type=int, default=1024)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="clusterrun-bench-", dir=args.directory) as disk, joined():
        entries = state(args.mib * 2**20)
        file, saver = Path(disk) / "state.pt", checkpointer(Path(disk) / "checkpoints")
        torch.save(entries, file)
        assert saver.save(1, entries, {}).ok
        os.sync()

        def ours() -> None:
            info = saver.find()
            loaded: dict[str, Any] = {k: torch.empty(s, dtype=d) for k, (s, d) in dcp.layout(info.path).items()}
            dcp.read(loaded, info.path)
            assert len(loaded) == len(entries)

        def theirs() -> None:
            assert len(torch.load(file, weights_only=True)) == len(entries)

        for cold in (True, False):
            found: dict[str, list[float]] = {"ours": [], "torch.load": []}
            for number in range(args.rounds + 1):
                both = [("ours", ours), ("torch.load", theirs)]
                for which, action in both if number % 2 else both[::-1]:
                    if cold:
                        forget(Path(disk))
                    began = time.perf_counter()
                    action()
                    if number:
                        found[which].append(time.perf_counter() - began)
            middle = {which: statistics.median(times) for which, times in found.items()}
            kind = "cold" if cold else "warm"
            print(
                f"resume_time {kind} ratio={middle['ours'] / middle['torch.load']:.2f}: "
                f"ours {middle['ours']:.2f} s, torch.load {middle['torch.load']:.2f} s",
                flush=True,
            )
    os._exit(0)


if __name__ == "__main__":
    main()
