"""benchmarks/sm80_calls.py without a GPU: its calls, its peers' arguments, its tables."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import script
from click.testing import CliRunner
from peer_fakes import right, without_gpu

from fa2tune import gpus
from fa2tune.launching import ported
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem

sm80_calls, side_by_side = script("sm80_calls"), script("side_by_side")


def test_calls_are_the_grid_and_ten_of_models() -> None:
    found = sm80_calls.calls()
    assert len(found) == 4 * 2 * 6 + 10
    assert found["96 causal 2048"] == Problem("bf16", 8, 21, 21, 2048, 2048, 96, 96, CAUSAL)
    models = list(found.values())[48:]
    assert all(
        one.group > 1 or one.seqlen_q % 128 or one.head_dim % 64 or one.seqlen_q != one.seqlen_k for one in models
    )


def test_with_little_time_all_head_dims_come_first() -> None:
    """Long calls, then short ones; calls of models are not last."""
    names = list(sm80_calls.in_turn(sm80_calls.calls()))
    assert sorted(names) == sorted(sm80_calls.calls())
    assert names[:4] == ["128 full 8192", "128 causal 8192", "96 full 8192", "96 causal 8192"]
    assert {name.rpartition(" ")[2] for name in names[:16]} == {"8192", "512"}
    assert tuple(names[24:34]) == sm80_calls.OF_MODELS
    share = list(side_by_side.in_share(sm80_calls.in_turn(sm80_calls.calls()), slice(0, None, 4)))
    assert len(share) == 15 and {name.split()[0] for name in share[:4]} == {"128", "256"}


def test_a_deterministic_call_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import fa2tune

    asked: dict[str, Any] = {}
    monkeypatch.setattr(fa2tune, "attention", lambda *_, **named: asked.update(named))
    sm80_calls.PEERS[sm80_calls.STEADY].make(Problem("bf16", 1, 1, 1, 8, 8, 16, 16, CAUSAL))(1, 2, 3)
    assert asked == {"mask": CAUSAL, "layout": "bshd", "deterministic": True}


def test_a_library_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2_LIBRARY", "/nowhere/library.so")
    done = CliRunner().invoke(sm80_calls.main, [])
    assert done.exit_code == 2 and "FA2_LIBRARY: got '/nowhere/library.so', which is not a file" in done.output


def test_a_record_says_whose_calls_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_gpu(monkeypatch, {"fa2tune": 1.0, "fa2": 1.2, "flash_attn": 0.9, "fa2tune deterministic": 1.25})
    begun: list[Any] = []
    monkeypatch.setattr(ported, "begin", lambda gpu, crowd: begun.append((gpu.name, crowd)))
    whole, known = side_by_side.Peer(right), dict(sm80_calls.PEERS)
    peers = {"fa2tune": whole, "fa2": whole, "flash_attn": side_by_side.Peer(right, backward=False)}
    peers[sm80_calls.STEADY] = dataclasses.replace(known[sm80_calls.STEADY], make=right)
    assert list(peers) == list(known)
    monkeypatch.setattr(sm80_calls, "PEERS", peers)
    problems = {"64 full 512": Problem("bf16", 1, 2, 1, 80, 80, 16, 16, FULL)}
    monkeypatch.setattr(sm80_calls, "calls", lambda: problems)
    workloads = script("workloads")
    monkeypatch.setattr(workloads, "measure", functools.partial(workloads.measure, device="cpu"))
    path = tmp_path / "calls.json"
    done = CliRunner().invoke(sm80_calls.main, ["--gpu", "l4", "--crowd", "--out", str(path)])
    assert done.exit_code == 0, done.output
    assert begun == [("l4", True)]
    assert "forward, x SDPA's FlashAttention-2: 1 of 1 at least 1.0, geometric mean 1.20, least 1.20" in done.output
    assert "forward, x flash-attn: 0 of 1 at least 1.0, geometric mean 0.90" in done.output
    assert "backward, x flash-attn" not in done.output
    assert "deterministic backward, x SDPA's FlashAttention-2: 0 of 1 at least 1.0, geometric mean 0.96" in done.output
    assert "deterministic backward, x in no fixed order: 0 of 1 at least 1.0, geometric mean 0.80" in done.output
    shown = CliRunner().invoke(sm80_calls.main, ["--table", str(path)]).output
    assert "sm_80 code for l4 on one 1" in shown and "as l4 holds" in shown
    assert "| backward, x SDPA's FlashAttention-2, 64, full | 1.20 | - | - | - | - | - |" in shown
    assert "| deterministic backward, x SDPA's FlashAttention-2, 64, full | 0.96 | - |" in shown
    call = json.loads(path.read_text())["calls"]["64 full 512"]
    assert sorted(call["fwd"]["us"]) == ["fa2", "fa2tune", "flash_attn"], "a deterministic forward is any forward"
    assert call["bwd"]["best_peer"] == "fa2" and call["seconds"] >= 0
    again = CliRunner().invoke(sm80_calls.main, ["--gpu", "a100", "--out", str(path)])
    assert again.exit_code == 2 and "has for l4, here a100-sxm-80gb" in again.output
    record = json.loads(path.read_text())
    del record["calls"]["64 full 512"]["fwd"]["us"]["fa2tune"]
    assert sm80_calls.ratios(record, "forward", "fa2") == {"64 full 512": 0.0}, "what fa2tune cannot run is lost"


def test_a_gpu_with_wgmma_is_refused() -> None:
    done = CliRunner().invoke(sm80_calls.main, ["--gpu", "h100"])
    assert done.exit_code == 2 and "got 'h100', allowed are GPUs of compute capability 8.0 to 8.9 and 12" in done.output


def test_kernels_are_crowded_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_running", "_for", "_crowding"):
        monkeypatch.setattr(ported, name, getattr(ported, name))
    ported.begin(gpus.named("a100"))
    assert ported.crowding() and ported.running() == 80
    ported.begin(gpus.named("a100"), crowd=False)
    assert not ported.crowding()
