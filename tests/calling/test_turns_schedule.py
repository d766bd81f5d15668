"""Which deterministic calls the fused Hopper backward serves with its key tiles in turns."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from benchmark_scripts import BENCHMARKS, script

from fa2tune import gpus
from fa2tune.calling import choosing, serving
from fa2tune.calling.schedules import turns_schedule
from fa2tune.fleet import precompile
from fa2tune.launching import passes
from fa2tune.rows import lookup
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import BACKWARD, FUSED, SPLIT, Problem

H200 = gpus.named("h200")
ROOT = BENCHMARKS.parent
backwards = script("dense_backwards")
#: Where no row is stale.
NODE = lookup.Toolchain(triton="3.6.0")


def posed(length: int, dim: int, mask: Mask = CAUSAL, heads: int = 16, batch: int = 8) -> Problem:
    return Problem("bf16", batch, heads, heads, length, length, dim, dim, mask)


def strategy(problem: Problem) -> str:
    return choosing.choose_backward(choosing.Chooser(problem, H200, node=NODE), True)[0]


@pytest.mark.parametrize("mask", [CAUSAL, FULL, Mask("causal_top_left")], ids=str)
@pytest.mark.parametrize(("length", "dim"), [(2048, 128), (1024, 64), (16384, 128), (4099, 56), (8192, 104)])
def test_serves_many_tiles(length: int, dim: int, mask: Mask) -> None:
    problem = posed(length, dim, mask, heads=32)
    found, choices = choosing.choose_backward(choosing.Chooser(problem, H200, node=NODE), True)
    free = choosing.choose_backward(choosing.Chooser(problem, H200, node=NODE), False)[1]["bwd_fused"]
    assert found == FUSED and list(choices) == ["bwd_fused"]
    config = choices["bwd_fused"].config
    assert choices["bwd_fused"].row is free.row and config["IN_ORDER"] and not free.config["IN_ORDER"]
    assert all(config[name] == value for name, value in bwd_fused.TURNS.items())
    assert bwd_fused.SPACE.broken(config, problem.specialization, 90) is None


@pytest.mark.parametrize(
    "problem",
    [
        posed(4096, 64, heads=1, batch=1),  # 32 tiles
        posed(1023, 64),
        posed(2047, 128),
        replace(posed(4096, 128), seqlen_k=2000),
        replace(posed(4096, 128), heads_q=64),
        posed(2048, 256),
        posed(2048, 96),  # in parts
        posed(2048, 32),
        posed(4096, 128, band(1024, 0)),
        posed(4096, 128, Mask("chunked", 512)),
        replace(posed(4096, 128), dtype="fp32"),
        replace(posed(4096, 128), aligned=False, tma=False),
        replace(posed(16384, 128, batch=1), extent=Extent(RAGGED, 16)),
    ],
    ids=[
        "few tiles",
        "short",
        "short, 128",
        "few keys",
        "grouped, 128",
        "256",
        "parts",
        "narrow",
        "window",
        "chunks",
        "fp32",
        "unaligned",
        "packed",
    ],
)
def test_others_are_split(problem: Problem) -> None:
    assert strategy(problem) == SPLIT


def test_nothing_leads_back_to_a_form_without_order() -> None:
    """Also of a call that the fused kernel serves in another form than the row's."""
    problem = Problem("fp16", 2, 64, 32, 4096, 4096, 40, 40, FULL)
    chooser = choosing.Chooser(problem, H200, node=NODE)
    assert choosing.choose_backward(chooser, False)[1]["bwd_fused"].otherwise is not None
    found = choosing.choose_backward(chooser, True)[1]["bwd_fused"]
    assert found.config["IN_ORDER"] and found.of_row.config["IN_ORDER"]


def test_it_serves_where_it_was_faster_than_split_kernels() -> None:
    """By the record: all that serve gained, and of others none gained more than 8 %, but for the few tiles of one head."""
    gains = {}
    for name, call in json.loads((ROOT / "benchmarks/calls/turns_2.json").read_text())["calls"].items():
        if name != "32":  # has no such form
            problem = backwards.TURN_CALLS[name][0]
            gains[name] = strategy(problem) == FUSED, call["us"]["split"] / call["us"]["early"]
    assert all(gain > 0.999 for serves, gain in gains.values() if serves)
    assert {name for name, (serves, gain) in gains.items() if not serves and gain > 1.08} == {"one head"}
    assert sum(serves for serves, _ in gains.values()) == 12
    assert strategy(replace(posed(4096, 64), heads_q=64)) == FUSED


@pytest.mark.parametrize(
    ("problem", "columns", "heads"),
    [
        (posed(512, 64), 64, 32),
        (posed(8192, 64), 64, 8),
        (posed(8192, 128), 128, 4),
        (replace(posed(4096, 128), heads_q=64), 128, 2),  # four query heads a key head
        (posed(1 << 20, 128), 128, 1),
    ],
    ids=str,
)
def test_l2_holds_the_rows_of_a_band(problem: Problem, columns: int, heads: int) -> None:
    assert turns_schedule.band(problem, columns, H200) == heads
    held = heads * problem.group * problem.seqlen_q * 8 * columns
    assert heads in (1, turns_schedule.MOST_HEADS) or 0.3 < held / H200.l2_bytes <= 0.7


def test_explain_claims_no_speed_of_the_row() -> None:
    """It was timed in another form."""
    problem = posed(4096, 128)
    found = {one.kernel: one for one in serving.explain_problem(problem, H200, (BACKWARD,), True).kernels}
    assert list(found) == [BACKWARD, "bwd_fused"]
    for one in found.values():
        assert one.estimated and one.row is not None and one.row.gain is not None
        assert "dQ summed in a fixed order" in str(one) and "x portable default" not in str(one)
    free = serving.explain_problem(problem, H200, (BACKWARD,), False).kernels
    assert all("fixed order" not in str(one) for one in free) and "x portable default" in str(free[0])
    chooser = choosing.Chooser(problem, H200, node=NODE)
    assert choosing.choose_backward(chooser, True)[1]["bwd_fused"].lead is None


@pytest.mark.parametrize("deterministic_in_order", [True, False], ids=["turns", "split"])
def test_precompiled_are_both_strategies(monkeypatch: pytest.MonkeyPatch, deterministic_in_order: bool) -> None:
    """Whatever the number of tiles of the problem that stands for all calls of a key: which one serves depends on it."""
    monkeypatch.setattr(turns_schedule, "LEAST_ROUNDS", 0 if deterministic_in_order else 1 << 20)
    problem = posed(4096, 128)
    listed = {
        (variant.name, bool(config.get("IN_ORDER")))
        for kernel, choice in precompile._choices(problem, H200, choosing.layers(), NODE)
        for variant, config in [
            *passes.runs(kernel, problem.specialization, choice, 90),
            *(one[:2] for one in precompile._by_shape(kernel, problem, choice, 90)),
        ]
    }
    assert {("sm90/bwd_fused", False), ("sm90/bwd_fused", True), ("sm90/bwd_prepare", True)} <= listed
    assert {("sm90/bwd_dq", False), ("sm90/bwd_dkdv", False)} <= listed
