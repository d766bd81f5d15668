"""Which forwards have blocks of 80 keys, next to recorded times."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import pytest
from benchmark_scripts import script
from test_few_tiles_choice import described

from fa2tune import gpus
from fa2tune.calling import forward_plans, serving
from fa2tune.calling.choosing import Chooser
from fa2tune.calling.schedules import in_place_schedule, longer_blocks_schedule
from fa2tune.fleet import precompile
from fa2tune.launching.key_splits import has_longer_blocks, is_in_shares
from fa2tune.search_spaces.sm90 import fwd_80_keys
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import HEADS_FIRST, Config, Problem

ROOT = Path(__file__).parents[2]
H200 = gpus.named("h200")
LONG = Problem("bf16", 7, 2, 2, 5769, 5769, 232, 232, FULL)


@pytest.fixture(autouse=True)
def tested(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever Triton is here."""
    longer_blocks_schedule.config_of.cache_clear()
    monkeypatch.setattr(longer_blocks_schedule, "triton_version", lambda: "3.6.0")
    yield
    longer_blocks_schedule.config_of.cache_clear()


def raced() -> Iterator[tuple[Problem, float, float]]:
    """(call, microseconds by the best form in blocks of 64 keys, in blocks of 80), of the calls that were raced."""
    label = script("few_queries").label(fwd_80_keys.config_of(LONG.specialization))
    record = json.loads(gzip.decompress((ROOT / "benchmarks/calls/dense_forwards_80.json.gz").read_bytes()))
    for call in record["calls"].values():
        usual = [us for name, us in call["us"].items() if name.startswith("128 64 1 ")]
        if label in call["us"] and usual:
            yield described(call["call"]), min(usual), call["us"][label]


def instead_of(problem: Problem) -> Config | None:
    choice = Chooser(problem, H200).choose("fwd")
    return in_place_schedule.instead_of(problem, choice.config, H200, choice.row)


def runs(problem: Problem) -> bool:
    """Whether it is what serves."""
    return has_longer_blocks(instead_of(problem) or {})


def chosen(problem: Problem) -> bool:
    return longer_blocks_schedule.config_of(problem, H200) is not None


def test_the_calls_that_take_them_gained() -> None:
    """Of 60 calls without a mask."""
    found = list(raced())
    taken = [ours / usual for problem, usual, ours in found if chosen(problem)]
    others = [ours / usual for problem, usual, ours in found if not chosen(problem)]
    assert len(found) == 60 and len(taken) == 21
    assert geometric_mean(taken) < 0.975 and sum(one > 1.01 for one in taken) <= 2 and max(taken) < 1.05
    assert geometric_mean(others) > 1.0
    served = [ours / usual for problem, usual, ours in found if runs(problem)]
    assert len(served) == 13 and geometric_mean(served) < 0.975 and max(served) < 1.03


def test_keys_that_are_one_block_take_it_where_tiles_are_few() -> None:
    record = json.loads(gzip.decompress((ROOT / "benchmarks/calls/forward_one_block.json.gz").read_bytes()))
    gained, lost = {}, []
    for call in record["calls"].values():
        asked, us = described(call["call"]), call["us"]
        usual = min(time for name, time in us.items() if name.startswith("128 64 1 "))
        if config := longer_blocks_schedule.config_of(asked, H200):
            assert config["PINGPONG"] and runs(asked)
            gained[asked.batch, asked.seqlen_k] = us["80 keys in turn"] / usual
        else:
            lost.append(us["80 keys in turn"] / usual)
    assert set(gained) == {(59, 66), (20, 80)} and max(gained.values()) < 0.91
    assert len(lost) == 6 and min(lost) > 1.0


def test_keys_in_parts_come_first() -> None:
    """Of few tiles they were 1.3 to 7.7 times as fast."""
    others = [problem for problem, _, _ in raced() if chosen(problem) and not runs(problem)]
    assert sum(problem.query_tiles(128) * problem.heads_q <= H200.sm_count for problem in others) == 6


def test_equal_shares_come_first() -> None:
    """Of calls that leave multiprocessors idle."""
    assert sum(chosen(problem) and is_in_shares(instead_of(problem) or {}) for problem, _, _ in raced()) == 4


def test_query_heads_taken_as_one_are_no_group() -> None:
    """They lie so in (batch, heads, seqlen, dim)."""
    grouped = replace(LONG, batch=2, heads_q=25, heads_kv=5, seqlen_q=3000, seqlen_k=3000, stacked=HEADS_FIRST)
    (kernel,) = serving.explain_problem(grouped, H200, ("fwd",)).kernels
    assert not chosen(grouped) and kernel.merged == 5 and kernel.longer_blocks


def test_the_share_is_what_was_recorded() -> None:
    config = fwd_80_keys.config_of(LONG.specialization)
    off = [
        longer_blocks_schedule.share(problem, config, H200) / (ours / usual)
        for problem, usual, ours in raced()
        if chosen(problem)
    ]
    assert 0.98 < geometric_mean(off) < 1.02 and max(off) < 1.1 and min(off) > 0.93


@pytest.mark.parametrize(
    "other",
    [
        replace(LONG, mask=CAUSAL), replace(LONG, head_dim=256, head_dim_v=256), replace(LONG, head_dim=192, head_dim_v=192),
        replace(LONG, heads_q=8), replace(LONG, seqlen_k=1800), replace(LONG, tma=False), replace(LONG, dtype="fp32"),
        replace(LONG, batch=0),
    ],
    ids=str,
)  # fmt: skip
def test_others_keep_the_usual_blocks(other: Problem) -> None:
    assert chosen(LONG) and not chosen(other)


@pytest.mark.parametrize(("version", "serves"), [("3.6.1", True), ("", True), ("3.7.0", False), ("3.9.0", False)])
def test_tritons_that_do_not_compile_it_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, version: str, serves: bool
) -> None:
    """Where there is none, files of binaries may have it."""
    monkeypatch.setattr(longer_blocks_schedule, "triton_version", lambda: version)
    assert chosen(LONG) == serves


def test_it_serves_and_says_so() -> None:
    choice = Chooser(LONG, H200).choose("fwd")
    config = in_place_schedule.instead_of(LONG, choice.config, H200, choice.row)
    assert config is not None and has_longer_blocks(config)
    assert forward_plans.how(config) == forward_plans.LONGER_BLOCKS
    served = in_place_schedule.served_us(LONG, choice.config, H200, choice.row, config)
    plain = in_place_schedule.served_us(LONG, choice.config, H200, choice.row, None)
    assert served == pytest.approx(plain * longer_blocks_schedule.share(LONG, config, H200))
    found = serving.explain_problem(LONG, H200, ("fwd",))
    (kernel,) = found.kernels
    assert list(kernel.runs or {}) == ["sm90/fwd_80_keys"] and kernel.longer_blocks and not kernel.grouped
    assert "in blocks of 80 keys, which is expected to be faster" in str(found)
    (said,) = found.as_dict()["kernels"]
    assert said["longer_blocks"] == config and said["split"] is said["grouped"] is said["one_tile"] is None


@pytest.mark.parametrize(
    ("problem", "there"), [(LONG, True), (replace(LONG, mask=CAUSAL), False)], ids=["full", "causal"]
)
def test_it_is_compiled_ahead(problem: Problem, there: bool) -> None:
    choice = Chooser(problem, H200).choose("fwd")
    names = {variant.short_name for variant, _, _ in precompile._by_shape("fwd", problem, choice.of_row, 90)}
    assert ("sm90/fwd_80_keys" in names) == there
