"""A GPU's PCIe link as NVML shows it, to be read while something is copied: an idle link is turned down. Torch-free."""

from __future__ import annotations

import contextlib
from typing import Any

from clusterrun.topology import nvml_ask


class PcieLink:
    """The link of one GPU. Making this takes NVML a while, reading it does not.

    Attributes:
        problem: why it can't be read; "" when it can.
    """

    def __init__(self, uuid: str) -> None:
        self.problem = "" if uuid else "this torch does not say which GPU it uses"
        self._ask: nvml_ask.Ask | None = None
        self._handle: Any = None
        if self.problem:
            return
        try:
            self._ask = nvml_ask.start()
            self._handle = _find(self._ask, uuid)
        except nvml_ask.NvmlUnavailable as error:
            self.problem = str(error)
            return
        if self._handle is None:
            self.problem = f"NVML does not know {uuid}"

    def now(self) -> tuple[int | None, int | None]:
        """Generation and lanes of this moment; None, and ``problem`` set, where NVML does not say."""
        if self.problem or self._ask is None:
            return None, None
        try:
            gen = self._ask("nvmlDeviceGetCurrPcieLinkGeneration", self._handle)
            width = self._ask("nvmlDeviceGetCurrPcieLinkWidth", self._handle)
        except nvml_ask.GpuGone as error:
            self.problem = str(error)
            return None, None
        if gen is None or width is None:
            self.problem = "NVML does not say"
        return gen, width


def _find(ask: nvml_ask.Ask, uuid: str) -> Any:
    """The handle of a GPU; None when NVML has none of that name."""
    for index in range(ask("nvmlDeviceGetCount") or 0):
        with contextlib.suppress(nvml_ask.GpuGone):
            handle = ask("nvmlDeviceGetHandleByIndex", index)
            if handle is not None and ask("nvmlDeviceGetUUID", handle) == uuid:
                return handle
    return None
