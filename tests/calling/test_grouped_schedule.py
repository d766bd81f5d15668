"""Which calls get tiles of several query heads, estimates beside the record, and what explain says of them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fa2tune import gpus
from fa2tune.calling import choosing, forward_plans, serving
from fa2tune.calling.kinds import WARP_SPECIALIZED_ROWS
from fa2tune.calling.schedules import few_tiles, grouped_schedule, in_place_schedule, key_splits_schedule
from fa2tune.compiling import limits
from fa2tune.fleet import precompile
from fa2tune.gpus import Gpu
from fa2tune.launching import key_splits
from fa2tune.search_spaces.sm90 import fwd_grouped
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.score import score_of

ROOT = Path(__file__).parents[2]
H200 = gpus.named("h200")
PROMPT = Problem("bf16", 10, 84, 1, 66, 66, 56, 56, CAUSAL)


RECORD = json.loads((ROOT / "benchmarks/calls/grouped_heads.json").read_text())["cases"]
CALL_IDS = [case["call"] for case in RECORD]
NEAR = 0.15  #: of one time; the form that is chosen of a call is nearer


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of several heads serve wherever they are asked for and can be had."""
    monkeypatch.setattr(grouped_schedule, "_margin", lambda problem: -math.inf)


def chosen(problem: Problem, gpu: Gpu = H200) -> Config | None:
    choice = choosing.choose(problem, "fwd", gpu, WARP_SPECIALIZED_ROWS)
    found = in_place_schedule.instead_of(problem, choice.config, gpu, choice.row)
    return found if found and key_splits.is_grouped(found) else None


def posed(case: dict[str, Any]) -> Problem:
    return Problem(**{**case["problem"], "mask": Mask(case["problem"]["mask"])})


def timed(case: dict[str, Any]) -> dict[tuple[int, int, int], float]:
    """(rows, keys, heads) of a tile -> microseconds."""
    found = {}
    for name, us in case["us"].items():
        if size := re.match(r"grouped M(\d+) N(\d+) of (\d+) heads", name):
            rows, keys, members = map(int, size.groups())
            found[rows, keys, members] = us
    return found


def size_of(config: Config) -> tuple[int, int, int]:
    return config["BLOCK_M"], config["BLOCK_N"], config["MEMBERS"]


def test_estimates_are_near_the_times_that_they_were_fitted_to() -> None:
    errors = []
    for case in RECORD:
        problem = posed(case)
        for (*size, members), us in timed(case).items():
            config = fwd_grouped.config_of(problem.specialization, *size, members)
            errors.append(math.log(grouped_schedule.grouped_us(problem, config, H200) / us))
    assert len(errors) == 40 and max(map(abs, errors)) < NEAR
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) < 0.065


@pytest.mark.parametrize("case", RECORD, ids=CALL_IDS)
def test_the_chosen_tiles_are_near_the_best_that_were_timed(case: dict[str, Any]) -> None:
    """Those timed include some of more heads than serve."""
    estimated, tiles = grouped_schedule.best(posed(case), H200) or (0.0, {})
    us = timed(case)[size_of(tiles)]
    assert us < 1.05 * min(timed(case).values())
    assert abs(math.log(estimated / us)) < 0.08


@pytest.mark.parametrize("case", RECORD, ids=CALL_IDS)
def test_what_is_taken_was_faster(case: dict[str, Any]) -> None:
    tiles = chosen(posed(case))
    assert tiles is None or timed(case)[size_of(tiles)] < 0.93 * case["us"]["tuned"]


def test_calls_that_gained_most_are_taken() -> None:
    taken = {case["problem"]["batch"] for case in RECORD if chosen(posed(case))}
    assert taken == {10, 21}, "next to tiles of one head in forms of few tiles the others gain nothing, or 3 %"


def test_few_queries_of_a_group_share_tiles() -> None:
    tiles = chosen(PROMPT)
    assert tiles is not None
    assert limits.before_compile(key_splits.splitting(tiles), PROMPT.specialization, tiles, H200) is None
    assert chosen(replace(PROMPT, dtype="fp16")) is not None


