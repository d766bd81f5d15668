"""Tables, Markdown and plots from results, and the scripts under benchmarks/ that build on them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import script
from rich.console import Console

from fa2tune.bench import plotting, tables
from fa2tune.bench.peers import PEERS
from fa2tune.fleet import lookup_cost
from fa2tune.rows.reader import read, shipped_paths
from fa2tune.spec.key import TuningKey


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
    assert tables.sections(data)[:2] == [("bf16", "fwd", "sustained"), ("bf16", "fwd", "time")]
    assert tables.on_screen(data)[0].title == "Forward, bfloat16, sustained, TFLOP/s"
    assert "**333**" in tables.markdown(data, "bf16", "fwd", "sustained")
    assert "333" not in tables.markdown(data, "bf16", "fwd", "time")
    names = {path.name for path in plotting.plots(data, tmp_path)}
    assert {"forward_bf16.png", "forward_bf16_sustained.png"} <= names and "backward_bf16_sustained.png" not in names


def test_averages_over_unequal_numbers_of_cells_say_so(data: dict[str, Any]) -> None:
    cells = tables.records(data, "time", **{"pass": "fwd"})
    assert "cells)" not in tables.sentence(cells).split(":")[0]
    more = {**cells[0], "head_dim": 128, "seqlen": 4096}
    assert "head dim 64 / 128 (2 / 1 cells): " in tables.sentence([*cells, more])


def test_every_peer_has_a_colour_of_its_own() -> None:
    assert set(plotting.COLOURS) == set(plotting.MARKERS) == set(PEERS)
    assert len(set(plotting.COLOURS.values())) == len(set(plotting.MARKERS.values())) == len(PEERS)


def test_markdown_has_every_cell(data: dict[str, Any]) -> None:
    lines = tables.markdown(data, "bf16", "fwd", "time").splitlines()
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


def test_averages_are_over_long_lengths_only(data: dict[str, Any]) -> None:
    for cell in data["cells"]:
        if cell["seqlen"] < tables.LONG and cell["kind"] == "time":
            cell["peers"]["sdpa-flash"]["ratio"] = 100.0
    data["cells"][0]["peers"]["sdpa-flash"]["ratio"] = 8.0
    means = tables.averages(tables.records(data, "time", **{"pass": "fwd"}))
    assert means == pytest.approx({"best": 0.8, "sdpa-flash": 4.0, "sdpa-cudnn": 0.8})
    assert tables.sentence([]) == ""


def test_averages_in_words_keep_head_dims_apart(data: dict[str, Any]) -> None:
    """What wins at one head dim does not hide what loses at another."""
    cells = tables.records(data, "time", **{"pass": "fwd"})
    others = [{**cell, "head_dim": 128, "peers": {**cell["peers"], "sdpa-flash": ok(100, 0.5)}} for cell in cells]
    for cell in others:
        del cell["peers"]["sdpa-cudnn"]
    said = tables.sentence([*cells, *others])
    assert "head dim 64 / 128: " in said and " / 0.50 x the best peer of each cell;" in said
    assert re.search(r"/ - x SDPA cuDNN \(2 of 4 cells\)", said) and "/ 0.50 x SDPA FlashAttention-2" in said


def test_a_row_without_our_figure_has_no_ratio(data: dict[str, Any]) -> None:
    cell = timed(4096, False, "fwd", fa2tune={"status": "wrong", "why": "w"}, **{"sdpa-flash": ok(200)})
    assert tables.ratio_to_best(cell) is None
    row = tables.markdown({**data, "cells": [cell]}, "bf16", "fwd", "time").splitlines()[2]
    assert row == "| 64 | full | 4k | wrong | **200** | - | - |"


def test_tables_on_screen(data: dict[str, Any]) -> None:
    console = Console(width=160, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    shown = tables.on_screen(data)
    for table in shown:
        console.print(table)
    text = " ".join(console.export_text().split())  # captions wrap
    assert len(shown) == 3  # forward, backward, memory
    assert "0.80 x the best peer of each cell" in text
    assert "3.00" in text and "skipped" in text
    assert tables.objections(data) == ["flex failed in 8 cells: E: no"]


def texts(figure: Any, axis: int | None = None) -> list[str]:
    """What stands in a figure, or in one of its panels."""
    from matplotlib.text import Text

    part = figure if axis is None else figure.axes[axis]
    return [found.get_text().strip() for found in part.findobj(Text) if found.get_text().strip()]


def test_plots_are_written_as_png_and_as_svg(data: dict[str, Any], tmp_path: Path) -> None:
    written = plotting.plots(data, tmp_path)
    names = ("forward_bf16", "backward_bf16", "memory", "overview")
    assert [path.name for path in written] == [f"{name}.{suffix}" for name in names for suffix in ("png", "svg")]
    for path in written:
        start = b"\x89PNG" if path.suffix == ".png" else b"<?xml"
        assert path.read_bytes().startswith(start) and path.stat().st_size > 10_000
    (tmp_path / "again").mkdir()
    again = plotting.plots(data, tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_panels_are_in_order_whatever_the_order_of_the_cells(data: dict[str, Any]) -> None:
    forward = tables.records(data, "time", **{"pass": "fwd"})
    data["cells"] = [{**cell, "head_dim": dim} for dim in (256, 64, 128) for cell in reversed(forward)]
    figure = plotting.plot_pass(data, "bf16", "fwd", "time")
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles == [f"head dim {dim}, {mask}" for dim in (64, 128, 256) for mask in ("full", "causal")]


def test_a_peer_that_is_not_in_a_cell_takes_no_room_there(data: dict[str, Any]) -> None:
    for cell in data["cells"]:
        if cell["seqlen"] == 512:
            cell["peers"] = {name: cell["peers"][name] for name in ("fa2tune", "sdpa-flash") if name in cell["peers"]}
    figure = plotting.plot_pass(data, "bf16", "fwd", "time")
    centres = sorted(bar.get_x() + bar.get_width() / 2 for bar in figure.axes[0].patches)
    assert sum(centres[:2]) == pytest.approx(0.0)  # two bars, one on each side of the tick
    assert "flex (2 of 4 cells)" not in texts(figure) and "torch SDPA: cuDNN (2 of 4 cells)" in texts(figure)


def test_the_figure_says_why_a_bar_is_absent(data: dict[str, Any]) -> None:
    whole = texts(plotting.plot_pass(data, "bf16", "fwd", "time"))
    assert not any("absent" in text or "not drawn" in text for text in whole), "every peer was in every cell"
    for cell in data["cells"]:
        if cell["seqlen"] == 512:
            cell["peers"].pop("sdpa-cudnn", None)
    [note] = [text for text in texts(plotting.plot_pass(data, "bf16", "fwd", "time")) if "absent" in text]
    assert note.endswith("the run that timed the cell was without that library: torch SDPA: cuDNN (in 2 of 4 cells).")


def test_a_peer_of_one_cell_makes_no_bar_thinner_and_is_named(data: dict[str, Any]) -> None:
    forward = tables.records(data, "time", **{"pass": "fwd"})
    data["cells"] = [{**cell, "head_dim": dim} for dim in (64, 128) for cell in forward]
    before = plotting.plot_pass(data, "bf16", "fwd", "time")
    entry = data["cells"][0]["peers"]["sdpa-flash"]
    data["cells"][0]["peers"] = {**data["cells"][0]["peers"], "sdpa-efficient": entry, "triton-plain": entry}
    after = plotting.plot_pass(data, "bf16", "fwd", "time")
    widths = [{round(bar.get_width(), 6) for axis in figure.axes for bar in axis.patches} for figure in (before, after)]
    assert widths[0] == widths[1] and len(widths[0]) == 1
    shown = " ".join(texts(after)).replace("\n", " ")
    assert (
        "Timed in few of the 8 cells and not drawn: fa2tune's kernels, untuned (1), torch SDPA: memory-efficient (1)."
        in shown
    )


def test_an_empty_cell_says_that_it_was_not_measured(data: dict[str, Any]) -> None:
    assert "not measured" not in texts(plotting.plot_pass(data, "bf16", "fwd", "time"))
    gone = ("time", "fwd", True, 4096)
    data["cells"] = [c for c in data["cells"] if (c["kind"], c["pass"], c["causal"], c["seqlen"]) != gone]
    figure = plotting.plot_pass(data, "bf16", "fwd", "time")
    assert "not measured" not in texts(figure, 0) and texts(figure, 1).count("not measured") == 1
    assert texts(figure, 1).count("failed") == 1  # as before, where a peer failed


def test_the_overview_shows_both_passes_with_the_ratio_to_the_best_peer(data: dict[str, Any]) -> None:
    assert plotting.overview_section(data) == ("bf16", "time", "causal")
    figure = plotting.plot_overview(data, "bf16", "time", "causal")
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["forward, head dim 64", "backward, head dim 64"]
    assert [texts(figure, panel).count("0.80") for panel in (0, 1)] == [2, 2]
    shown = texts(figure)
    assert "fa2tune (this library)" in shown and not any(text.startswith("torch Flex") for text in shown)  # no figure
    data["cells"] = [cell for cell in data["cells"] if cell["pass"] == "fwd"]
    assert plotting.overview_section(data) is None


def test_the_setting_names_all_days_of_measuring(data: dict[str, Any]) -> None:
    data["runs"].insert(0, {**data["runs"][0], "date": "2025-12-31T23:59:59"})
    assert tables.setting(data).endswith("Triton 3.6, 2025-12-31 to 2026-01-02")


def marked_page(path: Path, *parts: tuple[str, str]) -> Path:
    """A page whose parts hold "old"."""
    lines = [f"{begin}\nold\n{end}" for begin, end in (script("marked").markers(*part) for part in parts)]
    path.write_text("\n".join(["# title", *lines, "tail", ""]))
    return path


def test_bench_pages(data: dict[str, Any], tmp_path: Path) -> None:
    readme_table = script("readme_table")
    page = marked_page(tmp_path / "page.md", (readme_table.PART, readme_table.SCRIPT))
    readme = marked_page(tmp_path / "README.md", (readme_table.MEDIANS, readme_table.SCRIPT))
    results = tmp_path / "bench.json"
    results.write_text(json.dumps(data))
    readme_table.main.callback(results=[results], into=None, plots=tmp_path / "docs", page=page, readme=readme)
    text = page.read_text()
    assert text.startswith("# title\n") and text.endswith("\ntail\n") and "old" not in text
    assert "![Forward, bfloat16" in text and "](docs/forward_bf16" in text and "](docs/memory" in text
    assert "| torch | 2.11 |" in text
    assert "| 2026-01-02 03:04 | backward | interleaved | 64 | causal | 512, 4k |" in text
    text = readme.read_text()
    assert "NVIDIA X, driver 1.2, torch 2.11, Triton 3.6, 2026-01-02, bfloat16." in text and "old" not in text


def test_medians_are_of_peers_that_ran_everywhere(data: dict[str, Any]) -> None:
    """A peer that failed in a cell has no median beside peers that did not."""
    fast, slow = (
        cell for cell in data["cells"] if cell["kind"] == "time" and cell["pass"] == "fwd" and not cell["causal"]
    )
    fast["peers"]["sdpa-cudnn"]["ratio"], slow["peers"]["sdpa-cudnn"]["ratio"] = 1.5, 1.1
    data["cells"].append(timed(4096, True, "fwd", "sustained", fa2tune=ok(333, 1.0), fa4=ok(300, 1.1)))
    lines = script("readme_table").medians(data).splitlines()
    assert [title.strip() for title in lines[0].split("|")[1:-1]] == [
        "pass", "head dim", "x SDPA cuDNN", "x SDPA FlashAttention-2", "x best peer", "x best peer, sustained",
        "cells (sustained)",
    ]  # fmt: skip
    assert lines[2] == "| forward | 64 | 0.95 | 2.00 | 0.95 (0.80 to 1.50) | 1.10 (1.10 to 1.10) | 4 (1) |"
    assert lines[3] == "| backward | 64 | 0.80 | 2.00 | 0.80 (0.80 to 0.80) | - | 4 (0) |"


def test_runs_table_states_versions_that_differ(data: dict[str, Any]) -> None:
    data["runs"].append({**data["runs"][0], "triton": "3.9", "date": "2026-02-01T00:00:00"})
    data["cells"].append({**timed(1024, True, "fwd", fa2tune=ok(1, 1.0)), "run": 1})
    shared, text = script("readme_table").runs(data)
    assert "Triton" not in shared and "| torch | 2.11 |" in shared
    assert text.startswith("| started (UTC) | pass | timing | head dim | mask | lengths | Triton |")
    assert "| 2026-02-01 00:00 | forward | interleaved | 64 | causal | 1k | 3.9 |" in text


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


def test_what_stands_in_for_a_row() -> None:
    script_, rows = script("lookup_cost"), read(next(path for path in shipped_paths() if path.stem == "h200"))
    key = TuningKey("h200", 132, 90, "fwd", "bf16", "ieee", 128, 128, "causal", 2048)
    assert any(row.key == key for row in rows)
    found = list(script_.contenders(key, rows))
    steps = [step for step, _ in found]
    assert steps[0] == script_.OWN and steps[-2:] == [lookup_cost.WITHOUT_TMA, lookup_cost.DEFAULT]
    assert steps.count("bucket: next shorter") == steps.count("bucket: next longer") == 1
    assert steps.count("bucket: 4 times off") == 2  # 512 and 8k
    assert "LOADS" not in found[0][1] and "LOADS" in found[-2][1]  # the winner is warp-specialised
    backward = list(script_.contenders(key.with_(kernel="bwd"), rows))
    assert backward[0][1]["strategy"] in ("split", "fused") and backward[-1][1]["strategy"] == "split"
    assert not list(script_.contenders(key.with_(head_dim=40, head_dim_v=40), rows))


def test_lookup_costs_by_step() -> None:
    cases = [{"kernel": "fwd", "step": lookup_cost.DEFAULT, "cost": value} for value in (0.0, 0.1, 0.5)]
    text = lookup_cost.markdown(
        lookup_cost.summary([*cases, {"kernel": "bwd", "step": lookup_cost.WITHOUT_TMA, "cost": 0.25}])
    )
    assert "| forward | documented default | 3 | 10.0 % | 42.0 % | 50.0 % |" in text
    assert "| backward | tensors that TMA cannot address | 1 | 25.0 % | 25.0 % | 25.0 % |" in text


def test_a_lookup_cost_is_told_where_it_was_measured_only() -> None:
    key = TuningKey("h200", 132, 90, "fwd", "bf16", "ieee", 128, 128, "causal", 2048)
    said = lookup_cost.cost_line(key, lookup_cost.step_between(key, key.with_(bucket=4096)))
    assert said is not None and said.startswith("bucket: next longer: median ")
    assert lookup_cost.step_between(key, key) is None and lookup_cost.cost_line(key, None) is None
    assert lookup_cost.cost_line(key, lookup_cost.step_between(key, key.with_(bucket=4096, dtype="fp16"))) is None
    for other in (
        {"head_dim": 96, "head_dim_v": 96},
        {"gpu": "a100-sxm-80gb"},
        {"dtype": "fp32"},
        {"kernel": "bwd_dq"},
    ):
        assert lookup_cost.cost_line(key.with_(**other), lookup_cost.DEFAULT) is None


def test_host_time_is_per_call() -> None:
    host_time = script("host_time")
    counted: dict[str, int] = {"a": 0, "b": 0}

    def call(name: str) -> Any:
        counted[name] += 1

    times = host_time.host_microseconds({name: lambda name=name: call(name) for name in counted}, lambda: None, 3, 5)
    assert counted == {"a": 20, "b": 20}
    assert set(times) == {"a", "b"} and all(0 < us < 1000 for us in times.values())
