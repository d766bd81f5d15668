"""Which calls have their query heads taken as one a key head, what estimates make of the mask of their rows, and what
``explain`` says."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from benchmark_scripts import BENCHMARKS, script

from fa2tune import gpus
from fa2tune.calling import merging, serving
from fa2tune.calling.choosing import Chooser
from fa2tune.calling.schedules import fused_schedule, query_tiles_schedule, split_backward_schedule
from fa2tune.launching.merged_heads import merged
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import BACKWARD, HEADS_FIRST, QUERIES_FIRST, Problem

H200 = gpus.named("h200")
CALLS = BENCHMARKS / "calls"
#: 18 tiles of 77 rows a key head; 1386 rows fill 11.
SHORT = Problem("bf16", 10, 18, 1, 77, 77, 176, 176, FULL, stacked=QUERIES_FIRST)
CAUSAL_SHORT = Problem("bf16", 9, 54, 1, 66, 66, 232, 232, CAUSAL, stacked=QUERIES_FIRST)
#: Tiles of one head are full, or the call is long; few queries, whose tiles have the rows of all heads by another kernel.
OTHERS = (
    Problem("bf16", 4, 32, 8, 1152, 1152, 128, 128, FULL, stacked=HEADS_FIRST),
    replace(SHORT, seqlen_q=4096), replace(SHORT, seqlen_q=16, seqlen_k=4000), replace(SHORT, stacked=""),
    replace(CAUSAL_SHORT, stacked=HEADS_FIRST),
)  # fmt: skip


@pytest.mark.parametrize("problem", [SHORT, CAUSAL_SHORT], ids=["full", "causal"])
def test_calls_whose_tiles_would_be_half_empty_take_it(problem: Problem) -> None:
    chooser = Chooser(problem, H200)
    one = merging.merging(chooser, "fwd")
    assert one is not None and one.problem == merged(problem)
    assert merging.forward_us(one) < 0.7 * merging.forward_us(chooser)
    assert merging.merging(chooser, BACKWARD, lse=QUERIES_FIRST) is not None


@pytest.mark.parametrize("problem", OTHERS, ids=["full tiles", "long", "few queries", "apart", "causal heads apart"])
def test_other_forwards_do_not(problem: Problem) -> None:
    assert merging.merging(Chooser(problem, H200), "fwd") is None


def test_it_is_not_measured_for_other_architectures() -> None:
    assert merging.merging(Chooser(SHORT, gpus.named("a100")), "fwd") is None


def test_a_forward_whose_backward_would_put_lse_in_order_has_to_save_that(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = Chooser(SHORT, H200)
    monkeypatch.setattr(merging, "forward_us", lambda one: 10.0 if one is chooser else 10.1 - merging.LSE_US)
    assert merging.merging(chooser, "fwd") is not None
    monkeypatch.setattr(merging, "backward_us", lambda one, deterministic: 20.0 if one is chooser else 25.0)
    assert merging.merging(chooser, "fwd") is None
    in_order = Chooser(replace(SHORT, stacked=HEADS_FIRST), H200)
    monkeypatch.setattr(merging, "forward_us", lambda one: 10.0 if one is in_order else 9.0)
    assert merging.merging(in_order, "fwd") is not None


def test_a_backward_counts_what_it_takes_to_put_lse_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = Chooser(SHORT, H200)
    monkeypatch.setattr(merging, "backward_us", lambda one, deterministic: 20.0 if one is chooser else 17.0)
    assert merging.merging(chooser, BACKWARD, lse=QUERIES_FIRST) is not None
    assert merging.merging(chooser, BACKWARD, lse=HEADS_FIRST) is None


def test_a_deterministic_backward_in_turns_is_not_estimated() -> None:
    problem = Problem("bf16", 4, 32, 4, 2048, 8192, 64, 64, FULL, stacked=HEADS_FIRST)
    assert merging.backward_us(Chooser(problem, H200), True) is None
    assert merging.merging(Chooser(problem, H200), BACKWARD, True) is None


@pytest.mark.parametrize(("queries", "keys", "heads"), [(130, 130, 5), (70, 300, 3), (300, 70, 7), (1, 40, 64)])
def test_estimates_count_what_kernels_visit(queries: int, keys: int, heads: int) -> None:
    """By which rows see which keys."""
    mask, rows = Mask("causal_stacked", heads), queries * heads
    seen = mask.visible(np.arange(rows)[:, None], np.arange(keys)[None], rows, keys)
    assert (
        seen == np.repeat(CAUSAL.visible(np.arange(queries)[:, None], np.arange(keys)[None], queries, keys), heads, 0)
    ).all()
    last = -(-rows // 64)
    firsts = [next((nth for nth in range(last) if seen[nth * 64 : nth * 64 + 64, at : at + 128].any()), last)
              for at in range(0, keys, 128)]  # fmt: skip
    assert fused_schedule._blocks(rows, keys, mask, 64) == tuple(last - first for first in firsts)
    assert fused_schedule.blocks_met(rows, keys, mask, 64, 128) == tuple(last - first for first in firsts)
    tiles = [int(seen[at : at + 192].any(0).sum()) for at in range(0, rows, 192)]
    assert split_backward_schedule.keys_seen(rows, keys, 192, mask) == tuple(reversed(tiles))


def test_what_explain_says() -> None:
    found = serving.explain_problem(CAUSAL_SHORT, H200)
    assert "The 54 query heads of a key head are taken as one of 3564 queries by the forward and the backward" in str(
        found
    )
    assert {one.merged for one in found.kernels} == {54} and {one.mask for one in found.kernels} == {CAUSAL}
    assert all(one["merged"] == 54 for one in found.as_dict()["kernels"])
    assert serving.served_by(CAUSAL_SHORT, H200, False)["fwd"].startswith("warp_specialized")
    apart = serving.explain_problem(replace(CAUSAL_SHORT, stacked=""), H200)
    assert not any(one.merged for one in apart.kernels) and "taken as one" not in str(apart)


merged_heads = script("merged_heads")
#: Timed in both forms: what `merged_heads.py RECORD... --table benchmarks/calls/merged_heads.json.gz` shows.
RECORD = "merged_heads.json.gz"
POSED = merged_heads.posed(merged_heads.read(sorted(CALLS.glob("random_calls*.json.gz"))), H200.arch)


@pytest.mark.parametrize(("pass_", "at_most"), [("fwd", 0.92), (BACKWARD, 0.90)])
def test_timed_calls_that_take_it_gain_as_much_as_the_docs_say(
    pass_: str, at_most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that were timed, by the estimates. The choice leaves at most 2 % to the faster form of each. Tiles of queries
    were not there then."""
    monkeypatch.setattr(query_tiles_schedule, "QUERY_TILES", False)
    chosen, best, left = list[float](), list[float](), list[float]()
    for name, call in merged_heads.calls_of(CALLS / RECORD).items():
        us = call[pass_]["us"]
        if len(us) == 2:
            ratio = math.log(us["fa2tune"] / us["one by one"])
            taken = pass_ in merged_heads.chosen(POSED[name], H200)
            chosen += [ratio] * taken
            best.append(min(ratio, 0.0))
            left.append(ratio if taken else 0.0)
    assert len(chosen) >= 60 and len(best) >= 150
    assert math.exp(statistics.fmean(chosen)) <= at_most
    assert math.exp(statistics.fmean(left) - statistics.fmean(best)) <= 1.02
