"""Which backwards go through dS in memory, next to recorded times, in how many slices, and what is said of them."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from added_terms import add_terms
from benchmark_scripts import BENCHMARKS, script

from fa2tune import gpus
from fa2tune.calling import backward_plans, choosing, serving, unseen
from fa2tune.calling.schedules import split_backward_schedule, stored_ds_schedule
from fa2tune.compiling import compiler
from fa2tune.compiling.compiler import CompileError
from fa2tune.fleet import precompile
from fa2tune.launching import stored_ds
from fa2tune.launching.overlapped import DKDV, DQ
from fa2tune.search_spaces.sm90 import bwd_dkdv_ds
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import BACKWARD, Problem
from fa2tune.spec.roles import BWD_STORED_DS
from fa2tune.spec.score import Score

H200 = gpus.named("h200")
TILES = script("stored_tiles")
#: Of the first form, a tile a program with a row's stages, next to split kernels: "dS in memory" by the number of groups that
#: the race began with, "other groups" by the other one.
FIRST_RECORD = json.loads((BENCHMARKS / "calls/stored_ds.json").read_text("utf-8"))["calls"]
FIRST, OTHER = "dS in memory", "other groups"
RECORD = json.loads(gzip.decompress((BENCHMARKS / "calls/stored_tiles.json.gz").read_bytes()))["calls"]
#: Each kernel started early, by a config that need not serve; "served": by the estimates before. Kernels of RECORD were not:
#: so many microseconds more.
EARLY = json.loads(gzip.decompress((BENCHMARKS / "calls/early_stored.json.gz").read_bytes()))["calls"]
STARTED_EARLY_US = 1.7
#: dQ with its keys in one part and in several, by a config that need not serve; "served": with a margin of 0.06.
PARTS = json.loads(gzip.decompress((BENCHMARKS / "calls/stored_parts.json.gz").read_bytes()))["calls"]
CALLS: dict[str, Problem] = {name: problem for name, (problem, _) in script("dense_backwards").STORED_CALLS.items()}
LONG = CALLS["176"]


@pytest.fixture(autouse=True)
def nothing_stays_refused() -> Iterator[None]:
    yield
    backward_plans.forget()


@cache
def choices(problem: Problem, deterministic: bool = False) -> Any:
    return choosing.choose_backward(choosing.Chooser(problem, H200), deterministic)[1]


def whole(problem: Problem, deterministic: bool = False) -> backward_plans.Whole | None:
    chosen = choices(problem, deterministic)
    found, _ = backward_plans.whole(problem, chosen, backward_plans.division(problem, chosen, H200), H200)
    return found if found is not None and found.role == BWD_STORED_DS else None


def best(problem: Problem) -> tuple[float, Any]:
    found = stored_ds_schedule._best(problem, tuple(choices(problem)[DKDV].of_row.config.items()), H200)
    assert found is not None
    return found


def timed() -> Iterator[tuple[Problem, dict[str, float]]]:
    """Recorded calls, but for those whose first queries see no key: public calls leave them out."""
    for call in RECORD.values():
        problem = script("dense_backwards").posed(call)
        if problem.mask == FULL or problem.seqlen_q <= problem.seqlen_k:
            yield (
                problem,
                {name: us - (0.0 if name == "served" else STARTED_EARLY_US) for name, us in call["us"].items()},
            )


def test_estimates_are_near_the_times_that_they_were_fitted_to() -> None:
    errors = {False: list[float](), True: list[float]()}
    for problem, us in timed():
        for name, config in TILES.candidates(problem, H200).items():
            if name in us and us[name] > 60:
                errors[config["PERSISTENT"]].append(
                    math.log(stored_ds_schedule.stored_us(problem, config, H200) / us[name])
                )
    for found in errors.values():
        assert len(found) > 80 and statistics.fmean(error * error for error in found) < 0.08**2


def test_estimates_of_kernels_that_start_early_are_near_their_times() -> None:
    """Below 60 us most; STARTED_EARLY_US is what that saves at least there, and nothing takes longer for it."""
    errors, saved = list[float](), list[float]()
    for call in EARLY.values():
        problem, us = script("dense_backwards").posed(call), call["us"]
        assert us["started early"] < 1.01 * us["one after the other"]
        if us["one after the other"] < 60:
            config = script("early_stored").best(problem, H200)
            errors.append(math.log(stored_ds_schedule.stored_us(problem, config, H200) / us["started early"]))
            saved.append(us["one after the other"] - us["started early"])
    assert len(saved) > 25 and abs(statistics.median(saved) - STARTED_EARLY_US) < 0.2
    assert abs(statistics.fmean(errors)) < 0.05 and statistics.fmean(error * error for error in errors) < 0.12**2


@pytest.mark.parametrize("name", EARLY)
def test_what_is_taken_is_not_much_slower_than_what_served_before(name: str) -> None:
    """And what gained an eighth is taken."""
    problem, us = script("dense_backwards").posed(EARLY[name]), EARLY[name]["us"]
    gain, taken = us["served"] / us["started early"], whole(problem)
    assert taken is None or gain > 0.9 or taken.config["PERSISTENT"]  # served in a better band
    assert gain < 1.125 or taken is not None or unseen.filled_in(problem, H200, BACKWARD)


def test_parts_of_the_keys_are_near_the_fastest_that_were_timed() -> None:
    """Of recorded calls that take dS in memory: its parts next to the fastest number, the choice next to other kernels."""
    lost, chosen, in_parts = list[float](), list[float](), 0
    for call in PARTS.values():
        problem, us = script("dense_backwards").posed(call), call["us"]
        if (taken := whole(problem)) is None:
            continue
        parts = taken.config["DQ_SPLITS"]
        in_parts += parts > 1
        times = {name: time for name, time in us.items() if name.startswith("parts")}
        if f"parts: {parts}" in times:
            lost.append(times[f"parts: {parts}"] / min(times.values()))
        chosen.append(us["served"] / us["without dS in memory"])
    assert in_parts >= 6 and len(lost) > 60 and max(lost) < 1.06 and statistics.fmean(lost) < 1.01, lost
    assert statistics.geometric_mean(chosen) < 0.9 and max(chosen) < 1.13, chosen


@pytest.mark.parametrize("name", FIRST_RECORD)
def test_what_is_taken_was_faster_and_what_gained_a_tenth_is_taken(name: str) -> None:
    us = FIRST_RECORD[name]["us"]
    gain = us["served"] / min(us.get(form, math.inf) for form in (FIRST, OTHER))
    taken = whole(CALLS[name])
    assert taken is None or taken.config["PERSISTENT"] or gain > 1.0  # tile after tile is not in that record
    assert gain < 1.1 or taken is not None


def test_what_is_taken_is_near_the_fastest_that_was_timed() -> None:
    lost = list[float]()
    for problem, us in timed():
        if (taken := whole(problem)) is not None and (name := TILES.named(taken.config)) in us:
            lost.append(math.log(us[name] / min(us.values())))
    assert len(lost) > 35 and max(lost) < 0.12 and statistics.fmean(lost) < 0.025, sorted(lost)


def test_bands_are_near_the_fastest_that_was_timed() -> None:
    """Of the stages that serve; 49 x 30/1 of 1079 take 4655 to 6497 us by the band alone."""
    lost = list[float]()
    for problem, us in timed():
        if (taken := whole(problem)) is not None and taken.config["PERSISTENT"] and problem.mask == CAUSAL:
            times = {
                band: us.get(TILES.named({**taken.config, "HEADS_PER_WAVE": band})) for band in stored_ds_schedule.BANDS
            }
            if time := times[taken.config["HEADS_PER_WAVE"]]:
                lost.append(time / min(filter(None, times.values())))
    assert len(lost) > 12 and max(lost) < 1.06 and statistics.fmean(lost) < 1.02, lost


def test_memory_is_bounded_by_slices() -> None:
    limit = int(H200.hbm_bytes * stored_ds_schedule.MOST_MEMORY)
    large = CALLS["160, causal"]
    taken = whole(large)
    assert taken is not None and taken.config["SLICES"] > 1
    for one in (part.of(large) for part in stored_ds.slices(large, taken.config["SLICES"])):
        rows, keys = (-(-length // 64) * 64 for length in (one.seqlen_q, one.seqlen_k))
        assert 2 * one.batch * one.heads_q * rows * keys <= 1.02 * limit
    assert whole(replace(large, batch=1, heads_q=2, heads_kv=2, seqlen_q=40000, seqlen_k=40000)) is None


@pytest.mark.parametrize(
    "other",
    [{"head_dim": 128, "head_dim_v": 128}, {"seqlen_k": 0}, {"batch": 0}, {"tma": False}, {"dtype": "fp32"},
     {"mask": Mask("band", 300, 0)}, {"batch": 1, "extent": Extent(RAGGED, 4, 3821)}],
    ids=str,
)  # fmt: skip
def test_calls_that_keep_their_kernels(other: dict[str, Any]) -> None:
    assert whole(LONG) is not None
    assert whole(replace(LONG, **other)) is None


def test_deterministic_calls_take_it_too() -> None:
    assert whole(LONG, True) is not None


def test_calls_with_a_score_term_take_it_too() -> None:
    assert whole(replace(LONG, score=Score("softcap", 20.0))) == whole(LONG)


def test_off_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_ds_schedule, "STORED_DS", False)
    assert whole(LONG) is None
    assert not stored_ds_schedule.all_kernels(LONG, choices(LONG)[DKDV], 90)


def test_it_has_to_be_worth_its_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    time, _ = best(LONG)
    for share, taken in ((1.11, False), (1.12, True)):
        monkeypatch.setattr(split_backward_schedule, "predicted_us", lambda *_, share=share, **__: share * time)
        assert (whole(LONG) is not None) is taken


def test_what_was_refused_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def stored(problem: Problem, **given: Any) -> str:
        made.append("stored")
        raise CompileError("ptxas failed")

    def plan(problem: Problem, **given: Any) -> str:
        made.append("strategy")
        return "plan"

    kinds = backward_plans.WHOLE_KINDS
    monkeypatch.setitem(kinds, BWD_STORED_DS, kinds[BWD_STORED_DS]._replace(plan=stored))
    monkeypatch.setattr(backward_plans, "BackwardPlan", plan)
    for _ in range(2):
        assert backward_plans.backward_plan(LONG, "split", choices(LONG), H200, {}, True) == "plan"
    assert made == ["stored", "strategy", "strategy"]
    found = serving.explain_problem(LONG, H200, ("bwd",))
    assert "bwd: dS in memory: expected to be faster, but ptxas failed." in str(found)


def test_as_many_blocks_are_under_way_as_were_timed_to_gain() -> None:
    """A tile a program: (stages, of P); tile after tile: the same, or None where it has no room, or two head dims."""
    for dims, one, many in (
        ((136, 136), (3, 1), (3, 1)), ((160, 160), (3, 1), (4, 2)), ((192, 192), (3, 1), (3, 2)),
        ((152, 120), (3, 1), None), ((200, 200), (2, 1), None),
    ):  # fmt: skip
        problem = replace(CALLS["160, causal"], head_dim=dims[0], head_dim_v=dims[1], mask=FULL)
        config = bwd_dkdv_ds.of_row(problem, {"STAGES": 2, "P_STAGES": 2, "HEADS_PER_WAVE": 2})
        turns = bwd_dkdv_ds.tile_after_tile(problem.specialization, config)
        assert (config["STAGES"], config["P_STAGES"], config["HEADS_PER_WAVE"]) == (*one, 2)
        assert (turns and (turns["STAGES"], turns["P_STAGES"])) == many
        masked = bwd_dkdv_ds.tile_after_tile(replace(problem, mask=CAUSAL).specialization, config)
        assert (masked and (masked["STAGES"], masked["P_STAGES"])) == (many and (3, 1))


def test_a_program_takes_tile_after_tile_where_there_are_more_than_multiprocessors() -> None:
    many = replace(CALLS["160, causal"], batch=1, heads_q=12, heads_kv=12, seqlen_q=192, seqlen_k=704)
    rows = tuple(choices(many)[DKDV].of_row.config.items())
    sliced = replace(many, batch=16, heads_q=32, heads_kv=1, seqlen_q=4096)  # 128 tiles in each of eight slices
    for call, takes in (
        (many, {False}), (replace(many, seqlen_k=705), {False, True}), (replace(sliced, seqlen_k=4096), {False}),
    ):  # fmt: skip
        asked = list[bool]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                stored_ds_schedule,
                "stored_us",
                lambda _, config, __, kept=asked: kept.append(config["PERSISTENT"]) or 1.0,
            )
            stored_ds_schedule._best.__wrapped__(call, rows, H200)
        assert {*asked} == takes


def test_bands_even_out_what_programs_take() -> None:
    """Under a causal mask; 2 x 38 heads of 2048: 871 us in bands of four heads, 683 in bands of 16."""
    call = Problem("bf16", 2, 38, 38, 2048, 2048, 192, 192, CAUSAL)
    config = bwd_dkdv_ds.tile_after_tile(call.specialization, bwd_dkdv_ds.config_of(call.specialization))
    assert config is not None
    times = {
        band: stored_ds_schedule.stored_us(call, {**config, "HEADS_PER_WAVE": band}, H200) for band in (1, 4, 8, 16)
    }
    assert times[4] > 1.2 * times[16] and times[1] > 1.05 * times[16] and times[8] < 1.02 * times[16]
    taken = whole(call)
    assert taken is not None and taken.config["PERSISTENT"] and taken.config["HEADS_PER_WAVE"] >= 8


def test_slices_count_heads_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a term that reads their numbers has one, or another kernel."""
    add_terms(monkeypatch)
    many = next(
        problem for problem in CALLS.values() if stored_ds.fewest_slices(problem, int(H200.hbm_bytes / 64), 90) > 1
    )
    rows = tuple(choices(many)[DKDV].of_row.config.items())
    for score, found in ((Score("softcap", 5.0), True), (Score("alibi", 8), False)):
        assert (stored_ds_schedule._best(replace(many, score=score), rows, H200) is not None) == found


