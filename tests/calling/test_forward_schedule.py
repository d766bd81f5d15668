"""The schedule model: it counts what the kernel's tile order gives each multiprocessor, and its choice is near the best."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import pytest

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.calling.schedules import forward_schedule
from fa2tune.rows import lookup, reader
from fa2tune.rows.row import Row
from fa2tune.search_spaces.sm90.fwd import SPACE
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem

ROOT = Path(__file__).parents[2]
RECORDED, HELD_OUT = (
    ROOT / "benchmarks" / "calls" / f"launch_choices_fwd{which}.json.gz" for which in ("", "_held_out")
)
H200, NODE = gpus.named("h200"), lookup.Toolchain(triton="3.6.0")
CONFIG = {"BLOCK_M": 128, "BLOCK_N": 128, "maxnreg": 0, "HEADS_PER_WAVE": 4, "RESCALE": "lazy", "Q_STAGES": 1}


@cache
def shipped() -> list[Row]:
    """Measured rows of the warp-specialised forward, bf16, as shipped for the H200."""
    layer = next(layer for layer in reader.layers() if layer.path.name == "h200.sqlite")
    return [row for row in layer.rows if row.warp_specialized and (row.key.kernel, row.key.dtype) == ("fwd", "bf16")]


@cache
def rows(head_dim: int, mask: str) -> list[Row]:
    return [row for row in shipped() if (row.key.head_dim, row.key.mask) == (head_dim, mask)]


def problem(shape: dict[str, Any]) -> Problem:
    sizes = {name: value for name, value in shape.items() if name != "causal"}
    return Problem("bf16", head_dim_v=shape["head_dim"], mask=CAUSAL if shape["causal"] else FULL, **sizes)


def chosen(shape: dict[str, Any]) -> tuple[Row, Any]:
    asked, known = problem(shape), rows(shape["head_dim"], problem(shape).mask.name)
    served = next(row for row in known if row.key.bucket == asked.bucket)
    return forward_schedule.best(asked, served, [row for row in known if row is not served], 132)


def played(heads: int, length: int, rows: int, columns: int, band: int, programs: int) -> float:
    """Blocks of the busiest program, one tile after the other as ``tile_of`` in kernels/lib/hopper_forward.py takes them."""
    tiles, work = math.ceil(length / rows), [0.0] * programs
    for index in range(tiles * heads):
        turn, place = divmod(index, programs)
        program = place if turn % 2 == 0 else programs - 1 - place
        nth = index // (tiles * band)
        width = min(heads - nth * band, band)
        tile = (index - nth * tiles * band) // width
        if (math.ceil(heads / band) - nth) % 2 == 1:
            tile = tiles - 1 - tile
        work[program] += math.ceil(min((tile + 1) * rows, length) / columns) + forward_schedule.START[1]
    return max(work)


@pytest.mark.parametrize(("heads", "length", "order"), [(84, 4097, 4), (84, 4096, 4), (7, 1000, 22), (40, 3000, 1)])
def test_the_busiest_program_is_that_of_the_kernels_order(heads, length, order):
    asked = Problem("bf16", 1, heads, heads, length, length, 128, 128, CAUSAL)
    found = forward_schedule._busiest(asked, {**CONFIG, "HEADS_PER_WAVE": order}, 132)
    assert found == pytest.approx(played(heads, length, 128, 128, min(order, heads), 132))


@pytest.mark.parametrize(("heads", "length", "batch"), [(28, 4097, 3), (12, 1000, 1), (40, 700, 3), (16, 4096, 4)])
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_causal_by_another_name_has_the_same_tiles(heads: int, length: int, batch: int, dim: int) -> None:
    """Of equal lengths queries see the same keys, aligned at either end. What else a config says may be for causal alone."""
    found = []
    for mask in (CAUSAL, Mask("causal_top_left")):
        asked = Problem("bf16", batch, heads, heads, length, length, dim, dim, mask)
        choice = choosing.choose(asked, "fwd", H200, node=NODE)
        found.append([choice.config[name] for name in ("BLOCK_M", "BLOCK_N", "HEADS_PER_WAVE")])
        assert choice.row is not None
        assert forward_schedule.expected_us(asked, choice.row, choice.config, 132) is not None
    assert found[0] == found[1]


@pytest.mark.parametrize("mask", [Mask("causal_top_left"), Mask("chunked", 300), band(500, 0)], ids=str)
def test_the_busiest_program_is_that_of_the_masks_tiles(mask: Mask) -> None:
    heads, seqlen_q, seqlen_k = 30, 1500, 2100
    asked = Problem("bf16", 1, heads, heads, seqlen_q, seqlen_k, 128, 128, mask)
    found = forward_schedule._busiest(asked, {**CONFIG, "HEADS_PER_WAVE": 4}, 132)
    i, j = np.arange(12 * 128)[:, None], np.arange(17 * 128)
    seen = np.broadcast_to(mask.visible(i, j, seqlen_q, seqlen_k), (len(i), len(j))) & (j < seqlen_k)
    blocks = np.maximum(1, seen.reshape(12, 128, 17, 128).any((1, 3)).sum(1)) + forward_schedule.START[1]
    if mask.name == "causal_top_left":  # bands of four heads, in the last one and every second the longest tiles first
        order = [tile for nth in range(8)
                 for tile in np.repeat(blocks[::-1] if (8 - nth) % 2 else blocks, 4 if nth < 7 else 2)]  # fmt: skip
    else:
        order = [*blocks] * heads
    work = [0.0] * 132
    for index, tile in enumerate(order):
        turn, place = divmod(index, 132)
        work[place if turn % 2 == 0 else 131 - place] += tile
    assert found == pytest.approx(max(work))


def test_programs_that_share_a_multiprocessor_count_alike_under_both_masks():
    """One tile of 64 rows a head, 1024 keys: a causal mask that hides nothing changes nothing."""
    for heads, maxnreg in ((132, 128), (264, 80), (265, 128), (20, 80)):
        config = {**CONFIG, "BLOCK_M": 64, "maxnreg": maxnreg, "HEADS_PER_WAVE": 1}
        full, causal = (
            forward_schedule._busiest(Problem("bf16", 1, heads, heads, 1, 1024, 64, 64, mask), config, 132)
            for mask in (FULL, CAUSAL)
        )
        assert full == causal


def test_a_length_behind_a_bucket_border_keeps_its_balance():
    """84 heads of 128, causal: 4097 falls into the bucket of 8192, whose row has bands of four heads."""
    shape = {
        "batch": 3,
        "heads_q": 28,
        "heads_kv": 4,
        "seqlen_k": 4097,
        "seqlen_q": 4097,
        "head_dim": 128,
        "causal": True,
    }
    asked = problem(shape)
    pinned = next(row for row in rows(128, "causal") if row.key.bucket == 8192)
    _, config = chosen(shape)
    tiles = 33 * 84 * (33 / 2 + 1) / 132  # mean blocks of a multiprocessor, about
    assert forward_schedule._busiest(asked, pinned.config, 132) > 1.7 * tiles
    assert forward_schedule._busiest(asked, config, 132) < 1.15 * tiles * (128 / config["BLOCK_N"])


def test_the_tuned_workload_keeps_its_row():
    for row in [*rows(64, "causal"), *rows(128, "causal"), *rows(256, "full")]:
        tuned = row.key.workload()
        others = [other for other in rows(row.key.head_dim, row.key.mask) if other is not row]
        assert forward_schedule.best(tuned, row, others, 132) == (row, row.config)


def test_a_row_without_a_time_stays():
    untimed = replace(rows(128, "causal")[0], time_us=None)
    shape = {
        "batch": 3,
        "heads_q": 28,
        "heads_kv": 4,
        "seqlen_k": 4097,
        "seqlen_q": 4097,
        "head_dim": 128,
        "causal": True,
    }
    assert forward_schedule.best(problem(shape), untimed, rows(128, "causal"), 132)[0] is untimed


def among_rows(shape):
    """The config chosen among those of rows, without those for calls of few tiles, which these races did not have."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forward_schedule.few_tiles, "covers", lambda *asked: False)
        return chosen(shape)[1]


