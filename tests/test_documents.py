"""README and docs/: tables are what the scripts write, links lead somewhere, the front door is short."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from benchmark_scripts import BENCHMARKS, script

from fa2tune.compiling import registry
from fa2tune.fleet import lookup_cost

ROOT = Path(__file__).parent.parent
TABLES = BENCHMARKS / "tables"


@pytest.mark.parametrize("page", ["nothing here", "{end}\n{begin}", "{begin}\n{begin}\n{end}"])
def test_markers_must_be_there_once_and_in_order(page: str, tmp_path: Path) -> None:
    marked = script("marked")
    begin, end = marked.markers("bench", "readme_table")
    text = page.format(begin=begin, end=end)
    with pytest.raises(ValueError, match="needs the lines"):
        marked.replaced(text, "bench", "readme_table", "text")
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="needs the lines"):
        marked.write(path, "bench", "readme_table", "text")
    with pytest.raises(click.ClickException, match="needs the lines"):
        marked.publish(path, "bench", "readme_table", "text")
    assert path.read_text() == text


PAGES = (
    ("README.md", "readme_table", "medians"),
    ("docs/a100.md", "sm80_reach", "reach"),
    ("docs/benchmarks.md", "specialized_table", "rows"),
    ("docs/benchmarks.md", "workloads", "workloads"),
    ("docs/drop-ins.md", "combinations_table", "combinations"),
    ("docs/lookup.md", "lookup_cost", "lookup"),
    ("docs/experiments/mma-sync.md", "sm80_reach", "layout"),
    ("docs/model.md", "sm80_published", "published"),
    ("docs/search.md", "pruning", "pruning"),
    ("docs/serve.md", "models_table", "models"),
)


@pytest.mark.parametrize(("page", "name", "part"), PAGES)
def test_tables_in_the_documents_are_what_the_scripts_write(page: str, name: str, part: str, tmp_path: Path) -> None:
    """From the recorded results and the shipped files: no figure is edited by hand, none is of an older file."""
    copy = tmp_path / "page.md"
    copy.write_bytes((ROOT / page).read_bytes())
    source = script(name)
    if name == "readme_table":
        recorded = json.loads((ROOT / "docs/bench/h200_bf16.json").read_text())
        text = f"{source.tables.setting(recorded)}, bfloat16.\n\n{source.medians(recorded)}"
        source.marked.write(copy, part, name, text)
    elif name == "models_table":
        if importlib.util.find_spec("transformers") is None:
            assert not os.environ.get("FA2TUNE_CI"), "pip install '.[models]'"
            pytest.skip("Transformers, which reads configs of models, is not installed")
        source.main.callback(paths=tuple((ROOT / "tests/fixtures/models").glob("*.json")), page=copy)
    elif name == "pruning":
        source.main.callback(paths=(*sorted(TABLES.glob("*.gz")), *sorted((TABLES / "blind").glob("*.gz"))), page=copy)
    elif name == "workloads":
        arguments = ["--table", str(ROOT / "docs/bench/h200_workloads.json"), "--page", str(copy)]
        source.main.main(arguments, standalone_mode=False)
    elif name in ("combinations_table", "sm80_published"):
        source.main.callback(page=copy)
    elif name == "sm80_reach":
        source.main.callback(part=part, page=copy)
    elif name == "specialized_table":
        source.main.callback(cache=ROOT / "cache/h200.sqlite", page=copy)
    else:
        source.main.callback(caches=(), out=ROOT / "cache/lookup_cost.json", head_dims=(), dtype="bf16", seconds=0.0,
                             markdown=False, page=copy)  # fmt: skip
    assert copy.read_text() == (ROOT / page).read_text()


README = (ROOT / "README.md").read_text(encoding="utf-8")


def words(text: str) -> int:
    """Outside of tables."""
    return sum(len(line.split()) for line in text.splitlines() if not line.startswith("|"))


def test_the_front_door_is_short() -> None:
    assert words(README) <= 800
    assert words(README.partition("```python")[0]) <= 60
    assert words(README.partition("layout=")[0]) <= 200, "installation and use come first"
    assert README.index("pip install") < README.index("layout=")
    for command in ("make tune", "make test"):
        assert command in README


def test_figures_in_the_readme_are_those_of_its_table() -> None:
    """The sentence that says why: ranges over the table's medians; the one that says when not: the shipped lookup costs."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in README.splitlines()]
    head = next(row for row in rows if row[:2] == ["pass", "head dim"])
    medians = [dict(zip(head, row, strict=True)) for row in rows if row and row[0] in ("forward", "backward")]
    said = " ".join(README.split())
    for pass_, peer, before in (("forward", "cuDNN", "forward "), ("backward", "cuDNN", "backward ")):
        found = [row[f"x SDPA {peer}"] for row in medians if row["pass"] == pass_]
        assert f"{before}{min(found)} to {max(found)}" in said
    older = [float(row["x SDPA FlashAttention-2"]) for row in medians]
    assert f"{min(older):.1f} to {max(older):.1f} times" in said
    newest = [float(row["x FlashAttention-4"]) for row in medians]
    assert f"{min(newest)} to {max(newest)} times FlashAttention-4" in said
    costs = lookup_cost.summary(lookup_cost.shipped_cases()[1])
    default = [f"{100 * costs[pass_, lookup_cost.DEFAULT].median:.0f} %" for pass_ in ("forward", "backward")]
    assert "Without a tuned config calls take [{} and {} longer]".format(*default) in said


