"""benchmarks/workloads.py without a GPU: what it accepts as right, what it reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from benchmark_scripts import script
from click.testing import CliRunner
from peer_fakes import right, without_gpu

from fa2tune.measuring import reference
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem

workloads, side_by_side = script("workloads"), script("side_by_side")


def test_operations_count_what_the_mask_lets_see() -> None:
    problem = Problem("bf16", 2, 4, 2, 3, 5, 16, 32, CAUSAL)
    assert workloads.operations(problem, "fwd") == 2 * 2 * 4 * (3 + 4 + 5) * (16 + 32)
    assert workloads.operations(problem, "bwd") == 2 * 2 * 4 * (3 + 4 + 5) * (3 * 16 + 2 * 32)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, band(3, 0)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 70), (9, 40), (40, 9)])
def test_expected_results_are_those_of_the_float64_reference(mask: Mask, seqlen_q: int, seqlen_k: int) -> None:
    problem = Problem("bf16", 2, 6, 2, seqlen_q, seqlen_k, 16, 24, mask)
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, seqlen_q, 6, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 24), (2, seqlen_q, 6, 24)]
    q, k, v, do = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    leaves = [tensor.transpose(1, 2).requires_grad_() for tensor in (q, k, v)]
    o = reference.attention(*leaves, mask=mask, softmax_scale=16**-0.5)[0]
    grads = torch.autograd.grad(o, leaves, do.transpose(1, 2))
    whole = {name: t.detach().transpose(1, 2) for name, t in zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True)}
    found = workloads.expected(problem, q, k, v, do)
    for name, tensor in whole.items():
        mine = tensor[-1, :, -3:] if name in ("o", "dq") else tensor[-1, :, -1]
        torch.testing.assert_close(found[name].double(), mine, atol=2e-5, rtol=1e-4)
    assert workloads.wrong(whole, found, 3) is None
    for name in whole:
        changed = {**whole, name: whole[name] * 1.1}
        assert workloads.wrong(changed, found, 3).startswith(f"{name} differs from float32")
        broken = {**whole, name: torch.full_like(whole[name], torch.nan)}
        assert workloads.wrong(broken, found, 3) == f"{name} is not finite"


def test_the_ratio_is_that_of_the_fastest_peer_by_rounds() -> None:
    found = side_by_side.verdict({"fa2tune": [1.0, 2.0, 1.0], "fa4": [1.5, 3.0, 1.5], "fa2": [9.0, 9.0, 9.0]}, 2e9)
    assert found["tflops"] == 2.0
    assert (found["best_peer"], found["ratio"], found["us"]["fa2tune"]) == ("fa4", 1.5, 1000.0)
    assert side_by_side.verdict({"fa4": [1.0]}, 1.0)["ratio"] == 0.0, "fa2tune cannot run it: lost"
    assert side_by_side.verdict({"fa2tune": [1.0]}, 1.0)["ratio"] is None
    assert side_by_side.verdict({}, 1.0)["ratio"] is None, "nothing is within the tolerance: it decides nothing"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch, {"fa2tune": 1.0, "good": 2.0, "forward-only": 0.5})


def peers() -> dict[str, Any]:
    def unable(problem: Problem) -> Any:
        raise side_by_side.Unfit("not this one")

    return {
        "fa2tune": side_by_side.Peer(right), "good": side_by_side.Peer(right), "unable": side_by_side.Peer(unable),
        "wrong": side_by_side.Peer(lambda problem: lambda q, k, v: right(problem)(q, k, 2 * v)),
        "forward-only": side_by_side.Peer(right, backward=False),
    }  # fmt: skip


def test_what_is_wrong_or_unable_is_named_and_not_timed(no_gpu: None) -> None:
    problem = Problem("bf16", 1, 4, 2, 80, 80, 16, 16, CAUSAL)
    found = workloads.measure(problem, peers(), device="cpu")
    assert found["missing"]["unable"] == "Unfit: not this one"
    assert found["missing"]["wrong"].startswith("o differs from float32")
    assert (found["fwd"]["best_peer"], found["fwd"]["ratio"]) == ("forward-only", 0.5)
    assert (found["bwd"]["best_peer"], found["bwd"]["ratio"]) == ("good", 2.0)
    few = workloads.measure(Problem("bf16", 1, 4, 2, 16, 80, 16, 16, CAUSAL), peers(), device="cpu")
    assert "bwd" not in few


def test_a_file_is_resumed_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    problems = {name: Problem("bf16", 1, 4, 2, seqlen, 80, 16, 16, FULL) for name, seqlen in (("a", 80), ("b", 4))}
    measured: list[int] = []

    def measure(problem: Problem, peers: Any) -> dict[str, Any]:
        measured.append(problem.seqlen_q)
        one = {"us": {}, "best_peer": "fa4", "tflops": 5.0, "ratio": problem.seqlen_q / 64}
        return {"fwd": one, **({"bwd": {**one, "ratio": 0.0}} if problem.seqlen_q > 16 else {}), "missing": {}}

    monkeypatch.setattr(workloads, "named", lambda: problems)
    monkeypatch.setattr(workloads, "measure", measure)
    monkeypatch.setattr(side_by_side, "warm", lambda: None)
    environment = {**dict.fromkeys(("driver", "torch", "triton", "cudnn", "flash-attn-4"), "1"), "gpu": "H200"}
    monkeypatch.setattr(side_by_side, "environment", lambda: environment)
    path = tmp_path / "w.json"
    run = lambda *more: CliRunner().invoke(workloads.main, ["--out", str(path), *more])  # noqa: E731
    assert run("--only", "a").exit_code == 0 and measured == [80]
    done = run()
    assert done.exit_code == 0 and measured == [80, 4]
    said = "fwd: 1 of 1 at or above the best peer, geometric mean 1.250, least 1.25 (a)"
    assert said in done.output and "fwd, at most 16 queries: 0 of 1" in done.output
    assert "bwd: 0 of 1 at or above the best peer, geometric mean 0.010, least 0.0 (a)" in done.output
    shown = CliRunner().invoke(workloads.main, ["--table", str(path)]).output.splitlines()
    assert shown[0].startswith("H200, driver 1, torch 1, Triton 1, cuDNN 1, FlashAttention-4 1, 20")
    assert shown[4:6] == ["| a | 1.25 (fa4) | 5 | 0.00 (fa4) | 5 |", "| b | 0.06 (fa4) | 5 |  |  |"]
    page = tmp_path / "page.md"
    page.write_text("x\n{}\nold\n{}\ny\n".format(*workloads.marked.markers("workloads", "workloads")))
    CliRunner().invoke(workloads.main, ["--table", str(path), "--page", str(page)])
    assert "| a | 1.25 (fa4) |" in page.read_text() and "old" not in page.read_text()
    assert json.loads(path.read_text())["calls"]["a"]["mask"] == "full"
    environment["gpu"] = "H100"
    refused = run()
    assert refused.exit_code == 2 and "has environment" in refused.output
    assert "got 'x', known are fa2tune" in CliRunner().invoke(workloads.main, ["--peers", "x"]).output
    assert "fa3 is not installed here" in CliRunner().invoke(workloads.main, ["--peers", "fa3"]).output


def test_peers_that_cannot_take_a_call_say_why() -> None:
    make = workloads.PEERS["fa2"].make
    for mask, why in ((band(3, 0), "no windows"), (CAUSAL, "top left")):
        with pytest.raises(side_by_side.Unfit, match=why):
            make(Problem("bf16", 1, 1, 1, 8, 9, 16, 16, mask))
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 9, 1, 16)
    one = workloads._sdpa("MATH")(Problem("bf16", 1, 1, 1, 1, 9, 16, 16, CAUSAL))(q, k, k)
    everything = torch.softmax(q[0, :, 0] @ k[0, :, 0].T / 4, -1) @ k[0, :, 0]
    torch.testing.assert_close(one[0, :, 0], everything, msg="one query sees all keys")


def test_shares_of_the_calls_hold_each_call_once() -> None:
    calls = {str(place): place for place in range(10)}
    shares = [side_by_side.in_share(calls, side_by_side._share(None, None, f"{nth}/3")) for nth in (1, 2, 3)]
    assert [list(share) for share in shares] == [["0", "3", "6", "9"], ["1", "4", "7"], ["2", "5", "8"]]


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "a/b", "-1/4"])
def test_a_share_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="K/N"):
        side_by_side._share(None, None, text)


def test_records_of_shares_are_merged(tmp_path: Path) -> None:
    about = {"environment": {"gpu": "NVIDIA H200"}, "peers": ["fa2tune"], "seed": "abc", "date": "2026-11-26"}
    files = []
    for name in ("a", "b"):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({**about, "calls": {name: {"fwd": {"ratio": 1.0}}}}), "utf-8")
    out = tmp_path / "joined.json"
    result = CliRunner().invoke(side_by_side.main, [str(out), *map(str, files)])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text("utf-8")) == {**about, "calls": {n: {"fwd": {"ratio": 1.0}} for n in ("a", "b")}}
    files[1].write_text(json.dumps({**about, "seed": "def", "calls": {}}), "utf-8")
    result = CliRunner().invoke(side_by_side.main, [str(out), *map(str, files)])
    assert result.exit_code == 2 and "seed is def in one record, abc in another" in result.output
