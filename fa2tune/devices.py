"""The CUDA devices that this process may use, asked of the driver by ctypes, without importing torch.

The driver applies CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER and MIG itself, so numbers and names are those that torch shows.
NVML does not: it lists every GPU of the machine, in another order, and has no count of SMs. No context is created, so no device
memory is taken.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import byref, c_char_p, c_int
from dataclasses import dataclass
from functools import cache
from typing import Any

from fa2tune.gpus import Gpu, identify

# Of cuda.h
_SM_COUNT, _MAJOR, _MINOR = 16, 75, 76  #: CU_DEVICE_ATTRIBUTE_...
_PCI_BUS, _PCI_DEVICE, _PCI_DOMAIN = 33, 34, 50
_NO_DEVICE = 100  #: CUDA_ERROR_NO_DEVICE
_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class Device:
    """A CUDA device."""

    number: int  #: as in torch's "cuda:0"
    name: str  #: as torch.cuda.get_device_name gives it
    arch: int  #: compute capability, 10 * major + minor
    sm_count: int

    @property
    def gpu(self) -> Gpu:
        """Its entry of the catalogue, a slice of one, or a stand-in."""
        return identify(self.name, self.arch, self.sm_count)


@dataclass(frozen=True, slots=True)
class FoundDevices:
    """What the driver answered."""

    devices: tuple[Device, ...]
    cuda: str = ""  #: the newest CUDA that the driver supports, "13.0"; "" without a driver
    why: str = ""  #: why there are no devices; "" where there are some


@cache
def library() -> Any:
    """The CUDA driver's library. OSError: no driver is installed."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def refusal(driver: Any, code: int, doing: str) -> str:
    """An error code of the driver as a sentence."""
    text = c_char_p()
    driver.cuGetErrorString(code, byref(text))
    reason = text.value.decode(errors="replace") if text.value else "unknown error"
    return f"CUDA error {code} while {doing}: {reason}"


class _RefusedError(Exception):
    def __init__(self, code: int, doing: str) -> None:
        super().__init__(refusal(library(), code, doing))
        self.code = code


def _ask(doing: str, function: str, *arguments: Any) -> None:
    code = getattr(library(), function)(*arguments)
    if code:
        raise _RefusedError(code, doing)


def _device(number: int) -> Device:
    handle, name = c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    _ask(f"opening device {number}", "cuDeviceGet", byref(handle), number)
    _ask(f"asking for the name of device {number}", "cuDeviceGetName", name, _NAME_BYTES, handle)
    values = []
    for attribute in (_MAJOR, _MINOR, _SM_COUNT):
        value = c_int()
        _ask(f"asking about device {number}", "cuDeviceGetAttribute", byref(value), attribute, handle)
        values.append(value.value)
    major, minor, sm_count = values
    return Device(number, name.value.decode(errors="replace"), 10 * major + minor, sm_count)


def bus_id(number: int) -> str:
    """Where a device is on the PCI bus, "domain:bus:device.function", by which NVML finds it; "" if the driver refuses."""
    handle, values = c_int(), []
    try:
        _ask(f"opening device {number}", "cuDeviceGet", byref(handle), number)
        for attribute in (_PCI_DOMAIN, _PCI_BUS, _PCI_DEVICE):
            value = c_int()
            _ask(f"asking about device {number}", "cuDeviceGetAttribute", byref(value), attribute, handle)
            values.append(value.value)
    except _RefusedError:
        return ""
    domain, bus, device = values
    return f"{domain:08x}:{bus:02x}:{device:02x}.0"


def _hidden() -> str:
    """What CUDA_VISIBLE_DEVICES has to do with finding nothing."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r:.80})"


def find() -> FoundDevices:
    """The CUDA devices of this process, or why there are none. Raises nothing: a driver that fails is an answer, too."""
    try:
        library()
    except OSError:
        return FoundDevices((), why="no NVIDIA driver is installed")
    cuda = ""
    try:
        version = c_int()
        _ask("asking for the driver's version", "cuDriverGetVersion", byref(version))
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
        _ask("starting the driver", "cuInit", 0)
        count = c_int()
        _ask("counting devices", "cuDeviceGetCount", byref(count))
        devices = tuple(_device(number) for number in range(count.value))
    except _RefusedError as error:
        why = "the driver finds no GPU" if error.code == _NO_DEVICE else str(error)
        return FoundDevices((), cuda, f"{why}{_hidden()}")
    return FoundDevices(devices, cuda, "" if devices else f"the driver finds no GPU{_hidden()}")


def present() -> Device | None:
    """The first CUDA device, which a process uses unless it chooses another; None without one."""
    devices = find().devices
    return devices[0] if devices else None
