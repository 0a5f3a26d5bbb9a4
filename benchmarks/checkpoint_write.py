"""Saving 1 GiB of state, with digests, fsync and publishing, against `dd conv=fsync` of as many bytes on the same disk.

    python benchmarks/checkpoint_write.py [--rounds 5] [--directory DIR] [--mib 1024]

One rank. Rounds alternate; of each side the median counts. dd copies a file of random bytes that is in memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from checkpoint_parts import checkpointer, joined, state

GOAL = 0.85


def dd(source: Path, target: Path) -> float:
    began = time.perf_counter()
    subprocess.run(["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync"], check=True, capture_output=True)
    took = time.perf_counter() - began
    target.unlink()
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the temporary directory")
    parser.add_argument("--mib", type=int, default=1024)
    args = parser.parse_args()
    size = args.mib * 2**20
    with (
        tempfile.TemporaryDirectory(prefix="clusterrun-bench-", dir=args.directory) as disk,
        tempfile.TemporaryDirectory(prefix="clusterrun-bench-", dir="/dev/shm") as memory,
        joined(),
    ):
        source = Path(memory) / "bytes"
        source.write_bytes(os.urandom(2**20) * args.mib)
        entries, found = state(size), {"dd": list[float](), "ours": list[float]()}
        for number in range(args.rounds + 1):
            for which in ("dd", "ours") if number % 2 else ("ours", "dd"):
                os.sync()
                if which == "dd":
                    took = dd(source, Path(disk) / "copy")
                else:
                    saver = checkpointer(Path(disk) / f"checkpoints{number}")
                    saved = saver.save(1, entries, {})
                    assert saved.ok
                    assert saved.bytes >= size
                    took = saved.seconds
                    shutil.rmtree(saver.store.directory)
                if number:  # the first round warms up
                    found[which].append(took)
        seconds = {which: statistics.median(times) for which, times in found.items()}
        for which, times in found.items():
            rate = size / seconds[which] / 1e6
            print(f"{which:4} {seconds[which]:.2f} s, {rate:.0f} MB/s, {min(times):.2f} to {max(times):.2f} s")
    ratio = seconds["dd"] / seconds["ours"]
    print(f"checkpoint_write ratio={ratio:.2f} (goal >= {GOAL})", flush=True)
    return 0 if ratio >= GOAL else 1


if __name__ == "__main__":
    code = main()
    os._exit(code)
