"""Which backwards one kernel makes, estimates beside the record, and what explain says of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from benchmark_scripts import BENCHMARKS, script

from fa2tune import gpus
from fa2tune.calling import backward_plans, choosing, forward_plans, serving
from fa2tune.calling.schedules import one_tile_schedule, query_tiles_schedule
from fa2tune.compiling import compiler, limits
from fa2tune.compiling.choice import Choice
from fa2tune.compiling.compiler import CompileError
from fa2tune.compiling.registry import variant_named
from fa2tune.fleet import precompile
from fa2tune.gpus import Gpu
from fa2tune.launching import one_key_tile
from fa2tune.search_spaces.sm90 import bwd_one_tile
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.roles import BWD_ONE_TILE
from fa2tune.spec.score import score_of
from fa2tune.spec.variant import Variant

H200, timing = gpus.named("h200"), script("one_key_tile")
CROSS = Problem("bf16", 2, 20, 20, 1024, 77, 64, 64, FULL)
WIDE = Problem("bf16", 2, 5, 5, 92, 92, 240, 240, FULL)


#: (Halves, parts, whether programs take turns) -> microseconds.
Recorded = dict[tuple[int, int, bool], float]
FORMS = {"whole": (1, False), "halves": (2, False), "in turns": (1, True)}


def recorded() -> Iterator[tuple[str, Problem, Recorded, float]]:
    """(Name, call, its times, that of what served without the kernel)."""
    for name, call in json.loads((BENCHMARKS / "calls/one_key_tile.json").read_text())["calls"].items():
        us, times = call["us"], Recorded()
        for which, time in us.items():
            said, _, parts = which.rpartition(", ")
            if said:
                halves, turns = FORMS[said]
                times[halves, int(parts.split()[0]), turns] = time
        yield name, timing.CALLS[name][0], times, us.get("served") or call["when drawn"]["fa2tune"]


RECORD = list(recorded())
by_call = pytest.mark.parametrize("case", RECORD, ids=[name for name, *_ in RECORD])


@pytest.fixture(autouse=True)
def nothing_refused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nor is anything made by tiles of queries, which some of these calls take."""
    monkeypatch.setattr(query_tiles_schedule, "QUERY_TILES", False)
    backward_plans.forget()
    yield
    backward_plans.forget()


def choices(problem: Problem, gpu: Gpu = H200, deterministic: bool = False) -> dict[str, Choice]:
    return choosing.choose_backward(choosing.Chooser(problem, gpu), deterministic)[1]


def chosen(problem: Problem, gpu: Gpu = H200, deterministic: bool = False) -> Config | None:
    served = choices(problem, gpu, deterministic)
    whole, _ = backward_plans.whole(problem, served, backward_plans.division(problem, served, gpu), gpu)
    return whole.config if whole is not None and whole.role == BWD_ONE_TILE else None


def form_of(config: Config) -> tuple[int, int, bool]:
    return config["HALVES"], config["PARTS"], config["PERSISTENT"]


def test_estimates_are_near_the_times_that_they_were_fitted_to() -> None:
    errors = []
    for _, problem, times, _ in RECORD:
        for (halves, parts, turns), us in times.items():
            config = bwd_one_tile.config_of(problem.specialization, parts, halves, turns)
            errors.append(math.log(one_tile_schedule.one_tile_us(problem, config, H200) / us))
    assert len(errors) == 42 and max(map(abs, errors)) < 0.13
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) < 0.06


@by_call
def test_what_is_taken_was_faster_and_near_the_best(case: tuple[str, Problem, Recorded, float]) -> None:
    _, problem, times, otherwise = case
    if (config := chosen(problem)) is not None:
        time = times[form_of(config)]
        assert time < 0.94 * otherwise and time < 1.02 * min(times.values())


def test_calls_that_gained_are_taken() -> None:
    """Of 107 and 125 keys 1.18 and 1.05 are left: what serves otherwise takes longer than it is expected to."""
    left = {name for name, problem, _, _ in RECORD if chosen(problem) is None}
    assert left == {"107 keys", "68 keys", "125 keys, grouped", "118 keys"}


def test_few_keys_are_one_tile() -> None:
    config = chosen(CROSS)
    assert config is not None and config["PARTS"] > 1, "forty heads leave multiprocessors idle"
    assert chosen(replace(CROSS, batch=20)) is not None and chosen(replace(CROSS, dtype="fp16")) is not None
    wide = chosen(WIDE, deterministic=True)
    assert wide is not None and wide["HALVES"] == 2


def test_off_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_tile_schedule, "ONE_KEY_TILE", False)
    assert chosen(CROSS) is None and not one_tile_schedule.all_kernels(CROSS, 90)


@pytest.mark.parametrize(
    "other",
    [
        {"seqlen_k": 129},
        {"seqlen_k": 0},
        {"batch": 0},
        {"tma": False},
        {"aligned": False, "tma": False},
        {"dtype": "fp32"},
        {"mask": Mask("band", 30, 0)},  # of what serves otherwise there is no estimate
        {"mask": CAUSAL},  # most queries see no key
        {"batch": 1, "extent": Extent(RAGGED, 10, 77)},
    ],
    ids=str,
)
def test_calls_that_the_kernel_is_not_asked_for(other: dict[str, Any]) -> None:
    assert chosen(CROSS) is not None
    assert chosen(replace(CROSS, **other)) is None