@cache
def losses(path):
    """(of the config chosen when it was recorded, of the one chosen now), over the best candidate, for 64 random calls. Every
    shipped config in five tile orders was raced on an H200 by benchmarks/launch_choices.py."""
    with gzip.open(path) as file:
        cases = json.load(file)["cases"]
    assert len(cases) == 64
    pinned, scheduled = [], []
    for case in cases:
        config = among_rows(case["shape"])
        raced = {json.dumps(each["configs"]["fwd"], sort_keys=True): each["us"] for each in case["candidates"]}
        raced[json.dumps(case["chosen"]["fwd"], sort_keys=True)] = case["chosen_us"]
        best = min(raced.values())
        pinned.append(case["chosen_us"] / best)
        scheduled.append(raced.get(json.dumps(dict(config), sort_keys=True), case["chosen_us"]) / best)
    return pinned, scheduled


def test_choices_on_calls_that_no_row_was_tuned_on_are_near_the_best():
    pinned, scheduled = losses(RECORDED)
    assert geometric_mean(pinned) > 1.05  # what the ladder alone loses
    assert geometric_mean(scheduled) < 1.012
    assert max(scheduled) < 1.07
    assert sum(lost <= 1.03 for lost in scheduled) >= 59
    _, others = losses(HELD_OUT)
    assert geometric_mean(others) < 1.01 and max(others) < 1.05
    assert sum(lost <= 1.03 for lost in others) >= 61


