"""How long `clusterrun plan` takes, against importing the two libraries it stands on. Goal: at most 1.5x.

The package is installed from its wheel into a virtual environment of its own, as users have it (an editable install
adds some 9 ms of import hooks); dependencies come from the environment this runs in.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

ROUNDS = 15
ROOT = Path(__file__).parents[1]
GOAL = 1.5


def seconds(argv: list[str], env: dict[str, str], cwd: Path) -> float:
    begin = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=env, cwd=cwd)
    return time.perf_counter() - begin


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(place), str(ROOT)], check=True)
        venv.create(place / "venv", with_pip=False)
        python = place / "venv/bin/python"
        purelib = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        subprocess.run([*pip, "install", "--no-deps", "--target", purelib, *map(str, place.glob("*.whl"))], check=True)
        (Path(purelib) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (place / "empty").mkdir()
        env = {**os.environ, "CLUSTERRUN_SHARED_DIR": "/srv/clusterrun"}
        plan = [str(python), "-m", "clusterrun", "plan", "+cluster=a100_nvswitch", "train=ddp_linear"]
        base = [str(python), "-c", "import hydra, submitit"]
        for argv in (plan, base):
            seconds(argv, env, place / "empty")  # compiles byte code
        ours, theirs = [], []
        for _ in range(ROUNDS):  # in alternation: the machine is shared
            ours.append(seconds(plan, env, place / "empty"))
            theirs.append(seconds(base, env, place / "empty"))
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(f"clusterrun plan          {statistics.median(ours) * 1000:6.0f} ms")
    print(f"import hydra, submitit   {statistics.median(theirs) * 1000:6.0f} ms")
    print(f"cli_latency ratio={ratio:.2f} (goal <= {GOAL})")
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
