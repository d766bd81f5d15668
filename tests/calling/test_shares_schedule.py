"""Which equal shares of key blocks are worth an estimate, and what they are estimated to take. No GPU."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from math import log
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
from benchmark_scripts import script
from test_few_tiles_choice import described

from fa2tune import gpus
from fa2tune.calling import forward_plans, serving
from fa2tune.calling.choosing import Chooser
from fa2tune.calling.schedules import few_tiles, in_place_schedule, shares_schedule
from fa2tune.compiling.compiler import binary_config
from fa2tune.fleet import precompile
from fa2tune.launching.key_splits import is_in_shares, kernels
from fa2tune.search_spaces.sm90 import fwd_shares
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Config, Problem

ROOT = Path(__file__).parents[2]
H200 = gpus.named("h200")


def posed(batch: int, heads: int, lengths: tuple[int, int], dim: int, mask: Mask = FULL, **changed: Any) -> Problem:
    return Problem("bf16", batch, heads, heads, *lengths, dim, dim, mask, **changed)


UNEVEN = posed(2, 38, (484, 4152), 192)  #: 304 tiles for 132 multiprocessors
LONG_TRIANGLE = posed(1, 2, (7169, 7169), 192, CAUSAL)  #: 114 tiles, whose longest has twice the mean


def test_whole_rounds_come_first_and_what_is_left_is_shared() -> None:
    found = {config["ROUNDS"]: (config, left) for config, left in shares_schedule.candidates(UNEVEN, H200)}
    assert set(found) == {1, 2} and all(config["SHARES"] == 132 for config, _ in found.values())
    assert found[2][1] == fwd_shares.left_over(UNEVEN, found[2][0]) == 40 * 65


@pytest.mark.parametrize("problem", [UNEVEN, LONG_TRIANGLE], ids=["three rounds", "causal"])
def test_calls_that_leave_multiprocessors_idle_are_expected_to_gain(problem: Problem) -> None:
    shares, whole = shares_schedule.best(problem, H200), few_tiles.best(problem, 90, 132)
    assert shares is not None and whole is not None and shares[0] < 0.95 * whole[0]


@pytest.mark.parametrize(("heads", "offered"), [(33, False), (32, False), (31, True)])
def test_an_even_call_gains_nothing(heads: int, offered: bool) -> None:
    """264 tiles are two whole rounds, 256 nearly, 248 are not."""
    assert (shares_schedule.best(posed(2, heads, (512, 4096), 192), H200) is not None) == offered


@pytest.mark.parametrize(
    "problem",
    [
        posed(2, 38, (484, 4152), 192, band(300, 0)),
        posed(1, 2, (7169, 500), 192, CAUSAL),  # tiles without a key
        posed(8, 64, (2048, 2048), 192, CAUSAL),  # tiles even out, and L2 does not hold K and V
        posed(1, 8, (32, 32000), 192),
        posed(1, 1, (64, 64), 192),  # fewer key blocks than multiprocessors
        posed(2, 38, (484, 4152), 192, aligned=False),
    ],
    ids=["window", "no keys", "many rounds", "few queries", "few blocks", "not aligned"],
)
def test_others_have_no_shares(problem: Problem) -> None:
    assert shares_schedule.best(problem, H200) is None


def raced() -> Iterator[tuple[Problem, dict[str, float]]]:
    """(call, candidate -> microseconds), of the calls that were raced."""
    record = json.loads(gzip.decompress((ROOT / "benchmarks/calls/forward_shares_2.json.gz").read_bytes()))
    for call in record["calls"].values():
        yield described(call["call"]), call["us"]


def chosen(problem: Problem) -> Config | None:
    """The shares that serve, if they do."""
    choice = Chooser(problem, H200).choose("fwd")
    found = in_place_schedule.instead_of(problem, choice.config, H200, choice.row)
    return found if found is not None and is_in_shares(found) else None


def test_the_calls_that_take_them_gained() -> None:
    """Over what served before; of 64 calls of 1500, those that might gain."""
    label = script("few_queries").label
    taken, found = [], list(raced())
    for problem, us in found:
        if config := chosen(problem):
            taken.append(us[label(config)] / us["served"])
    assert len(found) == 64 and len(taken) == 22
    assert geometric_mean(taken) < 0.82 and sum(one > 1.0 for one in taken) == 2 and max(taken) < 1.2


def test_they_serve_one_long_head_in_place_of_parts_in_several_turns() -> None:
    """1 x 1, 16384, 128, causal: 109 us for 182."""
    record = json.loads(gzip.decompress((ROOT / "benchmarks/calls/forward_apart.json.gz").read_bytes()))
    us = record["calls"]["16k"]["us"]
    config = chosen(described(record["calls"]["16k"]["call"]))
    assert config is not None and us[script("few_queries").label(config)] == min(us.values()) < 0.65 * us["served"]


def test_what_they_take_is_estimated() -> None:
    label = script("few_queries").label
    errors = []
    for problem, us in raced():
        if found := shares_schedule.best(problem, H200):
            errors.append(log(found[0] / us[label(found[1])]))
    assert len(errors) > 50 and sum(one * one for one in errors) / len(errors) < 0.11**2


def test_a_call_is_served_and_explained() -> None:
    found = serving.explain_problem(LONG_TRIANGLE, H200, ["fwd"])
    (kernel,) = found.kernels
    assert kernel.status == "estimated" and list(kernel.runs or {}) == ["sm90/fwd_shares", "sm90/fwd_join"]
    assert kernel.in_shares and not kernel.grouped and not kernel.longer_blocks and not kernel.all_keys
    assert "Key blocks of each of its 132 programs: equally many." in str(found)
    (said,) = found.as_dict()["kernels"]
    assert said["shares"] == chosen(LONG_TRIANGLE) and said["split"] is said["one_tile"] is None
    assert serving.served_by(LONG_TRIANGLE, H200, backward=False) == {"fwd": "sm90/fwd_shares + sm90/fwd_join"}
    assert forward_plans.how(said["shares"]) == forward_plans.SHARES
    whole = serving.explain_problem(UNEVEN, H200, ["fwd"])
    assert "of its 132 programs: 2 whole tiles, then an equal share of what is left." in str(whole)


def test_their_binaries_are_compiled_ahead() -> None:
    choice = Chooser(LONG_TRIANGLE, H200).choose("fwd")
    named = {one.name for one, _, _ in precompile._by_shape("fwd", LONG_TRIANGLE, choice, 90)}
    assert {"sm90/fwd_shares", "sm90/fwd_join"} <= named


def test_binaries_of_any_heads_and_lengths_are_those_of_a_call() -> None:
    listed = shares_schedule.all_kernels(UNEVEN, 90)
    assert {variant.name for variant, _, _ in listed} == {"sm90/fwd_shares", "sm90/fwd_join"}
    config, _left = shares_schedule.candidates(UNEVEN, H200)[0]
    for variant, its_config, _ in kernels(UNEVEN, config, 90):
        asked = binary_config(variant, its_config)
        assert asked in [binary_config(variant, one) for other, one, _ in listed if other is variant]
    assert shares_schedule.all_kernels(posed(1, 1, (64, 64), 192, band(9, 0)), 90) == []
