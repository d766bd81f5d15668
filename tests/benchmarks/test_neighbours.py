"""benchmarks/neighbours.py without a GPU: its pairs, what it allows, what it times and reports."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark_scripts import script
from click.testing import CliRunner
from peer_fakes import right, without_gpu

from fa2tune import gpus
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import BUCKETS, Problem

neighbours, side_by_side = script("neighbours"), script("side_by_side")
SMALL = Problem("bf16", 1, 4, 4, 32, 32, 16, 16, FULL)
LENGTHS = neighbours.Pair("length", SMALL, replace(SMALL, seqlen_q=33, seqlen_k=33))
MORE_HEADS = neighbours.Pair("head", SMALL, replace(SMALL, heads_q=5, heads_kv=5))


def test_every_bucket_has_a_neighbour_and_every_number_of_waves() -> None:
    pairs = neighbours.pairs()
    lengths = [one for one in pairs.values() if one.kind == "length"]
    assert {one.below.bucket for one in lengths} == set(BUCKETS)
    for one in lengths:
        assert (one.above.seqlen_q, one.above.seqlen_k) == (one.below.seqlen_q + 1, one.below.seqlen_k + 1)
        assert one.below.bucket == one.below.seqlen_k and one.above.batch == one.below.batch
    heads = [one for one in pairs.values() if one.kind == "head"]
    assert len(lengths) + len(heads) == len(pairs) and all(one.above.heads_q == one.below.heads_q + 1 for one in heads)
    assert any(one.waves >= 4 for one in heads) and any(one.waves < 2 for one in heads)
    for one in heads:  # the last wave is full, as far as whole heads fill it
        assert -one.waves % 1 * neighbours.SM_COUNT < one.below.query_tiles(neighbours.TILE)


def test_whole_tiles_are_counted() -> None:
    config = {"BLOCK_M": 128, "BLOCK_N": 64}
    one = Problem("bf16", 2, 3, 1, 256, 256, 64, 64, FULL)
    assert neighbours.work(one, config) == 6 * 256 * 256
    assert neighbours.work(replace(one, mask=CAUSAL), config) == 6 * 128 * (128 + 256)
    assert neighbours.work(replace(one, seqlen_q=257, seqlen_k=257), config) == 6 * 384 * 320
    assert neighbours.work(replace(one, mask=CAUSAL, seqlen_q=1, seqlen_k=257), config) == 6 * 128 * 320
    found = neighbours.allowed(neighbours.pairs()["length 4096 + 1, head dim 128, full"], gpus.named("h200"))
    assert set(found) == {"fwd", "bwd"} and all(1.02 < most < 1.1 for most in found.values())


def test_both_calls_of_a_pair_are_raced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"below fa2tune": 1.0, "above fa2tune": 1.4, "below fa2": 1.0, "above fa2": 1.5}
    without_gpu(monkeypatch, times)
    peers = {"fa2tune": side_by_side.Peer(right), "fa2": side_by_side.Peer(right, backward=False)}
    found = neighbours.measure(MORE_HEADS, peers, gpus.named("h200"), device="cpu")
    forward = found["fwd"]
    assert forward["cost"] == {"fa2tune": 1.4, "fa2": 1.5}
    assert forward["fall"]["fa2tune"] == pytest.approx(1 - 1.25 / 1.4)
    assert forward["bar"] == pytest.approx(1 - 1.25 / 1.5 + neighbours.NOISE) and forward["met"]
    assert found["bwd"]["bar"] == neighbours.FALL and not found["bwd"]["met"], "no peer"
    monkeypatch.setattr(neighbours, "allowed", lambda pair, gpu: {"fwd": 1.5, "bwd": 1.3})
    found = neighbours.measure(LENGTHS, peers, gpus.named("h200"), device="cpu")
    assert [*found["fwd"]["cost"]] == ["fa2tune"]
    assert (found["fwd"]["met"], found["bwd"]["met"]) == (True, False)


def test_a_record_is_measured_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_gpu(monkeypatch, {"below fa2tune": 1.0, "above fa2tune": 1.4})
    monkeypatch.setattr(neighbours.workloads, "PEERS", {"fa2tune": side_by_side.Peer(right)})
    monkeypatch.setattr(neighbours, "pairs", lambda: {"length 32 + 1": LENGTHS, "heads 4 + 1": MORE_HEADS})
    monkeypatch.setattr(neighbours, "allowed", lambda pair, gpu: {"fwd": 1.5, "bwd": 1.3})
    monkeypatch.setattr(neighbours, "measure", functools.partial(neighbours.measure, device="cpu"))
    monkeypatch.setattr(neighbours.gpus, "device", lambda number: gpus.named("h200"))
    path = tmp_path / "n.json"
    done = CliRunner().invoke(neighbours.main, ["--out", str(path)], catch_exceptions=False)
    assert "fwd: 1 of 2 pairs within what is allowed; not heads 4 + 1" in done.output
    assert [*json.loads(path.read_text())["calls"]] == ["length 32 + 1", "heads 4 + 1"]
    shown = CliRunner().invoke(neighbours.main, ["--table", str(path)]).output
    assert "| length 32 + 1 | bwd | 1.400 |" in shown and "| 1.300 x | no |" in shown