def test_figures_of_few_key_heads_and_copies_are_those_of_the_record() -> None:
    """Gains that the changelog and the page of the experiment name; tables of the page, in whole microseconds."""
    record = json.loads((ROOT / "benchmarks/calls/group_parts.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/experiments/group-parts.md").read_text(encoding="utf-8")
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    few = [one for one in record["parts"] if one["shape"][2] <= 2]
    plain, exact = (
        [one["us"]["1"] / min(one["us"].values()) for one in few if one["deterministic"] == kind]
        for kind in (False, True)
    )
    copies = [
        one[pass_]["as they are"] / one[pass_]["copied"]
        for one in record["copies"] if one["kind"] != "expanded" for pass_ in ("fwd", "bwd")
    ]  # fmt: skip
    for text in (page, log):
        assert f"{min(plain):.1f} to {max(plain):.1f} times as fast with one or two key heads" in text
        assert f"deterministic {min(exact):.1f} to {max(exact):.1f}" in text
        assert f"{min(copies):.1f} to {max(copies):.1f} times as fast" in text
    for one in record["parts"]:
        assert ", ".join(f"{parts}: {us:.0f}" for parts, us in one["us"].items()) in page, one["shape"]
    for length in {one["seqlen"] for one in record["copies"]}:
        for pass_, name in (("fwd", "forward"), ("bwd", "backward")):
            alike = [one[pass_] for one in record["copies"] if one["seqlen"] == length]
            cells = " | ".join(f"{us['as they are']:.0f} / {us['copied']:.0f}" for us in alike)
            assert f"| {length} | {name} | {cells} |" in page


def test_figures_of_head_dims_in_parts_are_those_of_the_record() -> None:
    """The table of the page, and what the config of today's rules gains; the changelog names the least and most of that."""
    record = json.loads(gzip.decompress((ROOT / "benchmarks/calls/head_dims.json.gz").read_bytes()))
    page = (ROOT / "docs/experiments/head-dims.md").read_text(encoding="utf-8")
    measured, variant = script("head_dims"), registry.variant_named("sm90/fwd")
    assert [(tuple(call["shape"]), call["causal"]) for call in record["calls"]] == list(measured.CALLS)
    gains = []
    for call in record["calls"]:
        us = {one["name"]: one["us"] for one in call["raced"]}
        assert f"| {' | '.join(cells_of_parts(call))} |" in page
        padded, *in_parts = call["raced"]
        spec = measured.posed(tuple(call["shape"]), call["causal"]).specialization
        ours = variant.fitted(spec, padded["config"])
        gains += [us["padded"] / one["us"] for one in in_parts if one["config"] == ours]
    assert f"{min(gains):.2f} to {max(gains):.2f} times as fast" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    of_today = (
        "96 {:.2f}, 80 {:.2f}, 192 {:.2f}, 192 / 128 {:.2f}, 160 {:.2f}, 72 {:.2f}, 40 {:.2f}, 80 at 257 tokens {:.2f}"
    )
    assert of_today.format(*gains) in " ".join(page.split())


LOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["head_dims_bwd_tried"])
def test_figures_of_the_backward_in_parts_are_those_of_the_record(name: str) -> None:
    record = json.loads(gzip.decompress((ROOT / f"benchmarks/calls/{name}.json.gz").read_bytes()))
    page = (ROOT / "docs/experiments/head-dims.md").read_text(encoding="utf-8")
    assert f"`benchmarks/calls/{name}.json.gz`" in page and record["gpu"] == "NVIDIA H200"
    for call in record["calls"]:
        assert f"| {' | '.join(cells_of_parts(call))} |" in page
    wide = [{one["name"]: one["us"] for one in call["raced"]} for call in record["calls"] if call["shape"][4] > 64]
    gains = [us["padded"] / us["parts"] for us in wide]
    assert len(gains) == 11
    ours = []
    for call in record["calls"]:
        spec = script("head_dims").posed(tuple(call["shape"]), call["causal"]).specialization
        padded, *others = call["raced"]
        variants = {kernel: registry.variant_named(f"sm90/{kernel}") for kernel in padded["configs"]}
        # a dimension that the search has gained since is in none of them, and these two have changed since
        today = {
            kernel: one.space.completed(one.fitted(spec, padded["configs"][kernel]))
            | {
                name: padded["configs"][kernel][name] for name in ("ORDER", "EXPONENTIALS_FIRST")
                if name in padded["configs"][kernel]
            }
            for kernel, one in variants.items()
        }  # fmt: skip
        ours += [
            padded["us"] / one["us"] for one in others
            if {kernel: variants[kernel].space.completed(config) for kernel, config in one["configs"].items()} == today
        ]  # fmt: skip
    of_today = "96 causal {:.2f}, 80 causal {:.2f}, 96 without a mask {:.2f}, 80 without a mask {:.2f}"
    assert of_today.format(*ours) in " ".join(page.split())
    assert f"{min(gains):.2f} to {max(gains):.2f} times as fast as padded columns (eleven calls)" in LOG


