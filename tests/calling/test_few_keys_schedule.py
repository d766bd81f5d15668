"""Which forwards have tiles with all keys, estimates beside the record, and what explain says of them."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import script

from fa2tune import gpus
from fa2tune.calling import choosing, forward_plans, serving
from fa2tune.calling.kinds import WARP_SPECIALIZED_ROWS
from fa2tune.calling.schedules import few_keys_schedule, in_place_schedule, multistage_schedule
from fa2tune.fleet import precompile
from fa2tune.launching import key_splits
from fa2tune.search_spaces.sm90 import fwd_one_tile
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import FULL, Mask
from fa2tune.spec.problem import Problem
from fa2tune.spec.score import score_of

ROOT = Path(__file__).parents[2]
H200 = gpus.named("h200")
#: The calls by which the constants were fitted, and calls timed after that.
FITTED, HELD_OUT = (
    json.loads((ROOT / f"benchmarks/calls/{name}.json").read_text())["calls"]
    for name in ("one_tile_forwards", "one_tile_forwards_2")
)
RECORD = {**HELD_OUT, **FITTED}
races = script("one_tile_forwards")
SHORT = Problem("bf16", 1, 14, 14, 212, 212, 192, 192, FULL)


@pytest.fixture(autouse=True)
def before_multistage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to what there was when the calls were raced."""
    monkeypatch.setattr(multistage_schedule, "MARGIN", 1.0)


@pytest.fixture(scope="module")
def drawn() -> dict[str, Problem]:
    """The calls of the records, by name."""
    records = sorted((ROOT / "benchmarks/calls").glob("random_calls*.json.gz"))
    return {name: problem for name, (problem, _) in races.calls_of(records, H200).items() if name in RECORD}


@pytest.mark.parametrize(("record", "most"), [(FITTED, 0.3), (HELD_OUT, 0.42)], ids=["fitted", "held out"])
def test_estimates_are_near_the_record(record: dict[str, Any], most: float, drawn: dict[str, Problem]) -> None:
    errors = [
        math.log(few_keys_schedule.one_tile_us(drawn[name], config, H200) / call["us"][races.name_of(config)])
        for name, call in record.items()
        for config in few_keys_schedule.candidates(drawn[name], 90)
    ]
    assert len(errors) > 180 and statistics.pstdev(errors) < 0.09 and max(map(abs, errors)) < most


@pytest.mark.parametrize(
    ("record", "taken", "share", "lose"), [(FITTED, 40, 0.87, 6), (HELD_OUT, 65, 0.83, 2)], ids=["fitted", "held out"]
)
def test_calls_that_take_it_gain(
    record: dict[str, Any], taken: int, share: float, lose: int, drawn: dict[str, Problem]
) -> None:
    """In the geometric mean; of those that lose, none loses more than 15 %."""
    gains = []
    for name, call in record.items():
        if (config := races.chosen(drawn[name], H200)) is not None:
            gains.append(call["us"][races.name_of(config)] / call["us"][races.SERVED])
    assert len(gains) >= taken and statistics.geometric_mean(gains) < share
    assert max(gains) < 1.15 and sum(gain > 1.02 for gain in gains) <= lose


