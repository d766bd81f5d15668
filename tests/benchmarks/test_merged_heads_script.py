"""benchmarks/merged_heads.py: what it times, and what its table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_scripts import BENCHMARKS, script
from click.testing import CliRunner

from fa2tune import gpus
from fa2tune.calling import merging

merged_heads = script("merged_heads")
H200 = gpus.named("h200")
RECORD = BENCHMARKS / "calls/random_calls_14.json.gz"


def test_its_calls_are_those_that_may_have_one_head() -> None:
    problems = merged_heads.posed(merged_heads.read([RECORD]), H200.arch)
    assert len(problems) > 10
    for problem in problems.values():
        assert problem.heads_kv == 1 < problem.group and problem.seqlen_q < merging.MOST_QUERIES
    done = CliRunner().invoke(merged_heads.main, [str(RECORD), "--list", "--share", "1/5"], catch_exceptions=False)
    *calls, forwards, backwards = done.output.splitlines()
    assert len(calls) == -(-len(problems) // 5) and " take it, 0." in forwards and backwards.startswith("bwd: ")


def test_each_of_both_ways_is_taken_by_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "pays", None)  # what the script sets is undone
    problem = next(iter(merged_heads.posed(merged_heads.read([RECORD]), H200.arch).values()))
    for peer, wanted in zip(merged_heads.PEERS.values(), (True, False), strict=True):
        call = peer.make(problem)
        assert call.keywords == {"mask": problem.mask, "layout": "bshd"} and merging.pays() is wanted


def test_the_table(tmp_path: Path) -> None:
    said = {"fwd": {"one by one": 10.0, "fa2tune": 8.0}, "bwd": {"one by one": 20.0, "fa2tune": None}}
    call = {"fwd": {"us": {"fa2tune": 9.0, "one by one": 10.0}}, "bwd": {"us": {}}, "missing": {}, "predicted": said}
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"calls": {"a call": call}}))
    done = CliRunner().invoke(merged_heads.main, ["--table", str(path)], catch_exceptions=False)
    assert done.output.splitlines() == [
        "a call: fwd 10.0 -> 9.0 us, 0.90 (predicted 0.80)",
        "fwd: 1 calls, 0.900 of the time in the geometric mean; predictions 0.118 off",
    ]