def test_explain_names_the_kernels_and_slices() -> None:
    found = serving.explain_problem(CALLS["160, causal"], H200, ("bwd",))
    assert "batch and key heads in 2 slices, one after the other." in str(found)
    assert found.as_dict()["kernels"][0]["stored_ds"]["SLICES"] == 2


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_files_of_binaries_have_what_any_call_loads(mask: Mask) -> None:
    def binaries(kernels: Any) -> set[object]:
        return {(one.name, problem.specialization, tuple(sorted(compiler.binary_config(one, config).items())))
                for one, config, problem in kernels}  # fmt: skip

    problem = replace(LONG, mask=mask)
    filed = set[object]()
    for kernel in (DQ, DKDV):
        filed |= binaries(precompile._by_shape(kernel, problem, choices(problem)[kernel], 90))
    for call in (problem, replace(problem, batch=30), replace(problem, seqlen_q=300, seqlen_k=900)):
        for config in stored_ds_schedule.configs(call, choices(problem)[DKDV].of_row.config):
            for slices in (1, 2):
                assert binaries(stored_ds.kernels(call, {**config, "SLICES": slices}, 90)) <= filed
    assert bwd_dkdv_ds.SPACE.dimensions["SLICES"]


def test_without_memory_for_ds_the_split_kernels_serve_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    made: list[Any] = []

    class Split:
        def __init__(self, problem: Problem, *given: Any, lead: int) -> None:
            made.append((problem, given[:6], (*given[6:], lead)))

        def __call__(self, *tensors: Any) -> str:
            return "of split kernels"

    class NoMemory(stored_ds.StoredDsPlan):
        def __init__(self, *_: Any, lead: int = 0, **__: Any) -> None:
            self.lead = lead

        def fresh(self) -> Any:
            made.append("asked")
            raise torch.OutOfMemoryError("CUDA out of memory")

    kinds = backward_plans.WHOLE_KINDS
    monkeypatch.setitem(kinds, BWD_STORED_DS, kinds[BWD_STORED_DS]._replace(plan=NoMemory))
    monkeypatch.setattr(backward_plans, "BackwardPlan", Split)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call = {"softmax_scale": 0.1, "lead": 3}
    plan = backward_plans.backward_plan(LONG, "split", choices(LONG), H200, call, True)
    tensors = ("do", None, "q", "k", "v", "o", "lse")
    for _ in range(2):
        assert plan(*tensors) == "of split kernels"  # type: ignore[arg-type]
    asked, (problem, of_call, rest) = made
    assert (asked, problem, of_call, rest[:2], rest[-1]) == ("asked", LONG, tensors[:6], (0.1, "split"), 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    plan = backward_plans.backward_plan(LONG, "split", choices(LONG), H200, {"softmax_scale": 0.1}, True)
    with pytest.raises(torch.OutOfMemoryError):
        plan(*tensors)  # type: ignore[arg-type]
