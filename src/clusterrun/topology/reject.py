"""Says in one line why a text is not a topology, and what to paste instead."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PASTE = "paste the output of `nvidia-smi topo -m`"

#: What the text holds, and what that means. The first that matches wins, so errors come before other matrices.
_KNOWN = (
    (r"NVIDIA-SMI has failed|couldn't communicate with the NVIDIA driver", "nvidia-smi could not reach the driver"),
    (r"Failed to initialize NVML", "NVML did not start"),
    (r"command not found|not recognized as|No such file or directory", "the command was not found"),
    (r"No devices were found", "nvidia-smi found no GPU"),
    (r"GPU is lost|fallen off the bus|Unable to determine the device handle", "a GPU could not be reached"),
    (r"command line argument|Invalid combination of input|is not recognized|usage:", "a wrong option was used"),
    (r"Insufficient Permissions|permission denied", "permission was denied"),
    (r"ROCm System Management|XGMI|rocm-smi|AMD-?SMI", "this is of an AMD tool; only NVIDIA's matrix is read"),
    (r"XL\d+|xpu-smi", "this is of Intel's xpu-smi; only NVIDIA's matrix is read"),
)


def explain(lines: Sequence[str], peer: bool) -> str:
    """One line: what the text is, as far as it can be told."""
    text = [line.strip() for line in lines if line.strip()]
    if not text:
        return f"not a topology: the input is empty; {_PASTE}"
    if peer:
        return f"not a topology: a matrix of peer-to-peer status (`topo -p2p`), which does not show links; {_PASTE}"
    for pattern, meaning in _KNOWN:
        for line in text:
            if re.search(pattern, line, re.I):
                return f"not a topology: {meaning} (`{_short(line)}`); {_PASTE}"
    return f"not a topology: no line with GPU0 and no rows of links in it (it starts `{_short(text[0])}`); {_PASTE}"


def _short(line: str) -> str:
    clean = "".join(char if char.isprintable() else " " for char in line)
    return clean if len(clean) <= 90 else clean[:87] + "..."
