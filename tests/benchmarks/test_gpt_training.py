"""benchmarks/gpt_training.py without a GPU: what it counts, that its model learns, what its table says, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import script
from click.testing import CliRunner

gpt = script("gpt_training")
TINY = gpt.Shape(layers=2, hidden=32, heads=2, seqlen=24, batch=2, vocabulary=50)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_parameters_are_those_of_the_model_and_of_its_name() -> None:
    assert sum(parameter.numel() for parameter in gpt.GPT(TINY).parameters()) == TINY.parameters
    for name, (layers, hidden, heads) in gpt.MODELS.items():
        shape = gpt.Shape(layers, hidden, heads, 2048, 8)
        assert shape.head_dim == 128
        assert shape.parameters / 1e9 == pytest.approx(float(name.removesuffix("B")), rel=0.05)


def test_operations_are_six_a_parameter_and_token_and_those_of_the_pairs() -> None:
    shape = gpt.Shape(24, 2048, 16, 8192, 2)
    tokens = 2 * 8192
    # two products of 2 x hidden operations a pair forward, twice that backward
    pairs = 3 * 2 * 2 * 2048 * 24 * 2 * 8192**2
    assert shape.operations(causal=False) == 6 * shape.parameters * tokens + pairs
    assert shape.operations(causal=True) == 6 * shape.parameters * tokens + pairs / 2


def test_the_model_learns_alike_from_the_same_weights_and_recomputed_blocks(group: None) -> None:
    found = gpt.curves(TINY, torch.device("cpu"), {"standard": causal, "sdpa-flash": causal}, 12)
    assert list(found) == ["standard", "sdpa-flash", "standard, again"]
    assert found["standard"][0] == pytest.approx(3.9, abs=0.15)  # log(50)
    assert found["standard"][-1] < found["standard"][0] - 0.01
    assert max(gpt.spread(found).values()) < 1e-2  # "standard" recomputes its blocks, the other does not


def test_no_query_sees_a_later_token(group: None) -> None:
    training = gpt.Training(TINY, torch.device("cpu"), compiled=False)
    seen: list[torch.Tensor] = []

    def spying(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append(q.detach())
        assert q.shape == (TINY.batch, TINY.heads, TINY.seqlen, TINY.head_dim) and q.dtype == torch.bfloat16
        return causal(q, k, v)

    training.step(spying, again=False)
    assert len(seen) == TINY.layers


def _record() -> dict[str, Any]:
    results = {
        "fa2tune": {"ms": [100.0, 110.0, 90.0], "attention_ms": 20.0, "bytes": 2 << 30, "checkpointed": False},
        "standard": {"ms": [400.0], "attention_ms": 300.0, "bytes": 4 << 30, "checkpointed": True},
        "fa4": {"failed": "out of memory"},
    }
    run = {"shape": {**vars(TINY)}, "results": results, "losses": {"fa2tune": [4.0, 3.0], "fa4": [4.0, 3.5]}}
    environment = {"gpu": "G", "ranks": 8, "driver": "1", "torch": "2", "triton": "3", "peak_tflops": 100.0}
    return {"environment": environment, "date": "2026-01-01", "runs": {"tiny": run}}


def test_the_table_has_a_row_for_each_implementation(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    path.write_text(json.dumps(_record()))
    shown = CliRunner().invoke(gpt.main, ["--table", str(path)])
    assert shown.exit_code == 0, shown.output
    rows = {line.split("|")[1].strip(): line for line in shown.output.splitlines() if line.startswith("| ")}
    assert "| 100.0 | 480 |" in rows["fa2tune"] and rows["fa2tune"].endswith("| 20.0 | 1.00 |")
    assert rows["Standard, blocks computed again"].endswith("| 300.0 | 15.00 |")
    assert "out of memory" in rows["FlashAttention-4"]
    assert "fa4: loss 4.0000 to 3.5000, at most 0.5 apart" in shown.output
    assert shown.output.startswith("8 x G, driver 1, torch 2, Triton 3, 2026-01-01.")


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--seqlen", "3000"], "got 16384, needs a multiple of --seqlen 3000"),
        (["--model", "175B"], "'175B' is not one of"),
        (["--curves", "1"], "1 is not in the range"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], named: str) -> None:
    refused = CliRunner().invoke(gpt.main, arguments)
    assert refused.exit_code == 2 and named in refused.output
