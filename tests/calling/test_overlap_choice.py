"""Rows that overlap (BESIDE) or kernels started early: the choice next to both as they were timed."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

H200 = gpus.named("h200")
RECORD = Path(__file__).parents[2] / "benchmarks/calls/beside_backwards.json"
ROW, EARLY = "as the row", "alone early"
SHAPE = re.compile(r"(\d+) x (\d+)/(\d+) heads, (\d+) queries, (\d+) keys, head dim (\d+)(?:/(\d+))?, (\w+)")


def posed(call: str) -> Problem:
    found = SHAPE.fullmatch(call)
    assert found is not None, call
    *sizes, dim, dim_v, mask = found.groups()
    return Problem("bf16", *map(int, sizes), int(dim), int(dim_v or dim), CAUSAL if mask == "causal" else FULL)


def test_the_choice_between_both_is_near_the_faster() -> None:
    """Of calls that have one of the two, and no other form."""
    losses = {}
    for name, call in json.loads(RECORD.read_text("utf-8"))["calls"].items():
        choices = choosing.choose_backward(choosing.Chooser(posed(name), H200), False)[1]
        config, row = choices["bwd_fused"].config, choices["bwd_fused"].of_row.config
        same = all(config[key] == row[key] for key in ("BLOCK_M", "ORDER", "num_warps"))
        if same and not config.get("QUERY_PARTS") and (config["BESIDE"] or config["EARLY_START"]):
            us = call["us"]
            losses[name] = us[ROW if config["BESIDE"] else EARLY] / min(us[ROW], us[EARLY])
    assert len(losses) >= 25
    assert math.exp(sum(map(math.log, losses.values())) / len(losses)) < 1.015
    assert sum(loss > 1.03 for loss in losses.values()) <= 4 and max(losses.values()) < 1.12


def test_early_starts_save_what_is_counted() -> None:
    calls = json.loads(RECORD.read_text("utf-8"))["calls"].values()
    saved = sorted(call["us"]["alone late"] - call["us"][EARLY] for call in calls)
    assert saved[0] > 1.4 and 3.0 < saved[len(saved) // 2] < 3.6
