"""Which equal shares of key blocks are worth an estimate, and what they are estimated to take. No GPU."""

from __future__ import annotations

from typing import Any

import pytest

from fa2tune import gpus
from fa2tune.calling.schedules import few_tiles, in_place_schedule, shares_schedule
from fa2tune.compiling.compiler import binary_config
from fa2tune.launching.key_splits import is_in_shares, kernels
from fa2tune.search_spaces.sm90 import fwd_shares
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Config, Problem

H200 = gpus.named("h200")


def posed(batch: int, heads: int, lengths: tuple[int, int], dim: int, mask: Mask = FULL, **changed: Any) -> Problem:
    return Problem("bf16", batch, heads, heads, *lengths, dim, dim, mask, **changed)


UNEVEN = posed(2, 38, (484, 4152), 192)  #: 304 tiles for 132 multiprocessors
LONG_TRIANGLE = posed(1, 2, (7169, 7169), 192, CAUSAL)  #: 114 tiles, whose longest has twice the mean


def test_whole_rounds_come_first_and_what_is_left_is_shared() -> None:
    found = {config["ROUNDS"]: config for config in shares_schedule.candidates(UNEVEN, H200)}
    assert set(found) == {1, 2} and all(config["SHARES"] == 132 for config in found.values())
    # 40 tiles of 65 blocks for 132 programs: 20 blocks a program, so a tile is in five parts at most
    assert fwd_shares.left_over(UNEVEN, found[2]) == 40 * 65 and found[2]["SPLITS"] == 5


@pytest.mark.parametrize("problem", [UNEVEN, LONG_TRIANGLE], ids=["three rounds", "causal"])
def test_calls_that_leave_multiprocessors_idle_are_expected_to_gain(problem: Problem) -> None:
    shares, whole = shares_schedule.best(problem, H200), few_tiles.best(problem, 90, 132)
    assert shares is not None and whole is not None and shares[0] < 0.95 * whole[0]


def test_an_even_call_gains_nothing() -> None:
    """264 tiles are two whole rounds."""
    problem = posed(2, 33, (512, 4096), 192)
    shares, whole = shares_schedule.best(problem, H200), few_tiles.best(problem, 90, 132)
    assert shares is not None and whole is not None and shares[0] > 0.99 * whole[0]


@pytest.mark.parametrize(
    "problem",
    [
        posed(2, 38, (484, 4152), 192, band(300, 0)),
        posed(1, 2, (7169, 500), 192, CAUSAL),  # tiles without a key
        posed(8, 64, (2048, 2048), 192, CAUSAL),  # tiles even out, and L2 does not hold K and V
        posed(1, 1, (64, 64), 192),  # fewer key blocks than multiprocessors
        posed(2, 38, (484, 4152), 192, aligned=False),
    ],
    ids=["window", "no keys", "many rounds", "few blocks", "not aligned"],
)
def test_others_have_no_shares(problem: Problem) -> None:
    assert shares_schedule.best(problem, H200) is None


def test_no_call_takes_them_until_they_are_timed() -> None:
    config: Config = few_tiles.best(UNEVEN, 90, 132)[1]  # type: ignore[index]
    found = in_place_schedule.instead_of(UNEVEN, config, H200)
    assert found is None or not is_in_shares(found)


def test_binaries_of_any_heads_and_lengths_are_those_of_a_call() -> None:
    listed = shares_schedule.all_kernels(UNEVEN, 90)
    assert {variant.name for variant, _, _ in listed} == {"sm90/fwd_shares", "portable/fwd_combine"}
    config = next(shares_schedule.candidates(UNEVEN, H200))
    for variant, its_config, _ in kernels(UNEVEN, config, 90):
        asked = binary_config(variant, its_config)
        assert asked in [binary_config(variant, one) for other, one, _ in listed if other is variant]
    assert shares_schedule.all_kernels(posed(1, 1, (64, 64), 192, band(9, 0)), 90) == []
