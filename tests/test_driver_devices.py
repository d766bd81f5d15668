"""What the driver says about devices, asked without torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import pytest

from fa2tune import devices, gpus

H200, GB10 = ("NVIDIA H200", 9, 0, 132), ("NVIDIA GB10", 12, 1, 48)


class Driver:
    """A libcuda with these devices; ``codes``: function -> the error that it returns."""

    def __init__(self, *listed: tuple[str, int, int, int], **codes: int) -> None:
        self.listed, self.codes = listed, codes

    def __getattr__(self, name: str) -> Any:
        answer = getattr(type(self), f"answer_{name}", lambda *_: 0)
        return lambda *arguments: self.codes.get(name) or answer(self, *arguments)

    def answer_cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 13010
        return 0

    def answer_cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.listed)
        return 0

    def answer_cuDeviceGet(self, handle: Any, number: int) -> int:
        handle._obj.value = number
        return 0

    def answer_cuDeviceGetName(self, text: Any, size: int, handle: ctypes.c_int) -> int:
        text.value = self.listed[handle.value][0].encode()[: size - 1]
        return 0

    def answer_cuDeviceGetAttribute(self, value: Any, attribute: int, handle: ctypes.c_int) -> int:
        _, major, minor, sm_count = self.listed[handle.value]
        value._obj.value = {75: major, 76: minor, 16: sm_count, 33: 0x1B, 34: 2, 50: 1}[attribute]
        return 0

    def answer_cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"no CUDA-capable device is detected" if code == 100 else b"system not yet initialized"
        return 0


def test_devices_as_the_driver_numbers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "library", lambda: Driver(H200, GB10))
    found = devices.find()
    assert (found.cuda, found.why) == ("13.1", "")
    assert found.devices == (devices.Device(0, "NVIDIA H200", 90, 132), devices.Device(1, "NVIDIA GB10", 121, 48))
    assert found.devices[0].gpu == gpus.named("h200")
    assert devices.present() == found.devices[0]


def test_the_place_on_the_bus_as_nvml_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "library", lambda: Driver(H200))
    assert devices.bus_id(0) == "00000001:1b:02.0"
    monkeypatch.setattr(devices, "library", lambda: Driver(H200, cuDeviceGet=999))
    assert devices.bus_id(0) == ""


@pytest.mark.parametrize(
    ("visible", "driver", "why"),
    [
        (None, Driver(cuInit=100), "the driver finds no GPU"),
        ("", Driver(cuInit=100), "the driver finds no GPU (CUDA_VISIBLE_DEVICES is '')"),
        ("7", Driver(), "the driver finds no GPU (CUDA_VISIBLE_DEVICES is '7')"),
        (None, Driver(H200, cuInit=802), "CUDA error 802 while starting the driver: system not yet initialized"),
        (None, Driver(H200, cuDeviceGetName=999), "CUDA error 999 while asking for the name of device 0: system not"),
    ],
)
def test_why_there_is_no_device(monkeypatch, visible: str | None, driver: Driver, why: str) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(devices, "library", lambda: driver)
    found = devices.find()
    assert not found.devices and found.cuda == "13.1"
    assert found.why.startswith(why)
    assert devices.present() is None


def test_no_driver_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(devices, "library", missing)
    assert devices.find() == devices.FoundDevices((), why="no NVIDIA driver is installed")


def test_asking_imports_no_torch() -> None:
    code = "import sys; from fa2tune import devices; devices.find(); print('torch' in sys.modules)"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
