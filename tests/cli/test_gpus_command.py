"""``fa2tune gpus``; and what tune, explain and doctor say of a GPU that is not in the catalogue."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

from fa2tune import devices, gpus
from fa2tune.catalogue import GENERATIONS
from fa2tune.cli import _checks, explain, main, tune
from fa2tune.cli.gpus import Shipped, standing
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import Problem

H200 = devices.Device(0, "NVIDIA H200", 90, 132)


def listed(monkeypatch: pytest.MonkeyPatch, *found: devices.Device, why: str = "", options: Sequence[str] = ()) -> str:
    monkeypatch.setattr(devices, "find", lambda: devices.FoundDevices(found, "13.0" if found else "", why))
    result = CliRunner().invoke(main, ["gpus", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_gpu_has_a_line_of_at_most_80_columns_with_its_shipped_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    output = listed(monkeypatch, why="no NVIDIA driver is installed")
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80
    cells = {words[0]: " ".join(words[7:]) for line in lines if len(words := line.split()) > 7}
    assert all(gpu.name in cells for gpu in gpus.catalogue())
    assert (cells["h200"], cells["h100-sxm"], cells["a100-sxm-80gb"]) == ("measured", "sibling", "ported")
    assert (cells["gh200-96gb"], cells["a30"], cells["rtx-4090"]) == ("of h200", "of a100-sxm-80gb", "ported")
    assert (cells["a40"], cells["rtx-5080"], cells["b200"]) == ("of a10", "of rtx-5090", "none")
    assert lines[-1] == "This machine: no NVIDIA driver is installed."
    for arch, name in GENERATIONS.items():
        assert f"{name}: compute capability {arch // 10}.{arch % 10}, " in output


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            (H200,),
            ("This machine: NVIDIA H200, 132 SMs, compute capability 9.0: h200.", " Shipped rows: ", " measured."),
        ),
        ((H200, devices.Device(1, "NVIDIA H200", 90, 132)), ("This machine: 2 x NVIDIA H200,",)),
    ],
)
def test_the_gpu_of_this_machine(monkeypatch, found: tuple[devices.Device, ...], said: tuple[str, ...]) -> None:
    output = listed(monkeypatch, *found)
    assert "\n*  h200 " in output
    assert all(text in output for text in said)


def test_a_slice_marks_the_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    output = listed(monkeypatch, devices.Device(0, "NVIDIA H200 MIG 3g.71gb", 90, 60))
    assert "\n*  h200 " in output
    assert "60 SMs, compute capability 9.0: h200@60sm." in " ".join(output.split())
    assert "those of h200 serve. Next: fa2tune tune" in output


def test_an_unlisted_gpu_is_called_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    output = listed(monkeypatch, devices.Device(0, "NVIDIA GeForce RTX 4090 Laptop GPU\x1b[2J", 89, 76))
    said = " ".join(output[output.index("This machine") :].split())
    assert "not in the catalogue: rates are estimated from rtx-4090 (98 TFLOP/s)." in said
    assert "those of l4 serve. Next: fa2tune tune" in said
    assert "\x1b" not in output and max(map(len, output.splitlines())) <= 80


def test_a_gpu_without_rows_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    output = listed(monkeypatch, devices.Device(0, "NVIDIA B200", 100, 148))
    said = " ".join(output[output.index("This machine") :].split())
    assert "No rows are shipped for it: calls run the default config. Next: fa2tune tune" in said


def test_a_gpu_that_is_too_old_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    output = listed(monkeypatch, devices.Device(0, "Tesla T4", 75, 40))
    assert "fa2tune needs compute capability 8.0 or newer" in output


def test_json_has_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(listed(monkeypatch, H200, options=["--json"]))
    by_name = {gpu["name"]: gpu for gpu in document["gpus"]}
    assert set(by_name) == {gpu.name for gpu in gpus.catalogue()}
    h200 = by_name["h200"]
    assert (h200["driver_names"], h200["compute_capability"], h200["sm_count"]) == (["NVIDIA H200"], "9.0", 132)
    assert set(h200["shipped_rows"]) == {"measured"} and h200["shipped_rows"]["measured"] > 1000
    assert by_name["b200"]["served_by"] is None and by_name["gh200-96gb"]["served_by"] == "h200"
    assert document["present"] == [{"device": 0, "driver_name": "NVIDIA H200", "gpu": h200}]
    none = json.loads(listed(monkeypatch, why="the driver finds no GPU", options=["--json"]))
    assert (none["present"], none["none_present_because"]) == ([], "the driver finds no GPU")


def test_the_chip_goes_before_the_evidence_and_the_capability_after_both() -> None:
    found = {"a10": {"measured": 1}, "a16": {"predicted": 1}, "rtx-3090": {"predicted": 5}}
    assert standing(gpus.named("a2"), found) == Shipped("of another GPU", served_by="a16")
    assert standing(gpus.named("a40"), found) == Shipped("of another GPU", served_by="a10")
    assert standing(gpus.named("a4000"), found) == Shipped("of another GPU", served_by="a10")
    assert standing(gpus.named("l4"), found) == Shipped("none")


def test_no_torch_is_imported() -> None:
    code = "import sys; from fa2tune.cli import main; main(['gpus'], standalone_mode=False); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_tune_says_that_its_gpu_is_an_estimate() -> None:
    def planned(gpu: gpus.Gpu) -> str:
        screen = tune._Screen(Console(file=io.StringIO(), width=120))
        request = SimpleNamespace(buckets=(512,))
        target = SimpleNamespace(gpu=gpu, obtained="measured")
        screen.planned(
            SimpleNamespace(target=target, devices=("",), workers=1, request=request, time_budget_s=None), []
        )
        return screen.console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    laptop = "NVIDIA GeForce RTX 4090 Laptop GPU"
    assert f"{laptop} is not in the catalogue: rates are estimated from rtx-4090\n" in planned(
        gpus.identify(laptop, 89, 76)
    )
    assert "not in the catalogue" not in planned(gpus.named("h200"))


def test_explain_says_that_its_gpu_is_an_estimate() -> None:
    from fa2tune.calling import serving

    laptop = gpus.identify("NVIDIA GeForce RTX 4090 Laptop GPU", 89, 76)
    problem = Problem("bf16", 4, 32, 32, 4096, 4096, 64, 64, CAUSAL)
    found = serving.explain_problem(problem, laptop, ("fwd",), False, [])
    said = "NVIDIA GeForce RTX 4090 Laptop GPU is not in the catalogue: rates are estimated from rtx-4090."
    assert said in str(found).splitlines() and said in explain._short(found, None, False)
    assert found.as_dict()["gpu_estimated_from"] == "rtx-4090"
    listed_one = serving.explain_problem(problem, gpus.named("h200"), ("fwd",), False, [])
    assert "catalogue" not in str(listed_one) and listed_one.as_dict()["gpu_estimated_from"] is None


def test_doctor_says_that_its_gpu_is_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "bus_id", lambda number: "")
    laptop = devices.Device(0, "NVIDIA GeForce RTX 4090 Laptop GPU", 89, 76)
    said = {one.subject: one.found for one in _checks.gpus(devices.FoundDevices((laptop,), "13.0"))}
    assert said["gpu 0"] == f"{laptop.name}, 76 SMs, sm_89: not in the catalogue: rates are estimated from rtx-4090"
