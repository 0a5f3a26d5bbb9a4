"""How long training stands still for a save in the background, against one that is waited for. 1 GiB of state.

    python benchmarks/checkpoint_stall.py [--rounds 5] [--ranks 2] [--directory DIR] [--mib 1024]

Real ranks under torchrun, the state equal on all, so each writes and copies its part. Between saves they compute, as
training does; all that the loop waits for counts: the copy, the agreement at the end. Rounds alternate; medians.
Printed besides: how fast the loop computes while a save is being written, against otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from checkpoint_parts import checkpointer, joined, state, torchrun

GOAL = 0.10


def measure(directory: Path, rounds: int, size: int) -> None:
    """On each rank. Rank 0 prints its seconds as JSON."""
    import torch
    import torch.distributed as dist

    matrix = torch.randn(512, 512)

    def compute(ends: bool) -> bool:
        """A piece of work, and whether all ranks have written: what a training loop's poll tells."""
        for _ in range(5):
            torch.mm(matrix, matrix)
        ended = torch.tensor(float(ends))
        dist.all_reduce(ended)
        return ended.item() == dist.get_world_size()

    with joined() as rank:
        entries, saver = state(size), checkpointer(directory)
        found: dict[str, list[float]] = {"sync": [], "async": [], "alone": [], "beside": []}
        step = 0
        for number in range(rounds + 1):
            for which in ("sync", "async") if number % 2 else ("async", "sync"):
                if rank == 0:
                    os.sync()
                dist.barrier()
                step += 1
                if which == "sync":
                    saved = saver.save(step, entries, {})
                else:
                    began, pieces = time.perf_counter(), 0
                    for _ in range(100):
                        compute(False)
                    alone = (time.perf_counter() - began) / 100
                    saver.start(step, entries, {})
                    began = time.perf_counter()
                    while not compute(saver.has_ended):
                        pieces += 1
                    beside = (time.perf_counter() - began) / max(1, pieces)
                    began = time.perf_counter()
                    saved = saver.finish()
                    if number:
                        found["alone"].append(alone)
                        found["beside"].append(beside)
                assert saved.ok
                if number:
                    found[which].append(saved.stall_s)
        if rank == 0:
            print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the temporary directory")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        measure(Path(args.part), args.rounds, args.mib * 2**20)
    with tempfile.TemporaryDirectory(prefix="clusterrun-bench-", dir=args.directory) as disk:
        sizes = ["--rounds", str(args.rounds), "--mib", str(args.mib)]
        said = torchrun(args.ranks, __file__, "--part", f"{disk}/checkpoints", *sizes)
    found = json.loads(said.partition("RESULT ")[2])
    middle = {which: statistics.median(times) for which, times in found.items()}
    for which in ("sync", "async"):
        least, most = min(found[which]), max(found[which])
        print(f"{which:5} training stands still for {middle[which]:.3f} s, {least:.3f} to {most:.3f}")
    print(f"while it is written, training computes at {middle['alone'] / middle['beside']:.2f} of its speed")
    ratio = middle["async"] / middle["sync"]
    print(f"checkpoint_stall ratio={ratio:.3f}, {args.ranks} rank(s) (goal <= {GOAL})", flush=True)
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
