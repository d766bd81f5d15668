"""benchmarks/ship_cache.py: which rows of several runs are shipped."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cache_rows import row
from click.testing import CliRunner

from fa2tune.rows.lookup import Toolchain
from fa2tune.rows.row import Row
from fa2tune.spec.problem import BACKWARD

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from ship_cache import best_of, main

NOW, BEFORE = "a" * 16, "b" * 16


@pytest.fixture
def toolchain() -> Toolchain:
    return Toolchain(
        kernel_hashes=dict.fromkeys(
            ("fwd causal", "bwd split portable causal", "bwd fused warp_specialized causal"), NOW
        )
    )


def forward(time_us: float, gain: float, kernel_hash: str = NOW, **key: object) -> Row:
    return row(dict(key), time_us=time_us, gain=gain, kernel_hash=kernel_hash)


def whole(filed_as: str, time_us: float, gain: float, kernel_hash: str = NOW) -> Row:
    strategy, implementation = filed_as.split()
    evidence = {"time_us": time_us, "gain": gain, "kernel_hash": kernel_hash}
    return row({"kernel": BACKWARD}, strategy=strategy, implementation=implementation, config={}, **evidence)


@pytest.mark.parametrize(("later", "shipped"), [(1.203, 1.2), (1.21, 1.21)])
def test_a_later_row_has_to_gain_half_a_percent_more(toolchain: Toolchain, later: float, shipped: float) -> None:
    """Whatever the times: GPUs differ."""
    kept = best_of([[forward(500.0, 1.2)], [forward(900.0, later)]], toolchain)
    assert [row.gain for row in kept] == [shipped]


@pytest.mark.parametrize("order", [1, -1])
def test_on_demand_what_was_measured_last_counts_whatever_it_gained(toolchain: Toolchain, order: int) -> None:
    old = replace(forward(500.0, 1.3), created="2026-11-22T00:00:00Z")
    new = replace(forward(900.0, 1.1), created="2026-11-23T00:00:00Z")
    assert best_of([[old], [new]][::order], toolchain, newest=True) == [new]


def test_what_was_measured_last_is_chosen_among_several(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").touch()
    result = CliRunner().invoke(main, ["--newest", str(tmp_path / "run.sqlite"), str(tmp_path / "out.sqlite")])
    assert (
        result.exit_code == 2 and "--newest: got one file" in result.output and not (tmp_path / "out.sqlite").exists()
    )


def test_keys_that_one_run_has_stay(toolchain: Toolchain) -> None:
    kept = best_of([[forward(1.0, 1.1, bucket=512)], [forward(1.0, 1.1, bucket=1024)]], toolchain)
    assert {row.key.bucket for row in kept} == {512, 1024}


def test_rows_of_other_sources_are_left_out(toolchain: Toolchain) -> None:
    assert best_of([[forward(1.0, 2.0, BEFORE)], [forward(1.0, 1.1)]], toolchain) == [forward(1.0, 1.1)]
    assert best_of([[forward(1.0, 2.0, BEFORE)], []], toolchain) == []


def test_an_implementation_that_the_best_run_lacks_comes_from_another(toolchain: Toolchain) -> None:
    """Calls that the winner cannot serve, deterministic ones say, would have nothing. It must not pass for the winner."""
    first = [whole("split portable", 900.0, 1.0), whole("fused warp_specialized", 600.0, 1.5)]
    second = [whole("fused warp_specialized", 550.0, 1.6)]
    assert {row.time_us for row in best_of([first, second], toolchain)} == {900.0, 550.0}
    slow_card = [whole("fused warp_specialized", 950.0, 1.6)]
    assert best_of([first, slow_card], toolchain) == slow_card


def test_a_whole_backward_comes_from_one_run(toolchain: Toolchain) -> None:
    first = [whole("split portable", 900.0, 1.0), whole("fused warp_specialized", 600.0, 1.5)]
    second = [whole("split portable", 800.0, 1.1), whole("fused warp_specialized", 550.0, 1.6)]
    assert best_of([first, second], toolchain) == second


def test_a_whole_backward_whose_best_is_of_other_sources_serves_no_call(toolchain: Toolchain) -> None:
    """Its second best would keep a neighbour's row from serving."""
    assert (
        best_of(
            [[whole("split portable", 900.0, 1.0), whole("fused warp_specialized", 600.0, 1.5, BEFORE)], []], toolchain
        )
        == []
    )
