"""benchmarks/devices_speedup.py"""

from types import SimpleNamespace

import pytest
from benchmark_scripts import script
from click.testing import CliRunner


@pytest.mark.parametrize(
    ("together", "alone", "says"),
    [
        ({"seconds": 20.0}, {"seconds": 50.0}, "2.50 x on 3 GPUs"),
        ({"seconds": 20.0}, {"seconds": 50.0, "interrupted": True}, "at least 2.50 x on 3 GPUs"),
        ({"seconds": 20.0, "interrupted": True}, None, "no ratio: all did not finish in time"),
        ({"seconds": 95.0}, None, "no ratio: no time is left for one GPU"),
    ],
)
def test_a_speedup_is_that_of_whole_runs(monkeypatch, together, alone, says):
    """A run without time left does not begin."""
    devices_speedup = script("devices_speedup")
    clock = [0.0]
    found = iter([figures and {"gpus": 3, "interrupted": False, **figures} for figures in (together, alone)])

    def measured(arguments: list, seconds: float) -> dict:
        figures = next(found)
        assert seconds > 0 and figures is not None
        clock[0] += figures["seconds"]
        return figures

    monkeypatch.setattr(devices_speedup, "measured", measured)
    monkeypatch.setattr(devices_speedup, "shown", repr)
    monkeypatch.setattr(devices_speedup, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert says in CliRunner().invoke(devices_speedup.main, ["--seconds", "100"]).output
    assert "allowed is more than 15" in CliRunner().invoke(devices_speedup.main, ["--seconds", "15"]).output
