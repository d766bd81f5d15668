"""Which packed backwards give out tiles of longer sequences first (LONGER_FIRST), and what says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from test_early_start_choice import check_fallback, choices, packed

from fa2tune import gpus
from fa2tune.calling import serving
from fa2tune.calling.schedules import fused_schedule, group_parts_schedule, packed_schedule
from fa2tune.fleet import precompile
from fa2tune.launching import group_parts
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

H200 = gpus.named("h200")
KERNEL = "bwd_fused"


#: Drawn: benchmarks/calls/random_packings_2.json (22, 45, 13), _3.json (4), _6.json (7).
UNEVEN = (
    packed((4, 2), 11223, 34, 2048, 96, CAUSAL), packed((2, 1), 20670, 8, 8192, 64, CAUSAL),
    packed((4, 2), 65330, 103, 8192, 128, CAUSAL), packed((1, 1), 62732, 12, 32768, 128, CAUSAL),
    packed((2, 1), 12589, 21, 2048, 128, FULL),
)  # fmt: skip
#: One sequence; many tiles for each program; short sequences, whose tiles are alike; and a mean that none is far from.
EVEN = (
    packed((4, 2), 11223, 1, 16384, 96, CAUSAL), packed((64, 64), 60000, 40, 4096, 128, CAUSAL),
    packed((4, 2), 10540, 151, 128, 128, CAUSAL), packed((8, 8), 65536, 256, 256, 64, FULL),
)  # fmt: skip


def without(config: Mapping[str, object]) -> dict[str, object]:
    return {**config, "LONGER_FIRST": False}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_schedule, "LONGER_FIRST", True)


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("problem", UNEVEN, ids=str)
def test_calls_whose_last_tiles_would_end_alone(problem: Problem) -> None:
    choice = choices(problem)[KERNEL]
    assert choice.config["LONGER_FIRST"] and not choice.config["BESIDE"] and not choice.of_row.config["LONGER_FIRST"]
    assert bwd_fused.SPACE.broken(choice.config, problem.specialization, 90) is None
    as_they_lie = replace(choice, config=without(choice.config))
    counts = [group_parts_schedule.parts_of(problem, KERNEL, one, H200) for one in (choice, as_they_lie)]
    assert counts[0] == counts[1]
    longer, own = (fused_schedule.predicted_us(problem, one.config, H200, counts[0]) for one in (choice, as_they_lie))
    assert longer < (1 - packed_schedule.LONGER_MARGIN) * own


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("problem", EVEN, ids=str)
def test_others_do_not(problem: Problem) -> None:
    assert not choices(problem)[KERNEL].config["LONGER_FIRST"]


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("problem", UNEVEN, ids=str)
def test_deterministic_calls_do_not(problem: Problem) -> None:
    assert not any(choice.config.get("LONGER_FIRST") for choice in choices(problem, True).values())


def test_none_without_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for problem in UNEVEN:
        monkeypatch.setattr(packed_schedule, "LONGER_FIRST", True)
        longer = choices(problem)[KERNEL].config
        monkeypatch.setattr(packed_schedule, "LONGER_FIRST", False)
        own = choices(problem)[KERNEL]
        assert not own.config["LONGER_FIRST"]
        assert {**without(longer), "EARLY_START": False} == {**own.config, "EARLY_START": False}
        assert not any(form.get("LONGER_FIRST") for form in packed_schedule.forms(problem, own.of_row))


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("problem", UNEVEN, ids=str)
def test_binaries_are_made_ahead(problem: Problem) -> None:
    choice = choices(problem)[KERNEL]
    made = list(precompile._by_shape(KERNEL, problem, choice.of_row, 90))
    of_any_heads = [{**config, "HEADS_PER_WAVE": 1} for variant, config, _ in made if variant is choice.variant]
    assert {**choice.config, "HEADS_PER_WAVE": 1} in of_any_heads
    early = bool(choice.config["EARLY_START"])
    before = [config for variant, config, _ in made if variant.name == "sm90/bwd_prepare"]
    assert any(one.get("LONGER_FIRST") and bool(one.get("EARLY_START")) == early for one in before)


@pytest.mark.usefixtures("on")
def test_the_rows_own_config_serves_where_the_form_cannot_be_had() -> None:
    check_fallback(UNEVEN[0], "LONGER_FIRST")


@pytest.mark.usefixtures("on")
def test_explain_says_so() -> None:
    said = [str(serving.explain_problem(problem, H200)) for problem in (*UNEVEN, *EVEN)]
    assert ["longer sequences first" in one for one in said] == [True] * len(UNEVEN) + [False] * len(EVEN)
    row_alone = next(one for one in UNEVEN if not choices(one)[KERNEL].of_row.config["BESIDE"])
    assert "bwd_fused: longer sequences first, not as the row has it" in str(serving.explain_problem(row_alone, H200))


def test_it_is_of_packed_sequences_alone_on_the_gpu() -> None:
    spec = UNEVEN[0].specialization
    config = {**bwd_fused.SPACE.default(spec, 90), **bwd_fused.PACKED, "LONGER_FIRST": True}
    assert bwd_fused.SPACE.broken(config, spec, 90) is None
    dense = Problem("bf16", 2, 4, 2, 500, 500, 96, 96, CAUSAL).specialization
    for settings, of in ((config, dense), ({**config, "BESIDE": True}, spec)):
        broken = bwd_fused.SPACE.broken(settings, of, 90)
        assert broken is not None and broken.name == "longer_first_is_written_before"


def test_the_order_lies_behind_the_counter() -> None:
    problem, variant = UNEVEN[0], choices(UNEVEN[0])[KERNEL].variant
    config = {**bwd_fused.SPACE.default(problem.specialization, 90), **bwd_fused.PACKED}
    tiles = problem.seqlen_k // (bwd_fused.GROUPS * bwd_fused.KEYS) + problem.extent.sequences + 1
    for parts in group_parts.allowed(problem):
        posed = group_parts.split(problem, parts)
        made = [variant.workspaces(posed, {**config, "LONGER_FIRST": first})["counter"] for first in (False, True)]
        assert made == [((1,), "i32"), ((1 + tiles,), "i32")]
        assert variant.scalars(posed, {**config, "LONGER_FIRST": True}, False)["counts"] == 1