def test_heads_that_do_not_fill_their_tiles_are_counted() -> None:
    """Of 45 heads tiles of 32 waste more than tiles of 4 or 8 of the same size."""
    problem = Problem("bf16", 17, 90, 2, 94, 94, 24, 24, FULL)
    _, tiles = grouped_schedule.best(problem, H200) or (0.0, {})
    assert tiles["MEMBERS"] < 32
    worst = {**tiles, "MEMBERS": 64}
    assert grouped_schedule.grouped_us(problem, worst, H200) > grouped_schedule.grouped_us(problem, tiles, H200)


@pytest.mark.parametrize(
    "other",
    [
        {"heads_kv": 84},  # no group
        {"batch": 64, "seqlen_q": 4096, "seqlen_k": 4096},  # full tiles
        {"seqlen_q": 16},
        {"tma": False},
        {"aligned": False, "tma": False},
        {"dtype": "fp32"},
        {"batch": 1, "extent": Extent(RAGGED, 10, 66)},
        {"seqlen_k": 0},
        {"batch": 0},
        {"heads_q": 0, "heads_kv": 0},
    ],
    ids=str,
)
def test_calls_that_the_kernel_is_not_asked_for(always: None, other: dict[str, Any]) -> None:
    assert chosen(PROMPT) is not None
    assert chosen(replace(PROMPT, **other)) is None


def test_score_terms_have_portable_tiles_where_these_are_faster(always: None) -> None:
    assert chosen(replace(PROMPT, score=score_of(20.0))) is None
    wide = {"head_dim": 128, "head_dim_v": 128}
    assert chosen(replace(PROMPT, **wide, score=score_of(20.0))) is not None


@pytest.mark.parametrize("mask", [Mask("chunked", 64), Mask("causal_top_left")], ids=str)
def test_masks_that_are_not_measured_are_asked_for_too(always: None, mask: Mask) -> None:
    tiles = chosen(replace(PROMPT, mask=mask))
    assert tiles is not None
    asked = replace(PROMPT, seqlen_q=4096, seqlen_k=4096)
    times = {mask: grouped_schedule.grouped_us(replace(asked, mask=mask), tiles, H200) for mask in (mask, CAUSAL, FULL)}
    if mask.name == "chunked":  # of 64 blocks a tile visits one or two
        assert times[mask] < 0.2 * times[FULL]
    else:
        assert times[mask] == times[CAUSAL]


def test_other_gpus_keep_their_kernels() -> None:
    assert chosen(PROMPT, gpus.named("a100")) is None


@pytest.mark.parametrize(
    "other",
    [{"mask": Mask("band", 30, 0)}, {"seqlen_q": 40}, {"seqlen_k": 3000}, {"head_dim": 256, "head_dim_v": 256}],
    ids=str,
)
def test_what_was_not_timed_has_a_wider_margin(other: dict[str, Any]) -> None:
    assert grouped_schedule._margin(PROMPT) == grouped_schedule.MARGIN
    assert grouped_schedule._margin(replace(PROMPT, **other)) == grouped_schedule.UNTIMED_MARGIN


