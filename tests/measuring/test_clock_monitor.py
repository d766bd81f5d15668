"""What NVML says, and what is said where it does not."""

import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from test_driver_devices import H200, Driver

from fa2tune import devices
from fa2tune.cli import doctor
from fa2tune.measuring import clock_monitor
from fa2tune.measuring.clock_monitor import ClockMonitor, Reading


class NVMLError(Exception):
    pass


def library(**answers):
    """A pynvml that answers these; what is None raises."""

    def ask(name):
        def answer(*arguments):
            library.asked.append((name, arguments))
            if answers.get(name) is None:
                raise NVMLError("Not Supported")
            return answers[name]

        return answer

    library.asked = []
    names = ("Init", "DeviceGetHandleByPciBusId", "DeviceGetClockInfo", "DeviceGetCurrentClocksEventReasons",
             "DeviceGetEnforcedPowerLimit")  # fmt: skip
    return SimpleNamespace(NVMLError=NVMLError, NVML_CLOCK_SM=1, **{f"nvml{name}": ask(name) for name in names})


FINE = {"Init": True, "DeviceGetHandleByPciBusId": "handle", "DeviceGetClockInfo": 1785,
        "DeviceGetCurrentClocksEventReasons": 0x04, "DeviceGetEnforcedPowerLimit": 700_000}  # fmt: skip


def test_clock_power_and_reasons(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", library(**FINE))
    seen = ClockMonitor("00000000:1b:00.0")
    assert seen.why == "" and seen.power_limit_w() == 700
    assert seen.read() == Reading(1785, 0x04) and seen.read().power_capped and not seen.read().throttled
    assert ("DeviceGetHandleByPciBusId", (b"00000000:1b:00.0",)) in library.asked


@pytest.mark.parametrize("reason", [0x08, 0x20, 0x40, 0x80, 0x44])
def test_ill_cooled_or_ill_fed_is_throttled(reason):
    assert Reading(1000, reason).throttled


@pytest.mark.parametrize("reason", [0x00, 0x01, 0x02, 0x04, 0x10, 0x100, None])
def test_idle_capped_or_set_clocks_are_not(reason):
    assert not Reading(1000, reason).throttled


@pytest.mark.parametrize(
    ("nvml", "why"),
    [
        (None, "nvidia-ml-py is not installed"),
        (library(), "Not Supported"),
        (library(Init=True), "Not Supported"),
        (library(Init=True, DeviceGetHandleByPciBusId="handle"), "neither clock nor throttle reasons"),
    ],
)
def test_without_nvml_there_is_a_reason_and_nothing_is_claimed(monkeypatch, nvml, why):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    seen = ClockMonitor("00000000:1b:00.0")
    assert why in seen.why and seen.read() == Reading() and seen.power_limit_w() is None
    assert seen.read().reasons is None and not seen.read().throttled


def test_a_gpu_that_tells_its_clock_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", library(**{**FINE, "DeviceGetCurrentClocksEventReasons": None}))
    assert ClockMonitor("").read() == Reading(1785, None) and ClockMonitor("").why == ""


def test_the_name_before_2023(monkeypatch):
    old = library(**FINE)
    old.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x40
    del old.nvmlDeviceGetCurrentClocksEventReasons
    monkeypatch.setitem(sys.modules, "pynvml", old)
    assert ClockMonitor("").read().throttled


def test_the_device_is_found_by_its_place_on_the_bus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", library(**FINE))
    place = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=2, uuid="MIG-of-no-use")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: place)
    clock_monitor.of_device.cache_clear()
    clock_monitor.of_device(0)
    clock_monitor.of_device.cache_clear()
    assert ("DeviceGetHandleByPciBusId", (b"00000001:1b:02.0",)) in library.asked


@pytest.mark.parametrize(("nvml", "says"), [(library(**FINE), "1785 MHz, not throttled"), (None, "nvidia-ml-py")])
def test_doctor_says_whether_clocks_are_monitored(monkeypatch, nvml, says):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(devices, "library", lambda: Driver(H200))
    result = CliRunner().invoke(doctor.doctor)
    (line,) = (line for line in result.output.splitlines() if "gpu 0 clock" in line)
    assert says in line and line.startswith("ok" if nvml else "note")
    if nvml:
        assert ("DeviceGetHandleByPciBusId", (b"00000001:1b:02.0",)) in library.asked