def cells_of_parts(call: dict[str, Any]) -> tuple[str, ...]:
    """A call's row of the table: padded time, how much faster parts are, and their best change."""
    batch, heads, groups, length, dim, dim_v = call["shape"]
    us = {one["name"]: one["us"] for one in call["raced"]}
    changed = {name.partition(" ")[2]: value for name, value in us.items() if name.startswith("parts ")}
    name = min(changed, key=lambda name: changed[name])
    spread = max((max(one["bursts"]) - min(one["bursts"])) / one["us"] for one in call["raced"])
    best = name.replace(" ", ", ")
    if "configs" in call["raced"][0]:  # a backward's
        best = f"`{best}`"
    return (
        f"{dim} / {dim_v}" if dim != dim_v else f"{dim}", f"{batch} x {heads} / {groups} x {length}",
        ("causal" if call["causal"] else "full") + (", split" if call.get("split") else ""), f"{us['padded']:.1f}",
        f"{us['padded'] / us['parts']:.2f}", f"{us['padded'] / changed[name]:.2f}: {best}",
        f"{100 * spread:.0f} %",
    )  # fmt: skip


def test_where_the_readme_says_a_peer_is_faster_it_is() -> None:
    """Backward, head dim 128, no mask, sustained, from 8k up; nowhere else."""
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    section = page.partition("### Backward, bfloat16, sustained")[2].partition("\n### ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    behind = {(dim, mask, length): float(rest[-1]) for dim, mask, length, *rest in rows[2:] if float(rest[-1]) < 1}
    assert behind.keys() == {("128", "full", "8k"), ("128", "full", "16k")}
    assert f"[sustained](#measured) | | {min(behind.values())} to {max(behind.values())} |" in README


def links(page: Path) -> list[str]:
    found = re.findall(
        r"\]\(([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    )
    return [link for link in found if "://" not in link]


PAGES_WITH_LINKS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "cache").glob("*.md")]


