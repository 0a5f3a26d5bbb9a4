"""The fence of a run: only its newest attempt may publish, requeue or begin another; a zombie of an older one may not.

A node that is cut off from the scheduler goes on computing, and may still reach the storage, while the run already goes
on elsewhere. So each attempt takes the fence with a number and a nonce of its own, and whoever is about to change what
belongs to all attempts looks first whether it still holds it.

The file keeps its size and its inode, and is opened afresh for every look: that is what NFS's close-to-open consistency
covers (names and attributes may come from a cache). Torch-free.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from clusterrun.errors import ClusterrunError

NONCE = "CLUSTERRUN_ATTEMPT_NONCE"  # in the environment of the attempt's processes
_SIZE = 120  # bytes of the file, always
_TRIES = 5
_PAUSE_S = 0.1


class FencedError(ClusterrunError):
    """This process belongs to an attempt that another one has taken the place of."""


@dataclass(frozen=True)
class Claim:
    """What an attempt holds the fence with."""

    attempt: int
    nonce: str


@dataclass(frozen=True)
class Fence:
    """The fence of one run; see ``RunDir.fence``."""

    path: Path

    def take(self, attempt: int) -> Claim:
        """Take it for an attempt, whoever held it. Raises OSError."""
        claim = Claim(attempt, secrets.token_hex(16))
        text = json.dumps(asdict(claim))
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(fd, text.ljust(_SIZE - 1).encode() + b"\n", 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        return claim

    def holder(self) -> Claim:
        """Who holds it now.

        Raises:
            OSError: it can't be read, or holds nothing that makes sense.
        """
        problem = OSError(0, "holds no claim", str(self.path))
        for _ in range(_TRIES):
            try:
                value = json.loads(self.path.read_bytes())
                return Claim(int(value["attempt"]), str(value["nonce"]))
            except OSError as error:
                problem = error
            except (ValueError, KeyError, TypeError):  # in the middle of being written
                pass
            time.sleep(_PAUSE_S)
        raise problem

    def check(self, claim: Claim) -> None:
        """Raises FencedError when another attempt has taken it, OSError when nobody can tell."""
        holder = self.holder()
        if holder != claim:
            raise FencedError(
                f"attempt {claim.attempt} may no longer write into {self.path.parent}: "
                f"attempt {holder.attempt} has taken its place"
            )


def guard(path: Path, attempt: int) -> Callable[[], None]:
    """A check for a process of ``attempt``, which finds its nonce in the environment; without one it checks nothing."""
    nonce = os.environ.get(NONCE)
    if nonce is None:
        return lambda: None
    claim = Claim(attempt, nonce)
    return lambda: Fence(path).check(claim)
