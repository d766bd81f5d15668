"""Tiles of packed forwards: what is estimated next to what was recorded, and what is chosen."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
from benchmark_scripts import script

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.calling.schedules import few_tiles, packed_lengths, packed_schedule, tile_order, window_schedule
from fa2tune.compiling import limits
from fa2tune.compiling.choice import Choice
from fa2tune.fleet import precompile
from fa2tune.rows import lookup
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem

H200 = gpus.named("h200")
NODE = lookup.Toolchain(triton="3.6.0")
packed_tiles = script("packed_tiles")
SAMPLES = packed_tiles.samples()
EQUAL = (
    80  #: the number of a call of the fourth drawing: 25 sequences of 603 and 604 tokens, whose K and V fell out of L2
)


def sequences(count: int, heads: tuple[int, int], rows: tuple[int, int], dim: int, mask: Mask, longest: int) -> Problem:
    return Problem("bf16", 1, *heads, *rows, dim, dim, mask, extent=Extent(RAGGED, count, longest))


def forward(problem: Problem) -> Choice:
    return choosing.choose(problem, "fwd", H200, node=NODE)


@pytest.mark.parametrize(("held_out", "windowed", "most"), [
    (False, False, 0.1), (False, True, 0.11), (True, False, 0.09), (True, True, 0.09),
])  # fmt: skip
def test_recorded_forwards_take_what_they_are_estimated_to(held_out: bool, windowed: bool, most: float) -> None:
    """By the lengths that were drawn. Constants were fitted to the records that are not held out."""
    errors = [
        packed_tiles.error(one, True)
        for one in SAMPLES
        if (one.record in packed_tiles.HELD_OUT) == held_out and one.windowed == windowed
        and not (held_out and one.name.startswith(f"{EQUAL} "))
    ]  # fmt: skip
    assert len(errors) > 10 and packed_tiles.rms(errors) < most
    assert abs(sum(errors) / len(errors)) < 0.05


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="chosen among the rows of Triton 3.6")
def test_of_forms_that_were_raced_the_chosen_one_is_near_the_best() -> None:
    losses = packed_tiles.losses()
    for record, most, worst in (("raced", 1.03, 1.07), ("raced 3", 1.03, 1.1), ("raced 4", 1.01, 1.1)):
        own = [loss for race, loss in losses.items() if race.record == record]
        assert len(own) >= {"raced": 3, "raced 3": 11, "raced 4": 41}[record]
        assert sum(own) / len(own) < most and max(own) < worst
    windows = [loss for race, loss in losses.items() if race.packing.mask.window is not None]
    assert len(windows) == 21 and sum(windows) / len(windows) < 1.005 and max(windows) < 1.05


def test_without_a_mask_bounds_of_scores_gain_more() -> None:
    """Call 52 of the third drawing: the row's "never" took 1997 us, 2177 with maxima."""
    whole = sequences(21, (64, 16), (17744, 24522), 128, FULL, 4096)
    assert forward(whole).config["RESCALE"] == "never"
    for mask, share in ((FULL, 0.85), (CAUSAL, 0.93)):
        asked = sequences(4, (8, 8), (9000, 9000), 128, mask, 4096)
        config = {**forward(asked).config, "RESCALE": "lazy"}
        (_, lazy, _), (_, never, _) = (
            few_tiles.paces_us(asked, {**config, "RESCALE": how}) or (0.0, 0.0, 0.0) for how in ("lazy", "never")
        )
        assert never == pytest.approx(share * lazy)
        dense = replace(asked, extent=Extent())
        (_, lazy, _), (_, never, _) = (
            few_tiles.paces_us(dense, {**config, "RESCALE": how}) or (0.0, 0.0, 0.0) for how in ("lazy", "never")
        )
        form = config["BLOCK_M"], config["BLOCK_N"], config["maxnreg"]
        assert never == pytest.approx(0.93 * few_tiles.DENSE_SHARES[form].never[mask != FULL] * lazy)


def test_the_page_has_what_was_measured() -> None:
    """Next to the predictions: the best of the rows' forms, and what was chosen."""
    calls = json.loads((packed_tiles.CALLS / "packed_choices_4.json").read_text("utf-8"))["calls"]
    page = (packed_tiles.CALLS.parents[1] / "docs/experiments/packed-tiles.md").read_text("utf-8")
    lines = page.partition("## Prediction")[2].partition("## Measured")[0].splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if re.match(r"\| \d", line)]
    for call, *cells in table:
        (us,) = (one["us"]["fwd"] for name, one in calls.items() if name.split()[1] == call.split()[0])
        rows = [time for label, time in us.items() if re.fullmatch(r"row( of \d+)?", label)]
        (chosen,) = (time for label, time in us.items() if label.endswith("chosen"))
        assert (cells[3], cells[6]) == (f"{min(rows)}", f"{chosen}"), call
    assert len(table) == 18


