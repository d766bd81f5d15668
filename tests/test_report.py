"""Tables, Markdown and plots from results, and the scripts under benchmarks/ that build on them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from fa2tune.bench import report
from fa2tune.bench.peers import PEERS
from fa2tune.fleet import regret
from fa2tune.problem import TuningKey
from fa2tune.rows.reader import read, shipped_paths

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ok(tflops: float, ratio: float | None = None) -> dict[str, Any]:
    entry = {"status": "ok", "ms": 1.0, "low_ms": 0.9, "high_ms": 1.2, "tflops": tflops}
    return entry if ratio is None else {**entry, "ratio": ratio}


def timed(seqlen: int, causal: bool, pass_: str, kind: str = "time", **peers: Any) -> dict[str, Any]:
    return {
        "kind": kind, "dtype": "bf16", "head_dim": 64, "causal": causal, "seqlen": seqlen, "batch": 1, "heads": 32,
        "pass": pass_, "peers": peers, "run": 0,
    }  # fmt: skip


@pytest.fixture
def data() -> dict[str, Any]:
    cells = [
        timed(seqlen, causal, pass_, fa2tune=ok(400, 1.0), **{
            "sdpa-flash": ok(200, 2.0), "sdpa-cudnn": ok(500, 0.8),
            "flex": {"status": "failed", "why": "E: no"}, "standard": {"status": "skipped", "why": "large"},
        })
        for seqlen, causal, pass_ in itertools.product((4096, 512), (True, False), ("fwd", "bwd"))
    ]  # fmt: skip
    memory = [
        {
            **timed(length, False, pass_, fa2tune={"status": "ok", "peak_bytes": length << 12}, standard=standard),
            "kind": "memory",
        }
        for pass_ in ("fwd", "both")
        for length, standard in (
            (512, {"status": "ok", "peak_bytes": 3 << 30}),
            (1024, {"status": "skipped", "why": "large"}),
        )
    ]
    run = {
        "gpu": "NVIDIA X",
        "driver": "1.2",
        "torch": "2.11",
        "triton": "3.6",
        "cudnn": None,
        "date": "2026-01-02T03:04:05",
    }
    return {"schema": 1, "complete": True, "runs": [run], "cells": cells + memory}


def test_sustained_cells_have_tables_and_plots_of_their_own(data: dict[str, Any], tmp_path: Path) -> None:
    alone = timed(4096, True, "fwd", "sustained", fa2tune=ok(333, 1.0), fa4=ok(300, 1.1))
    data["cells"].append(alone)
    assert report.sections(data)[:2] == [("bf16", "fwd", "sustained"), ("bf16", "fwd", "time")]
    assert report.tables(data)[0].title == "Forward, bfloat16, sustained, TFLOP/s"
    assert "**333**" in report.markdown(data, "bf16", "fwd", "sustained")
    assert "333" not in report.markdown(data, "bf16", "fwd", "time")
    names = {path.name for path in report.plots(data, tmp_path)}
    assert {"forward_bf16.png", "forward_bf16_sustained.png"} <= names and "backward_bf16_sustained.png" not in names


def test_averages_over_unequal_numbers_of_cells_say_so(data: dict[str, Any]) -> None:
    cells = report.records(data, "time", **{"pass": "fwd"})
    assert "cells)" not in report.sentence(cells).split(":")[0]
    more = {**cells[0], "head_dim": 128, "seqlen": 4096}
    assert "head dim 64 / 128 (2 / 1 cells): " in report.sentence([*cells, more])


def test_every_peer_has_a_colour_of_its_own() -> None:
    assert set(report.COLOURS) == set(PEERS)
    assert len(set(report.COLOURS.values())) == len(PEERS)


def test_markdown_has_every_cell(data: dict[str, Any]) -> None:
    lines = report.markdown(data, "bf16", "fwd", "time").splitlines()
    assert lines[0].startswith(
        "| head dim | mask | length | fa2tune | SDPA cuDNN | SDPA FlashAttention-2 | FlexAttention"
    )
    assert lines[2] == "| 64 | full | 512 | 400 | **500** | 200 | failed | skipped | 2.00 | 0.80 |"
    assert [line.split(" | ")[1:3] for line in lines[2:]] == [
        ["full", "512"],
        ["full", "4k"],
        ["causal", "512"],
        ["causal", "4k"],
    ]
    assert len({line.count("|") for line in lines}) == 1
    assert len(report.markdown(data, "bf16", "fwd", "time", seqlens=[4096]).splitlines()) == 4


def test_averages_are_over_long_lengths_only(data: dict[str, Any]) -> None:
    for cell in data["cells"]:
        if cell["seqlen"] < report.LONG and cell["kind"] == "time":
            cell["peers"]["sdpa-flash"]["ratio"] = 100.0
    data["cells"][0]["peers"]["sdpa-flash"]["ratio"] = 8.0
    means = report.averages(report.records(data, "time", **{"pass": "fwd"}))
    assert means == pytest.approx({"best": 0.8, "sdpa-flash": 4.0, "sdpa-cudnn": 0.8})
    assert report.sentence([]) == ""


def test_averages_in_words_keep_head_dims_apart(data: dict[str, Any]) -> None:
    """What wins at one head dim does not hide what loses at another."""
    cells = report.records(data, "time", **{"pass": "fwd"})
    others = [{**cell, "head_dim": 128, "peers": {**cell["peers"], "sdpa-flash": ok(100, 0.5)}} for cell in cells]
    for cell in others:
        del cell["peers"]["sdpa-cudnn"]
    said = report.sentence([*cells, *others])
    assert "head dim 64 / 128: " in said and " / 0.50 x the best peer of each cell;" in said
    assert re.search(r"/ - x SDPA cuDNN \(2 of 4 cells\)", said) and "/ 0.50 x SDPA FlashAttention-2" in said


def test_a_row_without_our_figure_has_no_ratio(data: dict[str, Any]) -> None:
    cell = timed(4096, False, "fwd", fa2tune={"status": "wrong", "why": "w"}, **{"sdpa-flash": ok(200)})
    assert report.ratio_to_best(cell) is None
    row = report.markdown({**data, "cells": [cell]}, "bf16", "fwd", "time").splitlines()[2]
    assert row == "| 64 | full | 4k | wrong | **200** | - | - |"


def test_tables_on_screen(data: dict[str, Any]) -> None:
    console = Console(width=160, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    shown = report.tables(data)
    for table in shown:
        console.print(table)
    text = " ".join(console.export_text().split())  # captions wrap
    assert len(shown) == 3  # forward, backward, memory
    assert "0.80 x the best peer of each cell" in text
    assert "3.00" in text and "skipped" in text
    assert report.objections(data) == ["flex failed in 8 cells: E: no"]


def test_plots_are_written(data: dict[str, Any], tmp_path: Path) -> None:
    written = report.plots(data, tmp_path)
    assert [path.name for path in written] == ["forward_bf16.png", "backward_bf16.png", "memory.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in written)


def test_readme_section(data: dict[str, Any], tmp_path: Path) -> None:
    readme_table = script("readme_table")
    readme = tmp_path / "README.md"
    readme.write_text(f"# title\n{readme_table.BEGIN}\nold\n{readme_table.END}\ntail\n")
    results = tmp_path / "bench.json"
    results.write_text(json.dumps(data))
    readme_table.main.callback(results=[results], into=None, plots=tmp_path / "docs", readme=readme)
    text = readme.read_text()
    assert text.startswith("# title\n") and text.endswith("\ntail\n") and "old" not in text
    assert "![Forward, bfloat16" in text and "](docs/forward_bf16.png)" in text and "](docs/memory.png)" in text
    assert "NVIDIA X, driver 1.2, torch 2.11, Triton 3.6, 2026-01-02" in text
    with pytest.raises(ValueError, match="needs the lines"):
        readme_table.replaced("nothing here", "text")


def test_of_several_results_files_the_last_counts() -> None:
    def of(date: str, *cells: Any) -> dict[str, Any]:
        return {"schema": 1, "complete": True, "runs": [{"date": date}], "cells": list(cells)}

    old = of("old", timed(512, False, "fwd", fa2tune=ok(1)), timed(512, False, "bwd", fa2tune=ok(2)))
    gone = of("gone", timed(512, True, "fwd", fa2tune=ok(3)))
    new = of("new", timed(512, False, "fwd", fa2tune=ok(4)), timed(512, True, "fwd", fa2tune=ok(5)))
    one = script("readme_table").merged([old, gone, new])
    assert [run["date"] for run in one["runs"]] == ["old", "new"]
    found = {(c["pass"], c["causal"]): (c["peers"]["fa2tune"]["tflops"], c["run"]) for c in one["cells"]}
    assert found == {("fwd", False): (4, 1), ("bwd", False): (2, 0), ("fwd", True): (5, 1)}


def test_who_stands_in_for_a_row() -> None:
    script_, rows = script("rung_regret"), read(shipped_paths()[-1])
    key = TuningKey("h200", 132, 90, "fwd", "bf16", "ieee", 128, 128, True, 2048)
    assert any(row.key == key for row in rows)
    found = list(script_.contenders(key, rows))
    rungs = [rung for rung, _ in found]
    assert rungs[0] == script_.OWN and rungs[-2:] == [regret.PORTABLE, regret.DEFAULT]
    assert rungs.count("bucket: next shorter") == rungs.count("bucket: next longer") == 1
    assert rungs.count("bucket: 4 times off") == 2  # 512 and 8k
    assert "LOADS" not in found[0][1] and "LOADS" in found[-2][1]  # the winner is warp-specialised
    backward = list(script_.contenders(key.with_(kernel="bwd"), rows))
    assert backward[0][1]["road"] in ("split", "fused") and backward[-1][1]["road"] == "split"
    assert not list(script_.contenders(key.with_(head_dim=40, head_dim_v=40), rows))


def test_regrets_by_rung() -> None:
    cases = [{"kernel": "fwd", "rung": regret.DEFAULT, "regret": value} for value in (0.0, 0.1, 0.5)]
    text = regret.markdown(regret.summary([*cases, {"kernel": "bwd", "rung": regret.PORTABLE, "regret": 0.25}]))
    assert "| forward | documented default | 3 | 10.0 % | 42.0 % | 50.0 % |" in text
    assert "| backward | tensors that TMA cannot address | 1 | 25.0 % | 25.0 % | 25.0 % |" in text


def test_a_regret_is_told_where_it_was_measured_only() -> None:
    key = TuningKey("h200", 132, 90, "fwd", "bf16", "ieee", 128, 128, True, 2048)
    said = regret.told(key, regret.rung_between(key, key.with_(bucket=4096)))
    assert said is not None and said.startswith("bucket: next longer: median ")
    assert regret.rung_between(key, key) is None and regret.told(key, None) is None
    assert regret.told(key, regret.rung_between(key, key.with_(bucket=4096, dtype="fp16"))) is None
    for other in (
        {"head_dim": 96, "head_dim_v": 96},
        {"gpu": "a100-sxm-80gb"},
        {"dtype": "fp32"},
        {"kernel": "bwd_dq"},
    ):
        assert regret.told(key.with_(**other), regret.DEFAULT) is None


def test_host_time_is_per_call() -> None:
    host_time = script("host_time")
    counted: dict[str, int] = {"a": 0, "b": 0}

    def call(name: str) -> Any:
        counted[name] += 1

    times = host_time.host_microseconds({name: lambda name=name: call(name) for name in counted}, lambda: None, 3, 5)
    assert counted == {"a": 20, "b": 20}
    assert set(times) == {"a", "b"} and all(0 < us < 1000 for us in times.values())