def test_calls_with_a_score_term_take_it_too() -> None:
    assert chosen(replace(CROSS, score=score_of(20.0))) is not None


def test_other_gpus_keep_their_kernels() -> None:
    assert chosen(CROSS, gpus.named("a100")) is None


def test_it_has_to_be_worth_its_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one where the fused kernel, started early, is what serves otherwise; head dims above 128 have split kernels."""
    for problem, margin in ((CROSS, one_tile_schedule.FUSED_MARGIN), (WIDE, one_tile_schedule.MARGIN)):
        time, _ = one_tile_schedule.best(problem, H200)
        for share, taken in ((1.01, False), (0.99, True)):
            otherwise = time / (1 - margin) / share
            monkeypatch.setattr(one_tile_schedule, "otherwise_us", lambda *_, us=otherwise: us)
            assert (chosen(problem) is not None) == taken


def test_no_call_is_faster_than_memory() -> None:
    large = replace(CROSS, batch=2000)
    config = bwd_one_tile.config_of(large.specialization, 1)
    assert one_tile_schedule.one_tile_us(large, config, H200) > one_tile_schedule._moved(large, config) / 4.9e6


def test_a_tile_fits_every_head_dim() -> None:
    kernel = variant_named("sm90/bwd_one_tile")
    for dims in ((16, 16), (64, 64), (48, 80), (128, 128), (144, 64), (256, 256)):
        spec = replace(CROSS, head_dim=dims[0], head_dim_v=dims[1]).specialization
        for halves in bwd_one_tile.halves_of(spec):
            config = bwd_one_tile.config_of(spec, 1, halves)
            assert limits.before_compile(kernel, spec, config, H200) is None
            assert all(config[name] in values for name, values in bwd_one_tile.SPACE.dimensions.items())


def test_explain_names_the_kernel() -> None:
    found = serving.explain_problem(CROSS, H200, ("bwd",))
    (whole,) = found.kernels
    assert whole.status == "estimated" and list(whole.runs or ()) == ["sm90/bwd_one_tile", "bwd_gather"]
    assert whole.whole is not None
    parts = whole.whole.config["PARTS"]
    assert f"queries are split into {parts} parts, whose dK and dV are summed after." in str(found)
    assert found.as_dict()["kernels"][0]["one_tile"]["PARTS"] == parts and "all of it by one kernel" in str(whole)


def test_what_was_refused_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def one(problem: Problem, **given: Any) -> str:
        made.append("one")
        raise CompileError("ptxas failed")

    def plan(problem: Problem, **given: Any) -> str:
        made.append("strategy")
        return "plan"

    kinds = backward_plans.WHOLE_KINDS
    monkeypatch.setitem(kinds, BWD_ONE_TILE, kinds[BWD_ONE_TILE]._replace(plan=one))
    monkeypatch.setattr(backward_plans, "BackwardPlan", plan)
    for _ in range(2):
        assert backward_plans.backward_plan(CROSS, "fused", choices(CROSS), H200, {}, True) == "plan"
    assert made == ["one", "strategy", "strategy"]
    assert backward_plans.backward_plan(CROSS, "fused", choices(CROSS), H200, {}, False) == "plan"
    found = serving.explain_problem(CROSS, H200, ("bwd",))
    assert "bwd: all of it by one kernel: expected to be faster, but ptxas failed." in str(found)


def test_bench_names_the_kernels() -> None:
    assert serving.served_by(CROSS, H200, True) == {"bwd": "sm90/bwd_one_tile + bwd_gather"}
    assert set(serving.served_by(replace(CROSS, seqlen_k=300), H200, True)) == {"bwd_fused"}


def test_what_served_is_counted() -> None:
    plan = object.__new__(one_key_tile.OneTilePlan)
    assert forward_plans.steps(plan, {}) == [backward_plans.WHOLE_KINDS[BWD_ONE_TILE].step]


def test_files_of_binaries_have_what_any_call_loads() -> None:
    def binaries(kernels: Iterable[tuple[Variant, Config, Problem]]) -> set[object]:
        return {(one.name, problem.specialization, tuple(sorted(compiler.binary_config(one, config).items())))
                for one, config, problem in kernels}  # fmt: skip

    for problem, kernel in ((CROSS, "bwd_fused"), (WIDE, "bwd_dq"), (replace(CROSS, head_dim=128), "bwd_fused")):
        tuned = replace(problem, batch=1, seqlen_q=512, seqlen_k=512)
        filed = binaries(precompile._by_shape(kernel, tuned, choices(tuned)[kernel], 90))
        for call in (problem, replace(problem, batch=50), replace(problem, seqlen_k=40)):
            for config in one_tile_schedule.candidates(call, H200):
                assert binaries(one_key_tile.kernels(call, config, 90)) <= filed