def test_of_equal_predictions_order_0_is_taken_and_a_clear_lead_wins():
    served, *others = rows(128, "causal")
    order = {name: {**served.config, "HEADS_PER_WAVE": heads} for name, heads in (("waves", 22), ("one by one", 0))}
    near = [(100.0, served, order["waves"]), (100.9, served, order["one by one"]), (100.8, others[0], order["waves"])]
    assert forward_schedule._fastest(near) == near[1]
    assert forward_schedule._fastest([(99.0, served, order["waves"]), *near[1:]])[0] == 99.0


def test_the_page_states_the_recorded_losses():
    page = (ROOT / "docs/experiments/schedule.md").read_text()
    (pinned, scheduled), (_, fresh) = losses(RECORDED), losses(HELD_OUT)
    assert f"| {geometric_mean(pinned):.3f} | {geometric_mean(scheduled):.3f} | {max(pinned):.2f} |" in page
    assert f"| not run | {geometric_mean(fresh):.3f} | not run | {max(fresh):.2f} |" in page


def test_a_row_of_128_serves_96_in_parts_and_a_row_of_96_as_it_was_tuned(monkeypatch):
    """Tiles of fewer columns leave room for a third stage and a second Q. What was tuned at 96 itself is not changed."""
    monkeypatch.setattr(forward_schedule.few_tiles, "covers", lambda *asked: False)
    tuned = next(row for row in rows(128, "causal") if row.key.bucket == 4096)
    assert "IN_PARTS" not in tuned.config and (tuned.config["STAGES"], tuned.config["Q_STAGES"]) == (2, 1)
    own = replace(tuned, key=tuned.key.with_(head_dim=96, head_dim_v=96))
    everything = lookup.Toolchain("", "", {})
    in_parts = {"IN_PARTS": "both", "STAGES": 3, "Q_STAGES": 2}
    for row, config in ((tuned, in_parts), (own, {"IN_PARTS": "none"})):
        layer = reader.Layer("named", Path("a.sqlite"), (row,))
        for dim in (96, 88):
            asked = Problem("bf16", 4, 16, 16, 4096, 4096, dim, dim, CAUSAL)
            found = choosing.choose(asked, "fwd", gpus.named("h200"), None, [layer], everything)
            changed = {"HEADS_PER_WAVE": found.config["HEADS_PER_WAVE"]}
            assert found.config == SPACE.completed({**tuned.config, **changed, **config})


def test_a_window_takes_the_row_whose_queries_saw_as_many_keys() -> None:
    known = {row.key.bucket: row for row in rows(128, "causal")}
    for length in (2048, 16384, 40000):
        served = known[min(length, 16384)]
        others = [row for row in known.values() if row is not served]
        for keys, bucket in ((1, 512), (255, 512), (1023, 2048), (2047, 4096), (8000, 16384)):
            if 2 * keys < length:
                asked = Problem("bf16", 1, 16, 16, length, length, 128, 128, Mask("band", keys, 0))
                assert forward_schedule.of_like_work(asked, served, others) is known[bucket], (length, keys)
