"""benchmarks/random_calls.py without a GPU: what it draws, reports and compiles, and what it times where no peer runs."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import script
from click.testing import CliRunner
from peer_fakes import right, without_gpu

from fa2tune import gpus
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

random_calls, side_by_side = script("random_calls"), script("side_by_side")
SMALL = Problem("bf16", 1, 4, 2, 20, 24, 16, 16, CAUSAL)


def test_random_calls_keep_the_stated_bounds_and_shares() -> None:
    for seed in map(str, range(12)):
        calls = list(random_calls.drawn(seed).values())
        assert calls == list(random_calls.drawn(seed).values()) and len(calls) == 100
        assert sum(p.seqlen_q != p.seqlen_k for p in calls) >= 20
        assert sum(p.group > 1 for p in calls) >= 30
        assert sum(p.head_dim != p.head_dim_v for p in calls) >= 10
        assert {p.mask for p in calls} == {FULL, CAUSAL}
        for p in calls:
            assert 1 <= p.batch <= 64 and 1 <= p.heads_q <= 96 and p.heads_q % p.heads_kv == 0
            assert 64 <= p.seqlen_q <= 32768 and 64 <= p.seqlen_k <= 32768
            assert p.head_dim % 8 == p.head_dim_v % 8 == 0 and min(p.head_dim, p.head_dim_v) >= 16
            assert max(p.head_dim, p.head_dim_v) <= 256 and random_calls.bytes_of(p) <= random_calls.MOST_BYTES
    assert list(random_calls.drawn("0").values()) != calls
    for p in calls:
        done = random_calls.workloads.operations(p, "fwd") + random_calls.workloads.operations(p, "bwd")
        assert done / random_calls.ASSUMED_TFLOPS / 1e9 <= random_calls.MOST_MS


def unable(problem: Problem) -> Any:
    raise side_by_side.Unfit("not this one")


def test_the_portable_kernels_stand_in_where_no_peer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch, {"fa2tune": 1.0, "fa3": 0.5, "portable": 3.0})
    peers = {"fa2tune": side_by_side.Peer(right), "fa3": side_by_side.Peer(right, backward=False)}
    stand_in = side_by_side.Peer(right)
    found = random_calls.measure(SMALL, peers, stand_in, device="cpu")
    assert (found["fwd"]["best_peer"], found["fwd"]["ratio"]) == ("fa3", 0.5), "a peer runs it"
    assert (found["bwd"]["best_peer"], found["bwd"]["ratio"]) == ("portable", 3.0)
    found = random_calls.measure(SMALL, {**peers, "fa3": side_by_side.Peer(unable)}, stand_in, device="cpu")
    assert found["fwd"]["best_peer"] == found["bwd"]["best_peer"] == "portable"
    assert found["missing"] == {"fa3": "Unfit: not this one"}


def test_the_summary_says_whether_the_bars_are_met() -> None:
    def calls(*ratios: float | None) -> dict[str, Any]:
        return {str(n): {"fwd": {"ratio": ratio}} for n, ratio in enumerate(ratios)}

    (level,) = random_calls.summary(calls(*[0.99] * 95, *[0.9] * 5, None))
    assert level.startswith("fwd: met: 95 of 100 level") and level.endswith("1 without any peer")
    (few,) = random_calls.summary(calls(*[0.99] * 94, *[0.9] * 6))
    assert few.startswith("fwd: not met: 94 of 100")
    slow, which = random_calls.summary(calls(*[2.0] * 99, 0.899))
    assert slow.startswith("fwd: not met: 99 of 100") and which == "fwd: 0.899 99"


def test_a_record_is_resumed_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_gpu(monkeypatch, {"fa2tune": 1.0, "fa2": 2.0})
    peers = {"fa2tune": side_by_side.Peer(right), "fa2": side_by_side.Peer(right)}
    monkeypatch.setattr(random_calls.workloads, "PEERS", peers)
    monkeypatch.setattr(random_calls, "drawn", lambda seed: {"0 any": SMALL, "1 any": SMALL})
    monkeypatch.setattr(random_calls, "measure", functools.partial(random_calls.measure, device="cpu"))
    monkeypatch.setattr(random_calls.gpus, "device", lambda index: gpus.named("h200"))
    path = tmp_path / "r.json"
    run = lambda *more: CliRunner().invoke(random_calls.main, ["--seed", "abc", *more])  # noqa: E731
    assert run("--out", str(path)).exit_code == 0
    record = json.loads(path.read_text())
    assert [*record["calls"]] == ["0 any", "1 any"] and record["calls"]["0 any"]["bwd"]["ratio"] == 2.0
    assert record["calls"]["0 any"]["fwd"]["served"] == random_calls.served(SMALL, gpus.named("h200"))["fwd"]
    del record["calls"]["1 any"]
    record["calls"]["0 any"]["fwd"]["ratio"] = 0.5
    path.write_text(json.dumps(record))
    done = run("--out", str(path))
    assert "fwd: not met: 1 of 2" in done.output and "fwd: 0.5 0 any" in done.output and "0 any  " not in done.output
    shown = CliRunner().invoke(random_calls.main, ["--table", str(path)]).output
    assert "Drawn with the seed abc." in shown and "| 1 any | 2.00 (fa2) |" in shown and "- bwd: met: 2 of 2" in shown
    assert "1 x 4/2 heads, 20 queries, 24 keys, head dim 16, causal" in run("--list").output
    assert "--seed" in CliRunner().invoke(random_calls.main, ["--list"]).output


def test_what_served_is_recorded() -> None:
    h200 = gpus.named("h200")
    few = random_calls.served(Problem("bf16", 1, 32, 8, 64, 16384, 128, 128, FULL), h200)
    assert few["fwd"]["kernels"]["sm90/fwd_split"]["config"]["SPLITS"] > 1 and few["fwd"]["filled in"] == 0
    grouped = random_calls.served(Problem("bf16", 1, 16, 2, 2048, 2048, 104, 104, CAUSAL), h200)
    assert [*grouped["fwd"]["kernels"]] == ["sm90/fwd"] and grouped["bwd"]["kernels"]["sm90/bwd_fused"]["parts"] > 1
    long = random_calls.served(Problem("bf16", 24, 1, 1, 11465, 142, 56, 56, CAUSAL), h200)
    assert [long[pass_]["filled in"] for pass_ in ("fwd", "bwd")] == [11323, 11323]
