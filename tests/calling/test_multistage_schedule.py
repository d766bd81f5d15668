"""Which short forwards have warps that load for themselves, estimates beside the record, and what explain says of them."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import script

from fa2tune import gpus
from fa2tune.calling import choosing, forward_plans, serving
from fa2tune.calling.kinds import WARP_SPECIALIZED_ROWS
from fa2tune.calling.schedules import in_place_schedule, multistage_schedule
from fa2tune.fleet import precompile
from fa2tune.launching import key_splits
from fa2tune.rows import lookup
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import FULL, Mask
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.score import score_of

ROOT = Path(__file__).parents[2]
H200 = gpus.named("h200")
SHORT = Problem("bf16", 1, 6, 6, 665, 665, 192, 192, FULL)


def raced() -> Iterator[tuple[Problem, dict[str, float], float]]:
    """Calls, microseconds by form, and of what served when the call was drawn."""
    path = ROOT / "benchmarks/calls/multistage_forwards.json.gz"
    for call in json.loads(gzip.decompress(path.read_bytes()))["calls"].values():
        found = script("few_tiles_fit").posed(call["call"])
        assert found is not None and not call["wrong"], call["call"]
        yield found, call["us"], call["when drawn"]["fa2tune"]


def chosen(problem: Problem) -> Config | None:
    shipped = [layer for layer in choosing.layers() if layer.path.name == "h200.sqlite"]
    choice = choosing.choose(problem, "fwd", H200, None, shipped, lookup.Toolchain("", "", {}))
    found = in_place_schedule.instead_of(problem, choice.config, H200, choice.row)
    return found if found is not None and key_splits.is_multistage(found) else None


def test_estimates_are_near_the_record() -> None:
    label, errors = script("few_queries").label, []
    for problem, us, _ in raced():
        for config in multistage_schedule.candidates(problem, 90):
            estimated = multistage_schedule.multistage_us(problem, config, H200)
            if math.isfinite(estimated):
                errors.append(math.log(estimated / us[label(config)]))
    assert len(errors) > 150 and math.sqrt(statistics.fmean(error**2 for error in errors)) < 0.11


def test_calls_that_take_it_gained() -> None:
    """Over what served when they were drawn."""
    label, ratios = script("few_queries").label, []
    for problem, us, drawn in raced():
        if (config := chosen(problem)) is not None:
            ratios.append(us[label(config)] / drawn)
    assert len(ratios) > 24 and statistics.geometric_mean(ratios) < 0.88 and sum(one > 1.02 for one in ratios) < 4


@pytest.mark.parametrize(
    "other",
    [
        {"seqlen_k": 2049}, {"seqlen_k": 63}, {"seqlen_q": 63}, {"batch": 5}, {"extent": Extent(RAGGED, 4)},
        {"mask": Mask("band", 30, 30)}, {"mask": Mask("causal_top_left")}, {"seqlen_q": 0}, {"dtype": "fp32"},
        {"aligned": False}, {"score": score_of(50.0)}, {"tma": False},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_the_kernel_is_not_asked_for_other_calls(other: dict[str, Any]) -> None:
    found = multistage_schedule.best(replace(SHORT, **other), H200)
    assert multistage_schedule.best(SHORT, H200) is not None and (found is None or math.isinf(found[0]))


def test_it_must_be_faster_by_its_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    found = multistage_schedule.best(SHORT, H200)
    assert found is not None and chosen(SHORT) == found[1]
    monkeypatch.setattr(multistage_schedule, "MARGIN", 1.0)
    assert chosen(SHORT) is None


def test_it_serves_and_says_so() -> None:
    found = serving.explain_problem(SHORT, H200, ("fwd",))
    (kernel,), (said,) = found.kernels, found.as_dict()["kernels"]
    assert list(kernel.runs or {}) == ["sm90/fwd_multistage"] and kernel.multistage and not kernel.grouped
    assert "so sm90/fwd_multistage runs instead" in str(found) and "warps that load for themselves" in str(kernel)
    assert said["multistage"] == said["config"] and said["split"] is said["one_tile"] is said["shares"] is None
    assert forward_plans.how(chosen(SHORT) or {}) == forward_plans.MULTISTAGE
    assert serving.served_by(SHORT, H200, backward=False) == {"fwd": "sm90/fwd_multistage"}


def test_precompile_has_every_tile() -> None:
    found = multistage_schedule.all_kernels(SHORT, 90)
    assert [config["STAGE_KEYS"] for _, config, _ in found] == [64, 128]
    assert not multistage_schedule.all_kernels(replace(SHORT, mask=Mask("band", 30, 30)), 90), (
        "which no such call takes"
    )
    choice = choosing.choose(SHORT, "fwd", H200, WARP_SPECIALIZED_ROWS)
    assert "sm90/fwd_multistage" in {one.name for one, _, _ in precompile._by_shape("fwd", SHORT, choice, 90)}


def test_products_are_slower_on_a_gpu_that_multiplies_less() -> None:
    (config, *_) = multistage_schedule.candidates(SHORT, 90)
    times = [
        multistage_schedule.multistage_us(replace(SHORT, seqlen_q=300), config, gpus.named(name))
        for name in ("h200", "h20")
    ]
    assert 1.2 * times[0] < times[1] < math.inf


def test_no_more_programs_than_run_at_once() -> None:
    """192 columns leave room for one program a multiprocessor, 64 for several."""
    wide, narrow = (replace(SHORT, batch=3, head_dim=dim, head_dim_v=dim) for dim in (192, 64))
    for problem, there in ((wide, False), (narrow, True)):
        times = [
            multistage_schedule.multistage_us(problem, one, H200) for one in multistage_schedule.candidates(problem, 90)
        ]
        assert any(map(math.isfinite, times)) is there
