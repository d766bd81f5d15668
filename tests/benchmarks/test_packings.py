"""benchmarks/random_packings.py without a GPU: what it draws, what it accepts as right, what it times and reports."""

from __future__ import annotations

import json
import math
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import script
from click.testing import CliRunner

from fa2tune.measuring import reference
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band

packings, side_by_side = script("random_packings"), script("side_by_side")


def test_packings_keep_the_stated_bounds() -> None:
    drawn = [one for seed in ("a", "b") for one in packings.drawn(seed).values()]
    assert len(drawn) == 200 and [*packings.drawn("a").values()] == drawn[:100] != drawn[100:]
    for one in drawn:
        assert packings.TOKENS[0] <= sum(one.of_q) <= packings.TOKENS[1] and len(one.of_q) == len(one.of_k) <= 256
        assert min(one.of_q) >= 0 and one.heads_q % one.heads_kv == 0 and one.bytes <= packings.MOST_BYTES
    assert {one.mask.name for one in drawn} == {"full", "causal", "band"}
    for kind in (lambda p: p.of_q != p.of_k, lambda p: 0 in p.of_q, lambda p: p.group > 1, lambda p: len(p.of_q) == 1):
        assert any(map(kind, drawn)) and not all(map(kind, drawn))


def test_lengths_add_up() -> None:
    source = random.Random(1)
    for _ in range(50):
        total, count = source.randint(8, 5000), source.randint(1, 40)
        found = packings.lengths(source, total, count)
        assert sum(found) == total and len(found) == count and min(found) >= 0


def test_operations_count_visible_pairs() -> None:
    one = packings.Packing((3, 0, 2), (5, 0, 2), 4, 2, 16, CAUSAL)
    pairs = (3 + 4 + 5) + (1 + 2)
    assert (one.operations("fwd"), one.operations("bwd")) == (4 * pairs * 4 * 16, 10 * pairs * 4 * 16)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, band(3, 0)], ids=str)
def test_expected_results_are_those_of_the_float64_reference(mask: Mask) -> None:
    one = packings.Packing((70, 0, 9), (80, 5, 9), 6, 2, 16, mask)
    generator = torch.Generator().manual_seed(1)
    sizes = ((79, 6), (94, 2), (94, 2), (79, 6))
    q, k, v, do = (torch.randn(*size, 16, generator=generator, dtype=torch.float64) for size in sizes)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    o = right(one)(*leaves)
    whole = dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *torch.autograd.grad(o, leaves, do)), strict=True))
    found = packings.expected(one, *(t.detach() for t in leaves), do)
    for name, tensor in whole.items():
        mine = tensor[:, -3:] if name in ("o", "dq") else tensor[:, -1]
        torch.testing.assert_close(found[name].double(), mine, atol=2e-5, rtol=1e-4)
    assert packings.wrong(whole, found, 3) is None
    assert packings.wrong({**whole, "dk": whole["dk"] * 1.1}, found, 3).startswith("dk differs from float32")
    assert packings.wrong({**whole, "o": whole["o"] * torch.nan}, found, 3) == "o is not finite"


def right(packing: Any) -> Any:
    def attention(q: Any, k: Any, v: Any) -> Any:
        outs = []
        sides = (q.split(packing.of_q), k.split(packing.of_k), v.split(packing.of_k))
        for parts in zip(*sides, strict=True):
            one = (part.transpose(0, 1)[None] for part in parts)
            outs.append(reference.attention(*one, mask=packing.mask)[0][0].transpose(0, 1))
        return torch.cat(outs)

    return attention


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run on the CPU; a peer's time is what its name says."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(side_by_side, "graphed", lambda call, stream: (call, 1))
    times = {"fa2tune": 1.0, "fa4": 2.0, "fa3": 0.5}
    monkeypatch.setattr(side_by_side, "raced", lambda graphs: {name: [times[name]] for name in graphs})
    monkeypatch.setattr(side_by_side, "warm", lambda: None)
    environment = dict.fromkeys(("gpu", "driver", "torch", "triton"), "1")
    monkeypatch.setattr(side_by_side, "environment", lambda: environment)


def test_a_record_is_measured_resumed_and_shown(no_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peers = {
        "fa2tune": side_by_side.Peer(right), "fa4": side_by_side.Peer(right),
        "fa3": side_by_side.Peer(right, backward=False), "torch": side_by_side.Peer(packings._torch),
        "fa2": side_by_side.Peer(lambda packing: lambda q, k, v: right(packing)(q, k, 2 * v)),
    }  # fmt: skip
    monkeypatch.setattr(packings, "PEERS", peers)
    small = packings.Packing((20, 0, 9), (20, 0, 9), 4, 2, 16, CAUSAL)
    monkeypatch.setattr(packings, "drawn", lambda seed, count: {str(n): small for n in range(count)})
    monkeypatch.setattr(packings, "measure", lambda *asked, made=packings.measure: made(*asked, device="cpu"))
    path = tmp_path / "p.json"
    run = lambda *more: CliRunner().invoke(packings.main, ["--seed", "abc", "--out", str(path), *more])  # noqa: E731
    first = run("--count", "1")
    assert first.exit_code == 0, first.output
    record = json.loads(path.read_text())
    call = record["calls"]["0"]
    assert call["fwd"]["ratio"] == 0.5 and call["fwd"]["best_peer"] == "fa3"
    assert call["bwd"]["ratio"] == 2.0 and call["bwd"]["best_peer"] == "fa4"
    assert call["missing"]["torch"].startswith("Unfit") and call["missing"]["fa2"].startswith("o differs from float32")
    call["fwd"]["ratio"] = 1.0
    path.write_text(json.dumps(record))
    second = run("--count", "2")
    assert second.exit_code == 0 and second.output.count("best peer") == 2
    mean = math.sqrt(0.5)
    said = f"fwd: 1 of 2 at or above 1.0 of the best peer, 1 below 0.9, geometric mean {mean:.3f}, least 0.5 (1)"
    assert said in second.output and "bwd: 2 of 2 at or above 1.0 of the best peer, 0 below 0.9" in second.output
    assert "not reached: 2" in run("--count", "3", "--seconds", "-1").output
    shown = CliRunner().invoke(packings.main, ["--table", str(path)]).output
    assert "seed abc, peers fa2tune, fa4, fa3, torch, fa2." in shown and "| 1 | 0.50 (fa3) |" in shown
    assert "--seed" in CliRunner().invoke(packings.main, ["--list"]).output
    other = CliRunner().invoke(packings.main, ["--seed", "abd", "--out", str(path)])
    assert other.exit_code == 2 and "has seed abc" in other.output
