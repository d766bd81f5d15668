"""Which backwards have the query blocks of a key tile in parts (QUERY_PARTS), and in how many, against the records."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import pytest
from benchmark_scripts import BENCHMARKS, script
from test_early_start_choice import check_fallback, choices, packed

from fa2tune import gpus
from fa2tune.calling import choosing, serving
from fa2tune.calling.schedules import fused_schedule, group_parts_schedule, query_parts_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.fleet import precompile
from fa2tune.launching import group_parts
from fa2tune.spec.mask import CAUSAL, FULL, band
from fa2tune.spec.problem import Problem

H200 = gpus.named("h200")
KERNEL = "bwd_fused"
query_parts, packed_choices = script("query_parts"), script("packed_choices")
FEW = Problem("bf16", 1, 2, 2, 2144, 2144, 128, 128, CAUSAL)
#: A card full of tiles; grouped heads; a window; few tiles, each of which is short; one key tile, which another kernel has.
OTHERS = (
    Problem("bf16", 4, 16, 16, 4096, 4096, 128, 128, CAUSAL), Problem("bf16", 1, 2, 1, 4096, 4096, 128, 128, CAUSAL),
    Problem("bf16", 1, 2, 2, 4096, 4096, 128, 128, band(512, 0)), Problem("bf16", 4, 8, 8, 300, 300, 64, 64, CAUSAL),
    packed((16, 16), 16384, 16, 1024, 128, CAUSAL), packed((1, 1), 400, 8, 128, 64, CAUSAL),
)  # fmt: skip


def recorded(name: str) -> dict[str, dict[str, dict[str, float]]]:
    return json.loads((BENCHMARKS / f"calls/{name}.json").read_text("utf-8"))["calls"]


def taken(choice: Choice, problem: Problem) -> str:
    """The name of a choice in the records."""
    parts = group_parts_schedule.parts_of(problem, KERNEL, choice, H200)
    return f"{parts} parts" if group_parts.of_queries(choice.config) else "whole"


def test_dense_calls_are_near_the_best_that_was_measured() -> None:
    """No constant is fitted to these: the times are those of whole blocks, each tile with its share of them."""
    lost, off, calls = {}, [], recorded("query_parts")
    for name, problem in (
        (query_parts.workloads.described(one), one) for one in map(query_parts.posed, query_parts.CALLS)
    ):
        us = calls[name]["us"]
        choice = choosing.Chooser(problem, H200).choose(KERNEL)
        form = query_parts_schedule.form(choice)
        off += [
            math.log(fused_schedule.predicted_us(problem, form, H200, parts) / us[f"{parts} parts"])
            for parts in group_parts.query_counts(problem, 90)
            if f"{parts} parts" in us
        ]
        chosen = us.get(taken(choice, problem), us["without"])
        lost[name] = chosen / min(us.values())
    assert len(lost) == 24 and len(off) == 81
    assert math.sqrt(statistics.fmean(one**2 for one in off)) < 0.09
    assert max(lost.values()) < 1.1 and statistics.geometric_mean(lost.values()) < 1.03


def test_packed_calls_are_near_the_best_that_was_measured() -> None:
    lost, gained = [], []
    asked = packed_choices.packings(packed_choices.QUERY_BLOCKS)
    for name, call in recorded("packed_choices_12").items():
        if name not in asked:
            continue  # whole since, as so little was to be gained
        us = {what.removesuffix(", chosen"): its for what, its in call["us"]["bwd"].items()}
        problem = packed_choices.posed(asked[name][0])
        chosen = us[taken(choosing.Chooser(problem, H200).choose(KERNEL), problem)]
        lost.append(chosen / min(us.values()))
        gained.append(chosen / us["whole"])
    assert len(lost) >= 34 and max(lost) < 1.3 and statistics.geometric_mean(lost) < 1.06
    assert statistics.geometric_mean(gained) < 0.62 and sum(one > 1 for one in gained) <= 1


@pytest.mark.parametrize("problem", OTHERS, ids=str)
def test_other_calls_have_whole_blocks(problem: Problem) -> None:
    assert not any(group_parts.of_queries(choice.config) for choice in choices(problem).values())


@pytest.mark.parametrize(
    "problem", [FEW, replace(FEW, mask=FULL), packed((2, 2), 3747, 10, 4096, 128, CAUSAL)], ids=str
)
def test_what_few_tiles_have(problem: Problem) -> None:
    choice = choices(problem)[KERNEL]
    assert choice.config["QUERY_PARTS"] and choice.config["EARLY_START"] and not choice.config["BESIDE"]
    assert group_parts_schedule.parts_of(problem, KERNEL, choice, H200) > 1
    assert not choice.of_row.config["QUERY_PARTS"]
    assert group_parts_schedule.parts_of(problem, KERNEL, choice.of_row, H200) == 1
    made = [config for variant, config, _ in precompile._by_shape(KERNEL, problem, choice.of_row, 90)
            if variant is choice.variant]  # fmt: skip
    assert {**choice.config, "HEADS_PER_WAVE": 1} in [{**config, "HEADS_PER_WAVE": 1} for config in made]


def test_none_in_a_fixed_order_of_dq() -> None:
    for heads, rows, dim in ((6, 12000, 128), (9, 8192, 64)):
        problem = Problem("bf16", 1, heads, heads, rows, rows, dim, dim, CAUSAL)
        choice = choices(problem, True)[KERNEL]
        assert choice.config["IN_ORDER"] and not choice.config["QUERY_PARTS"]
    assert not any(group_parts.of_queries(choice.config) for choice in choices(FEW, True).values())


def test_none_where_nothing_adds_parts_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_parts, "companion_path", lambda *_: None)
    assert not choices(FEW)[KERNEL].config["QUERY_PARTS"]


def test_the_rows_own_config_serves_where_the_form_cannot_be_had() -> None:
    check_fallback(FEW, "QUERY_PARTS")


def test_explain_says_so() -> None:
    said = str(serving.explain_problem(FEW, H200))
    assert (
        "bwd_fused: the query blocks of each key tile are split into 6 parts, whose dK and dV are summed after." in said
    )
    assert "kernels started early, not as the row has it, which is expected to be faster" in said
