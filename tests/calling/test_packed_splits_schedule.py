"""Which packed calls have their keys split, and what that is estimated to take."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa2tune import gpus
from fa2tune.calling import choosing, forward_plans, serving
from fa2tune.calling.kinds import WARP_SPECIALIZED_ROWS
from fa2tune.calling.schedules import key_splits_schedule, packed_lengths, packed_schedule, packed_splits_schedule
from fa2tune.compiling import limits
from fa2tune.fleet import precompile
from fa2tune.launching import key_splits
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, Mask
from fa2tune.spec.problem import Config, Problem, bucket_of
from fa2tune.spec.score import score_of

H200 = gpus.named("h200")
RECORD = Path(__file__).parents[2] / "benchmarks/calls/random_packings_6.json"


def drawn() -> dict[int, tuple[Problem, dict[str, Any]]]:
    """Causal calls of the record, by their numbers."""
    found = {}
    for name, call in json.loads(RECORD.read_text("utf-8"))["calls"].items():
        if call["mask"] == "causal":
            extent = Extent(RAGGED, len(call["of_q"]), bucket_of(max(call["of_q"]), max(call["of_k"])))
            sizes = (call["heads_q"], call["heads_kv"], sum(call["of_q"]), sum(call["of_k"]), *[call["head_dim"]] * 2)
            found[int(name.split()[0])] = Problem("bf16", 1, *sizes, CAUSAL, extent=extent), call
    return found


DRAWN = drawn()
LONG = DRAWN[45][0]  # 3762 tokens in 9, the longest 3309, one head of 64


def chosen(problem: Problem) -> Config | None:
    choice = choosing.choose(problem, "fwd", H200, WARP_SPECIALIZED_ROWS)
    found, refused = forward_plans.split_of(problem, choice, H200)
    assert refused == ""
    return None if found is None or key_splits.is_grouped(found) else found


def test_which_drawn_calls_take_them() -> None:
    taken = {number: config for number, (problem, _) in DRAWN.items() if (config := chosen(problem))}
    assert set(taken) == {37, 45, 53, 85}
    for number, config in taken.items():
        variant, spec = key_splits.splitting(config), DRAWN[number][0].specialization
        assert config["SPLITS"] in packed_splits_schedule.PARTS
        assert limits.before_compile(variant, spec, config, H200) is None


@pytest.mark.parametrize("number", [37, 45, 53, 85, 35, 44])
def test_what_serves_otherwise_is_estimated_near_its_time(number: int) -> None:
    """By one long sequence among others that are alike; by lengths as they are mostly spread 45 and 85 have half of it."""
    problem, call = DRAWN[number]
    choice, known = (
        choosing.choose(problem, "fwd", H200, WARP_SPECIALIZED_ROWS),
        packed_splits_schedule.longest(problem),
    )
    assert known is not None
    us = packed_schedule.expected_us(problem, choice.config, H200, packed_lengths.one_long(problem, known[0]))
    assert us is not None and 0.75 < us / call["fwd"]["us"]["fa2tune"] < 1.4


def test_one_long_sequence_and_others_that_are_alike() -> None:
    queries, keys, counts = packed_lengths.one_long(LONG, 3000)
    assert queries.tolist() == keys.tolist() == [3000, 95] and counts.tolist() == [1, 8]
    assert packed_lengths.one_long(LONG, 9000)[0].tolist() == [3762, 0]
    assert packed_lengths.one_long(LONG, 10)[0].tolist() == [418, 418]
    more = replace(LONG, seqlen_k=LONG.seqlen_k + 900)
    queries, keys, _ = packed_lengths.one_long(more, 3000)
    assert queries.tolist() == [2900, 108] and keys.tolist() == [3000, 208]
    alone = replace(LONG, extent=Extent(RAGGED, 1, 512))
    assert [one.tolist() for one in packed_lengths.one_long(alone, 3762)] == [[3762], [3762], [1]]


def test_parts_of_what_tiles_visit() -> None:
    lengths = (np.array([300, 10]), np.array([300, 10]), np.array([1.0, 4.0]))
    assert packed_schedule.visited_by(LONG, lengths, 128, 128) == (7, 1 + 2 + 3 + 4, 3, 0)
    assert packed_schedule.visited_by(LONG, lengths, 128, 128, 2) == (14, 2 + 2 + 3 + 8, 2, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"extent": Extent(RAGGED, 9)},  # how long the longest is is not known
        {"extent": Extent(RAGGED, 9, 512)},
        {"extent": Extent(RAGGED, 9, 1024)},  # and so short that there is nothing to gain
        {"extent": Extent(RAGGED, 9, 8192)},  # more than there are of all sequences: a limit, which says nothing
        {"heads_q": 16, "heads_kv": 16},  # enough tiles
        {"tma": False},
        {"dtype": "fp32"},
        {"mask": Mask("chunked", 64)},
        {"seqlen_k": 0},
    ],
    ids=str,
)
def test_calls_that_keep_their_tiles(other: dict[str, Any]) -> None:
    assert chosen(LONG) is not None
    assert chosen(replace(LONG, **other)) is None


def test_score_terms_have_portable_tiles_where_these_are_faster() -> None:
    assert chosen(replace(LONG, score=score_of(20.0))) is None
    wide = {"head_dim": 128, "head_dim_v": 128}
    assert (chosen(replace(LONG, **wide)) is None) == (chosen(replace(LONG, **wide, score=score_of(20.0))) is None)


def test_of_one_sequence_the_length_is_known() -> None:
    assert chosen(replace(DRAWN[53][0], extent=Extent(RAGGED, 1))) is not None
    assert packed_splits_schedule.longest(replace(LONG, extent=Extent(RAGGED, 2, parts=2))) == (3762, 3762)
    assert packed_splits_schedule.longest(LONG) == (round(4096 / math.sqrt(2)), 2049)


def test_they_have_to_be_worth_the_margin_and_no_loss_where_the_longest_is_shorter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice, margin = choosing.choose(LONG, "fwd", H200, WARP_SPECIALIZED_ROWS), packed_splits_schedule.MARGIN
    known = packed_splits_schedule.longest(LONG)
    assert known is not None
    rounded = replace(LONG, seqlen_q=3840, seqlen_k=3840)
    rows_of = {packed_lengths.one_long(rounded, rows)[0][0]: rows for rows in known}
    for likely, least, taken in ((0.99, 0.99, True), (1.01, 0.99, False), (0.99, 1.01, False)):
        us = {known[0]: 10 * (1 - margin) * likely, known[1]: 10 * least}
        monkeypatch.setattr(packed_schedule, "expected_us", lambda *_: 10.0)
        monkeypatch.setattr(packed_splits_schedule, "split_us", lambda *of, us=us: us[rows_of[of[3][0][0]]])
        monkeypatch.setattr(packed_splits_schedule, "best", lambda *_: (1.0, {"SPLITS": 2}))
        packed_splits_schedule._instead_of.cache_clear()
        found = packed_splits_schedule.config_of(LONG, choice.config, H200, choice.row)
        assert (found is not None) == taken
    packed_splits_schedule._instead_of.cache_clear()


def test_explain_and_precompile() -> None:
    found = serving.explain_problem(LONG, H200, ("fwd",))
    assert set(found.kernels[0].binaries or {}) == {"packed_order", "sm90/fwd_split", "fwd_combine"}
    config = chosen(LONG)
    assert config is not None and key_splits_schedule.about(LONG, config) in str(found)
    assert "fwd: a long sequence in few tiles, so sm90/fwd_split runs instead" in str(found)
    choice = choosing.choose(LONG, "fwd", H200, WARP_SPECIALIZED_ROWS)
    listed = {(variant.short_name, config["BLOCK_M"] if variant.short_name == "sm90/fwd_split" else 0)
              for variant, config, _ in precompile._by_shape("fwd", LONG, choice, 90)}  # fmt: skip
    assert {("sm90/fwd_split", 64), ("sm90/fwd_split", 128), ("packed_order", 0), ("fwd_combine", 0)} <= listed
