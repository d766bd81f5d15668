"""benchmarks/sm80_reach.py: figures computed from records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import script

sm80_reach = script("sm80_reach")


def test_sdpas_copies_weigh_most_where_a_call_is_short() -> None:
    factors = sm80_reach.copied()
    assert len(factors) == 38
    for name, factor in factors.items():
        length = int(name.rpartition(" ")[2])
        assert (1.15 if length == 512 else 0.99) < factor < (1.4 if length == 512 else 1.15), name


def test_ratios_without_the_copies_are_sdpas_other_time_over_ours() -> None:
    """Where the record has our time, too."""
    (cell,) = (one for one in sm80_reach._backwards("sm80_in_order") if sm80_reach._name(one) == "128 causal 8192")
    ours = min(one["ms"] for name, one in cell["methods"].items() if sm80_reach._free(name))
    theirs = sm80_reach.record("sm80_calls")["calls"]["128 causal 8192"]["bwd"]["us"]["fa2"]
    recorded, computed = sm80_reach.without_copies("beside it, in none")["128 causal 8192"]
    assert recorded > computed == pytest.approx(theirs / ours / 1e3, rel=0.01)


def test_a_run_on_the_rows_of_today_takes_the_place_of_older_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(us: float) -> dict[str, Any]:
        return {"fwd": {"us": {"fa2tune": us, "fa2": 1.0}}}

    monkeypatch.setattr(sm80_reach, "CALLS", tmp_path)
    records = {
        "sm80_calls": {"64 full 512": call(1), "96 full 512": call(2)},
        "sm80_calls_shipped": {"96 full 512": call(0.5)},
    }
    for name, calls in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"peers": ["fa2tune"], "calls": calls}))
    found = sm80_reach.sm80_calls.ratios(sm80_reach.served("a100"), "forward", "fa2")
    assert found == {"64 full 512": 1.0, "96 full 512": 2.0}
    assert sm80_reach._line("x: 1.0", found, 1.5, 2.0, "") == (
        "| x: 1.0 | 1.41 | 1.00 (64 full 512) | 1 of 2 cells, mean by 29 % |  |"
    )
