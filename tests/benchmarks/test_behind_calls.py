"""benchmarks/behind_calls.py without a GPU: which calls it takes, in which order, beside which peers, and its report."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import click
import pytest
from benchmark_scripts import script
from click.testing import CliRunner
from peer_fakes import right, without_gpu

from fa2tune import gpus

behind_calls, random_calls, side_by_side = script("behind_calls"), script("random_calls"), script("side_by_side")
ENVIRONMENT = ("gpu", "driver", "torch", "triton", "cudnn", "flash-attn-4")
SHAPE = {"dtype": "bf16", "batch": 1, "heads_q": 2, "heads_kv": 2, "seqlen_k": 24, "head_dim": 16, "head_dim_v": 16,
         "mask": "causal"}  # fmt: skip


def recorded(seqlen_q: int, **ratios: float | None) -> dict[str, Any]:
    return {**SHAPE, "seqlen_q": seqlen_q} | {
        name: {"ratio": ratio, "best_peer": {"fwd": "fa2", "bwd": "fa4"}[name]} for name, ratio in ratios.items()
    }


def written(path: Path, drawing: dict[str, Any]) -> Path:
    path.write_bytes(gzip.compress(json.dumps(drawing).encode()))
    return path


@pytest.fixture
def records(tmp_path: Path) -> list[Path]:
    """Two drawings."""
    some = {"a": recorded(20, fwd=0.97, bwd=1.2), "b": recorded(21, fwd=1.1, bwd=None), "c": recorded(22, fwd=1.0)}
    drawings = ({"calls": some}, {"calls": {"a": recorded(23, fwd=1.3, bwd=0.8)}})
    return [written(tmp_path / f"{number}.json.gz", drawing) for number, drawing in enumerate(drawings)]


def test_calls_of_which_a_pass_was_behind_come_worst_first(tmp_path: Path, records: list[Path]) -> None:
    calls = behind_calls.behind(records, 0.99)
    assert [(call.problem.seqlen_q, call.before) for call in calls.values()] == [
        (23, {"fwd": ("fa2", 1.3), "bwd": ("fa4", 0.8)}), (20, {"fwd": ("fa2", 0.97), "bwd": ("fa4", 1.2)}),
    ]  # fmt: skip
    assert [call.problem.seqlen_q for call in behind_calls.behind(records, 0.9).values()] == [23]
    assert not behind_calls.behind(records, 0.8)
    with pytest.raises(click.BadParameter, match=r"several\.json\.gz has no calls"):
        behind_calls.behind([written(tmp_path / "several.json.gz", {"runs": []})], 0.99)


def test_each_is_timed_beside_the_peers_that_were_the_best(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, records: list[Path]
) -> None:
    without_gpu(monkeypatch, {"fa2tune": 1.0, "fa2": 0.9, "fa3": 0.1, "fa4": 2.0})
    peers = {name: side_by_side.Peer(right) for name in ("fa2tune", "fa2", "fa3", "fa4")}
    monkeypatch.setattr(behind_calls.workloads, "PEERS", peers)
    original = random_calls.measure
    monkeypatch.setattr(random_calls, "measure", lambda *given: original(*given, device="cpu"))
    monkeypatch.setattr(random_calls.gpus, "device", lambda index: gpus.named("h200"))
    out = tmp_path / "r.json"
    run = lambda *more: CliRunner().invoke(behind_calls.main, [*map(str, records), *more])  # noqa: E731
    listed = run("--list").output.splitlines()
    assert [line.partition(":")[0] for line in listed] == [
        f"1 x 2/2 heads, {queries} queries, 24 keys, head dim 16, causal" for queries in (23, 20)
    ]
    done = run("--out", str(out))
    assert done.exit_code == 0, done.output
    worst, other = json.loads(out.read_text())["calls"].values()
    assert (worst["before"]["bwd"], worst["fwd"]["best_peer"], worst["fwd"]["ratio"]) == (["fa4", 0.8], "fa2", 0.9)
    assert other["bwd"]["ratio"] == 0.9 and "served" in other["bwd"]
    shown = CliRunner().invoke(behind_calls.main, ["--table", str(out)]).output
    assert f"| {listed[0].partition(':')[0]} | 1.3 (fa2) | 0.9 | 0.8 (fa4) | 0.9 |" in shown
    assert "- fwd: 1 were behind, 1 are timed beside the same peer, 1 are behind still" in shown
    assert "got no record" in CliRunner().invoke(behind_calls.main, []).output


def test_a_peer_that_is_not_here_is_said_and_not_replaced() -> None:
    call = {"before": {"fwd": ["fa3", 0.9], "bwd": ["fa4", 0.8]}}
    call |= {"fwd": {"ratio": 0.0, "us": {"fa2tune": None, "fa3": 2.0}}, "bwd": {"ratio": 2.0, "us": {"portable": 2.0}}}
    record = {"environment": dict.fromkeys(ENVIRONMENT, "1"), "date": "", "seed": None, "calls": {"one": call}}
    text = "\n".join(behind_calls.report(record))
    assert "| one | 0.9 (fa3) | 0.0 | 0.8 (fa4) | fa4 not timed |" in text
    assert "- bwd: 1 were behind, 0 are timed beside the same peer, 0 are behind still" in text
