"""Bands of heads of forms in place of a row's forward, next to recorded times."""

from __future__ import annotations

import gzip
import json

from benchmark_scripts import BENCHMARKS, script
from test_few_tiles_choice import H200, chosen, described, fwd, geometric_mean, problem, tiles

from fa2tune.calling.schedules import few_tiles
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Problem


def test_they_serve_where_they_gained() -> None:
    """By the record that they were fitted to, without calls whose first queries see no key: public calls leave them out."""
    label = script("dense_forwards").label
    record = json.loads(gzip.decompress((BENCHMARKS / "calls/band_forwards.json.gz").read_bytes()))
    shares = []
    for call in record["calls"].values():
        asked, us = described(call["call"]), call["us"]
        config = {**fwd.SPACE.completed(chosen(asked).config), "DIVISORS": False}
        offered = few_tiles.is_offered(asked.specialization, config, 90) and label(config) in us
        if offered and asked.seqlen_q <= asked.seqlen_k and config["HEADS_PER_WAVE"] in few_tiles.OTHER_BANDS:
            shares.append(us[label(config)] / us["served"])
    assert len(shares) > 6 and geometric_mean(shares) < 0.93 and max(shares) < 1.03, shares


def formed(asked: Problem) -> list[few_tiles._TimedForm]:
    """All forms in their usual band."""
    found = []
    for config in few_tiles.configs(asked.specialization, 90):
        paces = few_tiles._paces_of_call(asked, config, H200.sm_count)
        time = few_tiles.expected_us(asked, config, H200.sm_count)
        assert paces is not None and time is not None
        found.append((time, config, paces))
    return found


def test_of_which_calls_they_are_tried() -> None:
    """Causal ones whose first queries see a key, of forms that would be the fastest if their tiles came out even."""
    causal = problem(192, heads_q=17, heads_kv=17, seqlen_q=3372, seqlen_k=3372)
    _, found = few_tiles.best(causal, 90, H200.sm_count) or (0.0, {})
    assert (tiles(found), found["HEADS_PER_WAVE"]) == ((128, 128, 0), 22)  # as wide as all heads
    given = formed(causal)
    assert [*few_tiles._in_other_bands(causal, given, H200.sm_count)]
    fastest = [(100.0, *one[1:]) for one in given[:1]]
    assert not [*few_tiles._in_other_bands(causal, [*given, *fastest], H200.sm_count)]
    for other in (
        problem(192, FULL, heads_q=17, heads_kv=17, seqlen_q=3372, seqlen_k=3372),
        problem(192, heads_q=17, heads_kv=17, seqlen_q=3373, seqlen_k=3372),
    ):
        assert not [*few_tiles._in_other_bands(other, formed(other), H200.sm_count)]
