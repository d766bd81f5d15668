"""The forward's config for windows: visited key blocks are those of the kernel's hooks, predictions are near what was measured,
and nothing else is chosen otherwise."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_forward_schedule import rows

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.calling.choosing import Chooser
from fa2tune.calling.schedules import window_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.rows import lookup
from fa2tune.search_spaces.sm90.fwd import suited
from fa2tune.spec import standins
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem

H200 = gpus.named("h200")
NODE = lookup.Toolchain(triton="3.6.0")
RECORD = Path(__file__).parents[2] / "benchmarks" / "calls" / "windows.json"


def windowed(heads: int, length: int, dim: int, left: int, right: int = 0, batch: int = 1) -> Problem:
    return Problem("bf16", batch, heads, heads, length, length, dim, dim, band(left, right).fitted(length, length))


def chosen(problem: Problem) -> Choice:
    return choosing.choose(problem, "fwd", H200, node=NODE)


def form(problem: Problem) -> tuple[int, ...]:
    return window_schedule.form(chosen(problem).config)


def hook(name: str) -> Any:
    """A device function of kernels/masks/band.py as plain Python."""
    arithmetic = SimpleNamespace(maximum=np.maximum, minimum=np.minimum, cdiv=lambda x, y: -(-x // y))
    return FunctionType(standins.run("masks.band")[name].fn.__code__, {"gl": arithmetic}, name)


@pytest.mark.parametrize("mask", [band(127, 0), band(5, 9), band(0, 0), band(300, 40)], ids=str)
def test_visited_blocks_are_those_of_the_kernel(mask: Mask) -> None:
    below, first = hook("blocks_below"), hook("first_block")
    for seqlen_q, seqlen_k, (tall, wide) in itertools.product(
        (1, 70, 513), (64, 130, 700), ((64, 64), (128, 128), (192, 128))
    ):
        window = mask.arguments(seqlen_q, seqlen_k)
        counts = [
            max(0, int(below(start + tall, seqlen_q, seqlen_k, window, wide))
                - int(first(start, seqlen_q, seqlen_k, window, wide)))
            for start in range(0, seqlen_q, tall)
        ]  # fmt: skip
        found = window_schedule.visited(mask, seqlen_q, seqlen_k, tall, wide)
        assert found == pytest.approx(sum(counts) / len(counts))


def test_predictions_are_near_what_was_measured() -> None:
    """Of the Hopper forward, by the row whose config was timed; where the record names none that of the call's own length."""
    compared = 0
    for entry in json.loads(RECORD.read_text("utf-8"))["entries"]:
        if (entry["pass"], entry["name"]) == ("forward", "hopper"):
            batch, heads, _, length, dim, keys = map(int, re.findall(r"\d+", entry["shape"]))
            asked = windowed(heads, length, dim, keys - 1, batch=batch)
            timed = entry.get("configs", {}).get("fwd")
            known = {row.key.bucket: row for row in rows(dim, "causal")}
            served = next((row for row in known.values() if suited(asked, row.config) == timed), known[asked.bucket])
            predicted = window_schedule.predicted_us(asked, served, 132)
            assert predicted == pytest.approx(1e3 * entry["window_ms"], rel=0.1), entry["shape"]
            compared += 1
    assert compared >= 3


def test_the_choice_is_the_fastest_form_that_was_raced() -> None:
    raced: dict[str, list[dict[str, Any]]] = {}
    for entry in json.loads(RECORD.with_name("windows_race.json").read_text("utf-8"))["entries"]:
        raced.setdefault(entry["shape"], []).append(entry)
    assert len(raced) == 2
    for shape, entries in raced.items():
        batch, heads, heads_kv, length, dim, keys = map(int, re.findall(r"\d+", shape))
        found = chosen(replace(windowed(heads, length, dim, keys - 1, batch=batch), heads_kv=heads_kv))
        (us,) = (entry["us"] for entry in entries if tuple(entry["form"]) == window_schedule.form(found.config))
        assert us == min(entry["us"] for entry in entries)


def test_a_narrow_window_of_head_dim_64_takes_small_tiles() -> None:
    asked = replace(windowed(64, 16384, 64, 127), heads_kv=8)
    found = chosen(asked)
    assert window_schedule.form(found.config) == (64, 64, 1, 80)
    assert found.config["HEADS_PER_WAVE"] == 0 and found.config["RESCALE"] == "lazy"
    assert found.row is not None and found.row.key.bucket < 16384 and not found.few_tiles
    assert form(windowed(64, 16384, 64, 127, 127)) == (128, 128, 2, 0)  # rows without a mask have no tiles of 64 rows
    assert form(windowed(16, 16384, 64, 4095)) == (192, 128, 1, 0)


@pytest.mark.parametrize(("heads", "length", "dim", "left"), [
    (64, 8192, 128, 1023), (32, 32768, 128, 4095), (16, 16384, 128, 132), (16, 8192, 256, 4095), (16, 16384, 256, 127),
    (16, 16384, 64, 4095), (1, 1024, 64, 127),
])  # fmt: skip
def test_what_was_measured_to_be_fast_or_has_few_tiles_stays(heads: int, length: int, dim: int, left: int) -> None:
    asked = windowed(heads, length, dim, left)
    answer, _ = Chooser(asked, H200, node=NODE).find("fwd")
    assert answer is not None and chosen(asked).row is answer.row


def test_only_masks_bounded_on_both_sides_are_chosen_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(window_schedule, "best", never)
    chunked = Problem("bf16", 1, 64, 64, 16384, 16384, 64, 64, Mask("chunked", 128))
    for asked in (windowed(64, 16384, 64, 127), chunked):
        with pytest.raises(AssertionError, match="asked"):
            form(asked)
    for mask in (FULL, CAUSAL, Mask("causal_top_left"), band(None, 5), band(5, None)):
        assert not window_schedule.covers(Problem("bf16", 1, 16, 16, 4096, 4096, 64, 64, mask))
        form(Problem("bf16", 1, 16, 16, 4096, 4096, 64, 64, mask))


def test_rows_without_a_time_are_not_compared() -> None:
    asked, (served, *others) = windowed(64, 16384, 64, 127), sorted(rows(64, "causal"), key=lambda row: -row.key.bucket)
    untimed = [replace(row, time_us=None) for row in others]
    assert window_schedule.best(asked, served, untimed, 132)[0] is served
    assert window_schedule.best(asked, replace(served, time_us=None), others, 132)[0].config == served.config
    assert window_schedule.best(asked, served, others, 132)[0].config["BLOCK_M"] == 64