@pytest.mark.parametrize("mask", [CAUSAL, FULL, band(7, 0), band(20, 30), band(150, 0)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_visited_blocks_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch, mask: Mask, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [(draw.randrange(1, 300), draw.randrange(1, 300)) for _ in range(6)]
    known = *np.array(lengths).T, np.ones(len(lengths))
    monkeypatch.setattr(packed_lengths, "kinds", lambda _: known)
    problem = sequences(6, (4, 1), (900 + seed, 901), 64, mask, 0)
    rows, columns = draw.choice(((32, 64), (128, 128), (16, 64), (64, 64)))
    found, hidden = [], 0
    for queries, keys in lengths:
        for first in range(0, queries, rows):
            row = torch.arange(first, first + rows)[:, None] + keys - queries
            key, (left, right) = torch.arange(keys), mask.arguments(problem.seqlen_q, problem.seqlen_k)
            seen = (key >= row - left) & (key <= row + right) if mask.window else key <= row
            seen = torch.ones_like(seen) if mask == FULL else seen
            blocks = {int(one) // columns for one in key[seen.any(0)]}
            found.append(max(1, max(blocks, default=0) - min(blocks, default=0) + 1))
            whole = [nth for nth in blocks if (nth + 1) * columns <= keys
                     and bool(seen[:, nth * columns : (nth + 1) * columns].all())]  # fmt: skip
            hidden += found[-1] - len(whole)
    packed_schedule.visited.cache_clear()
    counted = packed_schedule.visited(problem, rows, columns)
    packed_schedule.visited.cache_clear()
    assert counted == (len(found), sum(found), max(found), hidden if window_schedule.is_window(problem) else 0)


@pytest.mark.parametrize("longest", [0, 512, 2048, 16384])
@pytest.mark.parametrize("rows", [(5000, 5000), (700, 5000), (5000, 900)])
def test_lengths_that_stand_for_all_have_as_many_rows(rows: tuple[int, int], longest: int) -> None:
    for count in (1, 2, 7, 200):
        queries, keys, counts = packed_lengths.kinds(sequences(count, (2, 2), rows, 64, CAUSAL, longest))
        assert counts.sum() == pytest.approx(count) and min(counts) > 0
        for side, total in zip((queries, keys), rows, strict=True):
            assert (side * counts).sum() == pytest.approx(total, abs=count) and side.min() >= 0
        if count == 1:
            assert (queries, keys) == rows


def test_the_longest_has_the_middle_of_its_bucket() -> None:
    for count, longest in ((40, 1024), (40, 4096), (200, 2048)):
        queries, _, _ = packed_lengths.kinds(sequences(count, (2, 2), (20000, 20000), 64, CAUSAL, longest))
        assert 0.6 < queries.max() / (longest / math.sqrt(2)) < 1.1


def test_a_sequence_that_has_most_rows_is_apart() -> None:
    """9786 tokens in 15, the longest 9479. No spread of 15 lengths has such a one, and the work grows by its square."""
    asked = sequences(15, (8, 8), (9786, 9786), 96, CAUSAL, 16384)
    queries, _, counts = packed_lengths.kinds(asked)
    assert counts[-1] == 1 and queries[-1] == round(math.sqrt(8193 * 9786)) and max(queries[:-1]) < 700
    drawn = np.array([9479, 22]), np.array([9479, 22]), np.array([1.0, 14.0])
    served = forward(asked).config
    took = packed_schedule.expected_us(asked, served, H200, drawn)
    assert packed_schedule.expected_us(asked, served, H200) == pytest.approx(took, rel=0.15)
    small = packed_schedule.for_few_tiles(asked.specialization, 90)
    assert small is not None and took is not None and served["BLOCK_M"] == 128
    assert packed_schedule.expected_us(asked, small, H200, drawn) > 1.1 * took
    # of fewer rows than half of all, of one sequence, or where nothing is known, lengths are spread
    for count, rows, longest in ((15, 16390, 16384), (1, 9786, 16384), (15, 9786, 0), (15, 400, 512)):
        _, _, counts = packed_lengths.kinds(sequences(count, (8, 8), (rows, rows), 96, CAUSAL, longest))
        assert counts[-1] != 1 or count == 1 or rows == 400


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="chosen among the rows of Triton 3.6")
def test_short_sequences_at_head_dim_64_have_small_tiles_without_a_mask() -> None:
    """Where no row has such tiles: 4545 tokens in 90 took 10.0 us in tiles of 128 rows, torch 8.4."""
    asked = sequences(90, (2, 2), (4545, 4545), 64, FULL, 512)
    choice = forward(asked)
    assert choice.few_tiles and (choice.config["BLOCK_M"], choice.config["BLOCK_N"]) == (64, 64)
    assert choice.otherwise is not None and choice.otherwise["BLOCK_M"] >= 128
    assert forward(sequences(33, (8, 1), (44853, 44853), 64, FULL, 16384)).config["BLOCK_M"] >= 128
    assert packed_schedule.for_few_tiles(replace(asked, mask=CAUSAL).specialization, 90) is None


def test_programs_share_out_tiles() -> None:
    def blocks(tiles: int, each: float, longest: int, held: int) -> float:
        return packed_schedule.shared_out(packed_schedule.Visited(tiles, tiles * each, longest, 0.0), 1, 0.0, 100, held)

    assert blocks(0, 1, 1, 2) == 0
    assert blocks(80, 10, 10, 1) == pytest.approx(10) and blocks(200, 10, 10, 2) == pytest.approx(10)
    alone = 1 / (2 * tile_order.RATES[2][0])
    assert blocks(80, 10, 10, 2) == pytest.approx(10 * alone), "half of the programs have none: it runs alone"
    assert blocks(80, 5, 20, 2) == pytest.approx(20 * alone)
    assert 100 < blocks(10000, 1, 1, 1) < 101
    assert blocks(1000, 1, 500, 1) == pytest.approx(500), "the longest tile"


@pytest.mark.parametrize("dim", [96, 128])
@pytest.mark.parametrize(
    ("problem", "small"),
    [
        (((12), (8, 1), (27464, 29132), band(78, 0), 4096), True),
        (((73), (64, 16), (26863, 26863), band(81, 0), 2048), True),
        (((2), (2, 2), (15056, 15056), band(8, 0), 16384), True),
        (((3), (16, 16), (30000, 30000), band(6000, 0), 16384), False),
    ],
    ids=str,
)
def test_narrow_windows_have_small_tiles(dim: int, problem: tuple[object, ...], small: bool) -> None:
    count, heads, rows, mask, longest = problem
    asked = sequences(count, heads, rows, dim, mask, longest)  # type: ignore[arg-type]
    choice = forward(asked)
    assert (choice.config["BLOCK_M"] == 64) == small == choice.few_tiles
    assert limits.before_compile(choice.variant, asked.specialization, choice.config, H200) is None
    if small:
        assert choice.otherwise is not None and choice.of_row.config["BLOCK_M"] > 64
        listed = [config for _, config, _ in precompile._by_shape("fwd", asked, choice, 90)]
        assert any(config.get("BLOCK_M") == 64 and config.get("maxnreg") == 128 for config in listed)


def test_a_form_has_to_be_worth_its_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    for mask in (CAUSAL, band(100, 0)):
        problem = sequences(4, (16, 16), (16384, 16384), 128, mask, 4096)
        for share, small in ((0.99, True), (1.01, False)):
            times = {64: (1 - packed_schedule.MARGIN) * share, 128: 1.0}
            monkeypatch.setattr(packed_schedule, "expected_us", lambda _, config, gpu, us=times: us[config["BLOCK_M"]])
            assert (forward(problem).config["BLOCK_M"] == 64) == small, (mask, share)


def test_heads_share_a_band_that_l2_holds_where_sequences_are_of_one_length() -> None:
    """15077 tokens are two sequences of 604 and 23 of 603. The kernel counts K and V of the first two and takes all 32 heads a
    band, 227 MB in use."""
    equal = sequences(25, (32, 32), (15077, 15077), 128, CAUSAL, 1024)
    assert forward(equal).config["HEADS_PER_WAVE"] == 4
    for other in (
        sequences(25, (32, 32), (15100, 15100), 128, CAUSAL, 1024),  # 25 of 604: it counts all of them
        sequences(25, (32, 32), (15077, 15077), 128, CAUSAL, 4096),  # the longest is another
        sequences(25, (32, 32), (15077, 15077), 128, CAUSAL, 0),
        sequences(25, (2, 2), (15077, 15077), 128, CAUSAL, 1024),  # L2 holds both heads
        sequences(1, (32, 32), (15077, 15077), 128, CAUSAL, 16384),
        sequences(25, (32, 4), (15077, 15077), 128, CAUSAL, 1024),  # eight heads use what is loaded
    ):
        assert forward(other).config["HEADS_PER_WAVE"] == 0, other


def test_calls_of_next_to_nothing_have_a_choice_too() -> None:
    for rows in ((0, 0), (0, 500), (3, 3)):
        assert forward(sequences(40, (4, 4), rows, 128, CAUSAL, 512)).config["HEADS_PER_WAVE"] == 0
