"""benchmarks/one_query_tile.py: which calls it takes, and their bounds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import script
from click.testing import CliRunner

from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Problem

one_query_tile = script("one_query_tile")


def test_bounds_count_what_a_pass_moves_and_computes() -> None:
    least = one_query_tile.bounds(Problem("bf16", 2, 3, 3, 100, 6400, 72, 56, FULL))
    h200 = one_query_tile.H200
    # K, V, dK and dV of 128 columns in all, 2 bytes each; head dims are padded to 80 and 64
    assert least.memory == pytest.approx(2 * 6 * 6400 * 128 * 2 / (h200.hbm_gbs * 1e9) * 1e6)
    assert least.products == pytest.approx(2 * 6 * 128 * 6400 * (3 * 80 + 2 * 64) / (h200.tensor_tflops * 1e12) * 1e6)


def test_calls_of_one_tile_of_queries_are_listed_worst_first(tmp_path: Path) -> None:
    def call(seqlen_q: int, seqlen_k: int, ratio: float | None, heads_kv: int = 4) -> dict[str, Any]:
        shape = {"dtype": "bf16", "batch": 1, "heads_q": 4, "heads_kv": heads_kv, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,
                 "head_dim": 64, "head_dim_v": 64, "mask": "full"}  # fmt: skip
        return {**shape, "bwd": {"us": {"fa2tune": 50.0, "fa4": 40.0}, "best_peer": "fa4", "ratio": ratio}}

    calls = [call(100, 4096, 1.1), call(128, 512, 0.8), call(129, 4096, 0.9), call(100, 399, 0.9), call(64, 999, None),
             call(64, 999, 0.9, heads_kv=2)]  # fmt: skip
    path = tmp_path / "r.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"calls": dict(enumerate(calls))}).encode()))
    lines = CliRunner().invoke(one_query_tile.main, [str(path)]).output.splitlines()
    rows = [line for line in lines if "queries" in line]
    assert [row.split(", ")[1] for row in rows] == ["128 queries", "100 queries"]
    assert "| 50.0 | 40.0 (fa4) |" in rows[0] and lines[-1].startswith("2 calls; fa2tune takes ")