@pytest.mark.parametrize(
    "other",
    [
        {"seqlen_k": 257}, {"seqlen_k": 63}, {"seqlen_q": 63}, {"batch": 400}, {"extent": Extent(RAGGED, 4)},
        {"mask": Mask("band", 30, 30)}, {"mask": Mask("causal_top_left")}, {"seqlen_q": 0}, {"dtype": "fp32"},
        {"aligned": False}, {"score": score_of(50.0)},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_other_calls_do_not_take_it(other: dict[str, Any]) -> None:
    """Fewer queries, fewer or more keys or more tiles than were timed, packed sequences, other masks and score terms, nothing
    to do, and what the kernel does not compute."""
    assert (
        few_keys_schedule.best(SHORT, H200) is not None
        and few_keys_schedule.best(replace(SHORT, **other), H200) is None
    )


def test_it_must_be_faster_by_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    found = few_keys_schedule.best(SHORT, H200)
    assert found is not None
    least = found[0] / (1 - few_keys_schedule.MARGIN)
    for share, taken in ((1.001, found[1]), (0.999, None)):
        monkeypatch.setattr(in_place_schedule, "served_us", lambda *_, share=share: share * least)
        assert races.chosen(SHORT, H200) == taken


def test_products_are_slower_on_a_gpu_that_multiplies_less() -> None:
    config = fwd_one_tile.config_of(SHORT.specialization, 64, 256)
    times = [few_keys_schedule.one_tile_us(SHORT, config, gpus.named(name)) for name in ("h200", "h20")]
    assert times[0] < times[1]


def test_more_programs_and_rows_inside_sectors_take_longer() -> None:
    config = fwd_one_tile.config_of(SHORT.specialization, 64, 256)
    times = [few_keys_schedule.one_tile_us(replace(SHORT, batch=batch), config, H200) for batch in (1, 2, 3, 8)]
    assert times == sorted(set(times))
    odd = replace(SHORT, head_dim=184, head_dim_v=184)
    assert few_keys_schedule.one_tile_us(odd, config, H200) > times[0]


def test_explain_names_the_kernel_and_its_status() -> None:
    found = serving.explain_problem(SHORT, H200, ("fwd",))
    served, said = found.kernels[0], found.as_dict()["kernels"][0]
    assert served.all_keys and not served.grouped and served.status == "estimated"
    assert set(served.binaries or {}) == {"sm90/fwd_one_tile"}
    assert "so sm90/fwd_one_tile runs instead" in str(found) and "tiles of 64 queries have all keys" in str(found)
    assert "all keys in one tile" in str(served)
    assert said["split"] is None and said["grouped"] is None and said["one_tile"] == said["config"]
    assert serving.served_by(SHORT, H200, backward=False) == {"fwd": "sm90/fwd_one_tile"}


def test_what_was_refused_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choosing.choose(SHORT, "fwd", H200)
    tiles, refused = forward_plans.split_of(SHORT, choice, H200)
    assert tiles is not None and refused == "" and forward_plans.how(tiles) == forward_plans.ONE_TILE
    monkeypatch.setitem(forward_plans._REFUSED, forward_plans._binary(SHORT, tiles, H200), "ptxas failed")
    served = serving.explain_problem(SHORT, H200, ("fwd",))
    assert served.kernels[0].split is None
    assert "tiles with all keys of a key head are expected to be faster, but ptxas failed" in str(served)


def test_a_tile_of_too_few_keys_is_an_error() -> None:
    q, k, v = (torch.empty(1, 14, 212, 192, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(ValueError, match="KEYS 128 for 212 keys"):
        key_splits.forward(q, k, v, SHORT, 1.0, fwd_one_tile.config_of(SHORT.specialization, 64, 128))


def test_precompile_has_every_tile() -> None:
    found = few_keys_schedule.all_kernels(SHORT, 90)
    assert [(config["BLOCK_M"], config["KEYS"]) for _, config, _ in found] == [
        *fwd_one_tile.tiles(SHORT.specialization, 90)
    ]
    assert not few_keys_schedule.all_kernels(replace(SHORT, mask=Mask("band", 30, 30)), 90), "which no such call takes"
    choice = choosing.choose(SHORT, "fwd", H200, WARP_SPECIALIZED_ROWS)
    assert "sm90/fwd_one_tile" in {one.name for one, _, _ in precompile._by_shape("fwd", SHORT, choice, 90)}


@pytest.mark.parametrize(("dims", "sizes"), [((64, 64), 6), ((192, 192), 5), ((256, 256), 4), ((24, 24), 6)], ids=str)
def test_tiles_are_those_that_fit(dims: tuple[int, int], sizes: int) -> None:
    spec = replace(SHORT, head_dim=dims[0], head_dim_v=dims[1]).specialization
    tiles = fwd_one_tile.tiles(spec, 90)
    assert len(tiles) == sizes and fwd_one_tile.tiles(spec, 80) == ()
    assert all(fwd_one_tile.held(spec, *size) >= 1 for size in tiles)
    assert fwd_one_tile.held(spec, 64, 64) >= fwd_one_tile.held(spec, 128, 128)
