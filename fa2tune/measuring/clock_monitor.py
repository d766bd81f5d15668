"""Clock monitor: what NVML reports of the GPU while it is measured: clock, power limit, and reasons for throttling. Nothing is
timed with it.

Without the library (nvidia-ml-py), the driver's part of it or the permission, nothing is reported, and rows say that clocks
were not monitored. Importable without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

# NVML's bits of "clocks event reasons" (nvml.h, nvmlClocksEventReasons)
SOFTWARE_POWER_CAP = 0x04
#: hardware slowdown, software thermal, hardware thermal, power brake: the GPU is ill-cooled or ill-fed. The software power
#: cap is none of them: under full load a healthy GPU runs at its power limit.
THROTTLED = 0x08 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True)
class Reading:
    """One look at the GPU. None: it does not say."""

    clock_mhz: int | None = None  #: of the SMs
    reasons: int | None = None  #: NVML's bits

    @property
    def throttled(self) -> bool:
        return bool((self.reasons or 0) & THROTTLED)

    @property
    def power_capped(self) -> bool:
        return bool((self.reasons or 0) & SOFTWARE_POWER_CAP)


class ClockMonitor:
    """Looks at one GPU. Two questions to the driver a look, some microseconds each."""

    def __init__(self, bus_id: str) -> None:
        """``bus_id``: "domain:bus:device.function" on the PCI bus. By that, and not by its UUID, because a MIG slice has an
        UUID of its own, which NVML tells no clocks of; they are the whole GPU's."""
        self.why = ""  #: why nothing can be said; "": something can
        self._nvml: Any = None
        try:
            import pynvml
        except ImportError:
            self.why = "the package nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
        except pynvml.NVMLError as error:
            self.why = f"NVML: {error}"
            return
        self._nvml = pynvml
        # renamed in 2023; either may be missing
        self._reasons: Any = getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        if self.read() == Reading():
            self.why = "NVML reports neither clock nor throttle reasons of this GPU"

    def _asked(self, question: Callable[[], Any]) -> int | None:
        if self._nvml is not None:
            with suppress(self._nvml.NVMLError):
                return int(question())
        return None

    def read(self) -> Reading:
        if self._nvml is None or self.why:
            return Reading()
        nvml, handle = self._nvml, self._handle
        clock = self._asked(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        return Reading(clock, self._asked(lambda: self._reasons(handle)) if self._reasons else None)

    def power_limit_w(self) -> int | None:
        limit = self._asked(lambda: self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle))
        return None if limit is None else limit // 1000


@cache
def of_device(device_index: int) -> ClockMonitor:
    """The clock monitor of a CUDA device of this process."""
    import torch

    seen: Any = torch.cuda.get_device_properties(device_index)
    return ClockMonitor(f"{seen.pci_domain_id:08x}:{seen.pci_bus_id:02x}:{seen.pci_device_id:02x}.0")