@pytest.mark.parametrize("page", PAGES_WITH_LINKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    """The site's build checks its pages; README and CONTRIBUTING are read in the repository, too."""
    assert [link for link in links(page) if not (page.parent / link).exists()] == []


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as the site makes them; of equal ones the first."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S), re.M)
    words = (re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in words}


@pytest.mark.parametrize("page", PAGES_WITH_LINKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_headings(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    found = re.findall(r"\]\(([^)#\s]*\.md|)#([^)\s]+)\)", text)
    assert [
        f"{link}#{anchor}" for link, anchor in found
        if "://" not in link and anchor not in anchors(page.parent / link if link else page)
    ] == []  # fmt: skip


NAMED = re.compile(r"`((?:benchmarks|docs|examples|fa2tune|kernels|search_spaces|tests)/[\w./-]+)`")


@pytest.mark.parametrize("page", PAGES_WITH_LINKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_are_there(page: Path) -> None:
    assert [name for name in NAMED.findall(page.read_text(encoding="utf-8")) if not (ROOT / name).exists()] == []


def test_the_model_prunes_the_best_pointer_config_of_a_recorded_key() -> None:
    """docs/search.md says that per load variant the rule loses something: this is where, and how much."""
    pruning = script("pruning")
    found = {
        load: rest
        for load, *rest in pruning.figures(pruning.tables.load(TABLES / "h200_fwd_bf16_128_causal_4096.jsonl.gz"))
    }
    _, estimate, _, kept, lost = found["pointer"]
    assert estimate > pruning.PRUNED_BEYOND and 1.0 < kept < 1.02 and lost > pruning.NEAR
    _, estimate, near, kept, lost = found["descriptor"]
    assert estimate < near < pruning.PRUNED_BEYOND and kept == 1.0 and lost > pruning.NEAR


def level(ratios: Sequence[float]) -> int:
    """How many are level, as README has it."""
    return sum(ratio >= 0.99 for ratio in ratios)


def ratios_of(drawing: bytes) -> list[list[float]]:
    """Speeds over the fastest peer's, forward and backward."""
    calls = json.loads(drawing)["calls"].values()
    return [[call[pass_]["ratio"] for call in calls] for pass_ in ("fwd", "bwd")]


def test_the_readme_has_the_counts_of_the_recorded_calls_of_models() -> None:
    calls = json.loads((ROOT / "docs/bench/h200_workloads.json").read_text(encoding="utf-8"))["calls"]
    many = [call for call in calls.values() if call["seqlen_q"] > 16]
    ahead = {pass_: sum(call[pass_]["ratio"] >= 0.99 for call in many) for pass_ in ("fwd", "bwd")}
    means = {
        pass_: statistics.geometric_mean(call[pass_]["ratio"] for call in many) for pass_ in ("fwd", "bwd")
    }  # fmt: skip
    assert f"Of {len(many)} [calls of models]" in README
    assert f"{ahead['fwd']} forward and {ahead['bwd']} backward" in README
    assert f"(geometric means {means['fwd']:.2f} and {means['bwd']:.2f})" in README
    both = [
        ratios_of(gzip.decompress((ROOT / f"benchmarks/calls/random_calls_{number}.json.gz").read_bytes()))
        for number in (26, 27)
    ]
    drawn = [[*one, *other] for one, other in zip(*both, strict=True)]
    packed = ratios_of((ROOT / "benchmarks/calls/random_packings_12.json").read_bytes())
    least = [f"level in {level(its)} of {len(its)}, least {min(its):.2f}" for its in drawn]
    ranges = [f"level in {level(its)} of {len(its)}, {min(its):.2f} to {max(its):.2f}" for its in packed]
    for cells in (least, ranges):
        assert f"| {cells[0]} | {cells[1]} |" in README
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    counts = [(level(its), statistics.geometric_mean(its)) for its in packed]
    forward, backward = ("in {}, geometric mean {:.2f}", "in {}, {:.2f}")
    assert f"level (at least 0.99) {forward.format(*counts[0])}, none below 0.9" in page
    assert f"backwards {backward.format(*counts[1])}, three below 0.9" in page
    assert [sum(ratio < 0.9 for ratio in its) for its in packed] == [0, 3]
    cases = json.loads((ROOT / "benchmarks/calls/few_queries.json").read_text(encoding="utf-8"))["cases"]
    decoding = [case for case in cases if case["problem"]["seqlen_q"] == 1]
    few = [min(case["us"]["cudnn"], case["us"]["flash"]) / case["us"][case["served"]] for case in decoding]
    assert f"few-queries.md) | {min(few):.2f} to {max(few):.2f} |" in README


def test_pages_have_the_recorded_times_of_windows_packed_calls_and_mma_sync_kernels() -> None:
    def record(name: str) -> Any:
        return json.loads((ROOT / f"benchmarks/calls/{name}.json").read_text(encoding="utf-8"))

    windows = (ROOT / "docs/experiments/windows.md").read_text(encoding="utf-8")
    ratios = [entry["ratio"] for entry in record("windows")["entries"]]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times the share" in windows
    assert f"met by {sum(ratio <= 1.15 for ratio in ratios)} of {len(ratios)}" in windows
    fixed_cost = script("windows").fixed_cost
    fitted = {one: fixed_cost(entry) for one, entry in enumerate(record("windows")["entries"])}
    # in the record's order a shape's passes by portable kernels come first; in the table each pass has both
    for first in range(0, len(fitted), 6):
        cells = [fitted[first + place][0] for place in (0, 3, 1, 4, 2, 5)]
        shape = record("windows")["entries"][first]["shape"]
        row = next(line for line in windows.partition("### a / b")[2].splitlines() if line.startswith(f"| {shape} |"))
        said = [cell.split() for cell in row.split("|")[2:-1]]
        assert [int(cell[0]) for cell in said[:6]] == [round(keys) for keys in cells]
        for cell, keys in zip(said[:6], cells, strict=True):
            assert len(cell) == 1 or cell[1] == f"({keys / int(cell[3][:-1]):.1f}"
        needed = [fitted[first + place][1] for place in range(6)]
        assert " ".join(said[6]) == f"{min(needed):.0f} to {max(needed):.0f}"
    packed = (ROOT / "docs/experiments/varlen.md").read_text(encoding="utf-8")
    for name, found in record("packed")["packings"].items():
        assert f"| {name} | {found['tflops']['packed forward']} |" in packed
    mma = (ROOT / "docs/experiments/mma-sync.md").read_text(encoding="utf-8")
    names = {"fwd": "forward", "bwd": "backward"}
    rows: dict[str, list[str]] = {}
    for cell in record("sm80_race")["cells"]:
        best = max(found["ratio"] for name, found in cell["methods"].items() if not name.startswith("SDPA"))
        rows.setdefault(f"{names[cell['pass']]}, {cell['head_dim']}, {cell['mask']}", []).append(f"{best:.2f}")
    assert len(rows) == 8
    for row, cells in rows.items():
        assert f"| {row} | {' | '.join(cells)} |" in mma