def test_it_has_to_be_worth_its_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the constants of tiles of one head, or, of a config that these do not know, by those of split keys."""
    time, _ = grouped_schedule.best(PROMPT, H200) or (0.0, {})
    for unknown in (False, True):
        if unknown:
            monkeypatch.setattr(few_tiles, "expected_us", lambda *_: None)
        for share, taken in ((0.99, True), (1.01, False)):
            of, name = (key_splits_schedule, "ordinary_us") if unknown else (few_tiles, "expected_us")
            monkeypatch.setattr(of, name, lambda *_, share=share: time / (1 - grouped_schedule.MARGIN) / share)
            assert (chosen(PROMPT) is not None) == taken


def test_no_time_is_less_than_that_of_its_memory() -> None:
    """1 GB of K and V."""
    long = Problem("bf16", 64, 64, 8, 32, 4096, 128, 128, FULL)
    config = fwd_grouped.config_of(long.specialization, 128, 128, 8)
    fast = replace(H200, sm_count=100_000)
    assert grouped_schedule.grouped_us(long, config, fast) > 1e9 / (H200.hbm_gbs * 1e3)


def test_decoding_stays_split() -> None:
    decoding = Problem("bf16", 1, 32, 8, 1, 8192, 128, 128, FULL)
    choice = choosing.choose(decoding, "fwd", H200, WARP_SPECIALIZED_ROWS)
    found = in_place_schedule.instead_of(decoding, choice.config, H200, choice.row)
    assert found == key_splits_schedule.config_of(decoding, choice.config, H200, choice.row) and "SPLITS" in found


def test_a_window_is_estimated_by_the_blocks_that_it_visits() -> None:
    long = replace(PROMPT, seqlen_q=200, seqlen_k=4000)
    config = (grouped_schedule.best(long, H200) or (0.0, {}))[1]
    narrow = grouped_schedule.grouped_us(replace(long, mask=Mask("band", 100, 0)), config, H200)
    assert narrow < 0.5 * grouped_schedule.grouped_us(replace(long, mask=FULL), config, H200)


def test_explain_names_the_kernel_and_its_status() -> None:
    found = serving.explain_problem(PROMPT, H200, ("fwd",))
    served, told = found.kernels[0], found.as_dict()["kernels"][0]
    assert served.grouped and served.status == "estimated" and set(served.binaries or {}) == {"sm90/fwd_grouped"}
    heads = (served.split or {})["MEMBERS"]
    assert "so sm90/fwd_grouped runs instead" in str(found) and f"tiles have {heads} of the 84 query heads" in str(
        found
    )
    assert told["split"] is None and told["grouped"] == told["config"] == dict(served.split or {})
    assert "tiles of several query heads" in str(served)
    assert serving.served_by(PROMPT, H200, backward=False) == {"fwd": "sm90/fwd_grouped"}


def test_what_was_refused_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choosing.choose(PROMPT, "fwd", H200)
    tiles, refused = forward_plans.split_of(PROMPT, choice, H200)
    assert tiles is not None and refused == ""
    monkeypatch.setitem(forward_plans._REFUSED, forward_plans._binary(PROMPT, tiles, H200), "ptxas failed")
    served = serving.explain_problem(PROMPT, H200, ("fwd",))
    assert served.kernels[0].split is None
    assert "tiles of several query heads are expected to be faster, but ptxas failed" in str(served)
    assert forward_plans.how(tiles) == forward_plans.GROUPED


def test_precompile_has_every_tile() -> None:
    alone = replace(PROMPT, heads_q=1)  # as rows are tuned
    found = grouped_schedule.all_kernels(alone, 90)
    sizes = ((64, 64), (128, 64))
    assert {size_of(config) for _, config, _ in found} == {
        (*size, heads) for size in sizes for heads in (2, 4, 8, 16, 32)
    }
    choice = choosing.choose(alone, "fwd", H200, WARP_SPECIALIZED_ROWS)
    assert "sm90/fwd_grouped" in {one.name for one, _, _ in precompile._by_shape("fwd", alone, choice, 90)}


@pytest.mark.parametrize("sizes", [(18, 88, 44, 417, 184), (52, 78, 1, 434, 168)], ids=str)
def test_wide_heads_need_a_smaller_gain_and_may_have_more_tiles(sizes: tuple[int, ...]) -> None:
    """Both took 0.90 of the time: benchmarks/calls/dense_forwards_10.json.gz."""
    batch, heads_q, heads_kv, length, dim = sizes
    problem = Problem("bf16", batch, heads_q, heads_kv, length, length, dim, dim, FULL)
    tiles = chosen(problem)
    assert tiles is not None and size_of(tiles) == (128, 64, 2)


@pytest.mark.parametrize(
    ("sizes", "rescale"),
    [((2, 22, 11, 9519, 176), "never"), ((4, 36, 4, 4861, 192), "never"), ((1, 21, 21, 4977, 192), "lazy")],
    ids=str,
)
def test_bounds_by_norms_stay_in_long_calls_of_many_wide_tiles(sizes: tuple[int, ...], rescale: str) -> None:
    """As was faster in each: benchmarks/calls/dense_forwards_9.json.gz, _10 and _wide."""
    batch, heads_q, heads_kv, length, dim = sizes
    mask = FULL if rescale == "lazy" else CAUSAL
    problem = Problem("bf16", batch, heads_q, heads_kv, length, length, dim, dim, mask)
    assert choosing.choose(problem, "fwd", H200).config["RESCALE"] == rescale
