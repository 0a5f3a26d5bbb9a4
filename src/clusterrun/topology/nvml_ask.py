"""Asks NVML through nvidia-ml-py, and tells "no", "not known" and "this GPU is gone" apart.

The binding is imported inside functions: a login node without it must still be able to import clusterrun.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clusterrun.topology.model import TopologyError

#: Return codes of nvml.h.
NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED = 3, 6, 13, 15, 16
INVALID_ARGUMENT = 2


class NvmlUnavailable(TopologyError):
    """There is no NVML to ask (no binding, no driver), or it does not start or answer. The message says which.

    Attributes:
        absent: True when the machine has no NVIDIA driver or no GPU; False when it may have GPUs that can't be asked.
    """

    def __init__(self, message: str, *, absent: bool = False) -> None:
        super().__init__(message)
        self.absent = absent


class GpuGone(Exception):
    """NVML says that this GPU is lost or needs a reset; nothing more can be asked about it."""


class Ask:
    """Calls NVML and turns its refusals into None, keeping which calls were refused and why.

    Attributes:
        pynvml: the binding's module.
        refused: code of the last refusal of each call, by function name.
    """

    def __init__(self, pynvml: Any) -> None:
        self.pynvml = pynvml
        self.refused: dict[str, int] = {}

    def __call__(self, name: str, *args: Any) -> Any:
        """The answer of ``pynvml.<name>(*args)``, or None when NVML (or this binding) can't say.

        Raises:
            GpuGone: the GPU is lost or needs a reset.
        """
        code, value = self.code(name, *args)
        return value if code == 0 else None

    def code(self, name: str, *args: Any) -> tuple[int, Any]:
        """The return code and the answer, for calls where the refusal itself means something."""
        call: Callable[..., Any] | None = getattr(self.pynvml, name, None)
        if call is None:  # a binding older than the call
            self.refused[name] = FUNCTION_NOT_FOUND
            return FUNCTION_NOT_FOUND, None
        try:
            return 0, call(*args)
        except self.pynvml.NVMLError as error:
            code = int(getattr(error, "value", 999))
            if code in (GPU_IS_LOST, RESET_REQUIRED):
                raise GpuGone(str(error)) from None
            self.refused[name] = code
            return code, None
        except getattr(self.pynvml, "NVMLLibraryMismatchError", ()):  # no NVMLError: the driver is older than the call
            self.refused[name] = FUNCTION_NOT_FOUND
            return FUNCTION_NOT_FOUND, None
        except UnicodeDecodeError:  # a string that the driver left unset
            self.refused[name] = 999
            return 999, None


def start() -> Ask:
    """Load the binding and NVML.

    Raises:
        NvmlUnavailable: with the reason in words.
    """
    try:
        import pynvml
    except ImportError:
        raise NvmlUnavailable("nvidia-ml-py is not installed (`pip install nvidia-ml-py`)") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        code = getattr(error, "value", None)
        if code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            reason = "no NVIDIA driver on this machine (libnvidia-ml.so.1 is not there)"
            raise NvmlUnavailable(reason, absent=True) from None
        if code == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
            raise NvmlUnavailable("the NVIDIA driver is installed but not loaded") from None
        raise NvmlUnavailable(f"NVML does not start: {error}") from None
    return Ask(pynvml)
