"""The page of ``fa2tune report``: whole, self-contained, and right about what it shows."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from cache_rows import CONFIG, FULL, KEY, row
from click.testing import CliRunner
from optuna.distributions import CategoricalDistribution, IntDistribution

from fa2tune import gpus
from fa2tune.bench import report
from fa2tune.cli import main
from fa2tune.page import charts, facts, page, searches, sources, svg
from fa2tune.problem import TuningKey
from fa2tune.rows import reader
from fa2tune.rows.row import MARGIN, MEASURED, PREDICTED, Row
from fa2tune.rows.store import export
from fa2tune.sharing.shelf import Shelf
from fa2tune.sharing.storage import Storage
from fa2tune.tuning import plan, tuner
from fa2tune.tuning.books import Hands
from fa2tune.tuning.family import HOPELESS
from fa2tune.tuning.study import KeyStudy, Outcome, study_name

ROOT = Path(__file__).parent.parent
EVIL = "<script>alert(1)</script>\"'&</style>"
#: Elements that HTML closes by itself.
VOID = {"meta", "input", "br", "link", "img"}


class Document(HTMLParser):
    """Checks that elements nest; keeps attributes, rows of winners and the embedded JSON."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, Any] = {}
        self.words: list[str] = []
        self._json = False
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._json = dict(attrs).get("id") == "details"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._json:
            self.data = json.loads(data)
            self._json = False
        elif self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def winners(self) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.tags if tag == "tr" and "data-n" in attrs]


def tokens_of(rows: Sequence[Row]) -> set[str]:
    return {charts.tokens(row.key) for row in rows}


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


# ---- studies as the tuner files them

DISTRIBUTIONS: dict[str, Any] = {
    "BLOCK_M": IntDistribution(32, 256, log=True), "BLOCK_N": IntDistribution(16, 128, log=True),
    "LOADS": CategoricalDistribution(("pointer", "descriptor", EVIL)), "num_warps": CategoricalDistribution((4, 8)),
    "num_stages": IntDistribution(1, 4, log=True), "maxnreg": CategoricalDistribution((0, 168)),
}  # fmt: skip
STAMP = "measured triton=3.6.0 kernel=0123456789abcdef space=fedcba9876543210"


def outcomes(count: int = 16) -> list[Outcome]:
    """BLOCK_M decides; the last two have no time."""
    found = []
    for number in range(count):
        config = {"BLOCK_M": 32 << number % 4, "BLOCK_N": 16 << number // 4 % 4, "LOADS": "pointer", "num_warps": 4,
                  "num_stages": 1 + number % 3, "maxnreg": 0}  # fmt: skip
        found.append(Outcome(config, 1000.0 / config["BLOCK_M"] + 0.1 * number, binary={"registers": 128}))
    found.append(Outcome({**CONFIG_OF_STUDY, "LOADS": EVIL}, None, "spills", f"200 values spilled {EVIL}"))
    found.append(Outcome({**CONFIG_OF_STUDY, "num_stages": 4}, None, "crash", "process died (SIGSEGV)"))
    return found


CONFIG_OF_STUDY = {"BLOCK_M": 128, "BLOCK_N": 64, "LOADS": "pointer", "num_warps": 8, "num_stages": 2, "maxnreg": 168}


def file_study(path: Path, key: TuningKey, stamp: str = STAMP, rows: Sequence[Row] = (), count: int = 16) -> None:
    """Through the tuner's own KeyStudy, so that this page and that room agree."""
    sampler: Any = optuna.samplers.RandomSampler(seed=0)
    sampler.field = SimpleNamespace(distributions=DISTRIBUTIONS)
    shelf = Shelf(Storage.of_studies(path))
    study = KeyStudy(key, stamp, sampler, shelf)
    for outcome in outcomes(count):
        study.tell(outcome)
    study.disqualify(outcomes(count)[0].config, f"o: NaN {EVIL}")
    study.keep("crowned", "18", rows)
    shelf.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a tuning run leaves it: a cache and the studies beside it."""
    folder = tmp_path_factory.mktemp("run")
    keys = [replace(KEY, bucket=bucket) for bucket in (512, 4096)]
    rows = [row({"bucket": key.bucket}, pruned={"spills": 1, "rows_per_warp_block_m": 7}) for key in keys]
    export(rows, folder / "cache.sqlite")
    for key, one in zip(keys, rows, strict=True):
        file_study(folder / "studies.sqlite", key, rows=[one])
    return folder


# ---- the page as a whole


@pytest.mark.parametrize("name", ["h200", "a100"])
def test_a_shipped_cache_gives_a_page_with_every_row(name: str, tmp_path: Path) -> None:
    cache, out = ROOT / "cache" / f"{name}.sqlite", tmp_path / "page.html"
    arguments = ["--bench", ROOT / "docs" / "bench" / "h200_bf16.json"] if name == "h200" else []
    result = invoke("--cache", cache, "--out", out, *arguments)
    assert result.exit_code == 0, result.output
    assert f"{out}: {len(reader.read(cache))} rows" in result.output
    assert out.stat().st_size < 3_000_000
    text, rows = out.read_text(encoding="utf-8"), reader.read(cache)
    document = Document(text)
    shown = [set((attrs["data-f"] or "").split()) - {"other"} for attrs in document.winners]
    assert len(shown) == len(rows)
    assert {frozenset(words) for words in shown} == {frozenset(words.split()) for words in tokens_of(rows)}
    assert [int(attrs["data-n"] or -1) for attrs in document.winners] == list(range(len(rows)))
    assert len(document.data["rows"]) == len(rows)
    best = [attrs for attrs in document.winners if attrs.get("class") != "other"]
    assert len(best) == len({row.key for row in rows})
    assert ("Against the peers" in text) == (name == "h200")
    assert ("Nothing on this page was measured" in text) == (name == "a100")


def asks_for_something(text: str) -> list[str]:
    """Whatever a browser would fetch."""
    document = Document(text)
    asked = [
        value
        for tag, attrs in document.tags
        for name, value in attrs.items()
        if name in ("src", "srcset", "action", "data", "poster") or (name.endswith("href") and (value or "x")[0] != "#")
    ]  # fmt: skip
    asked += [tag for tag, _ in document.tags if tag in ("link", "iframe", "object", "embed", "base")]
    return asked + re.findall(r"https?://[^\s\"'<]+|@import[^;]*|url\([^)]*\)|\bfetch\(|XMLHttpRequest|import\(", text)


def test_the_page_asks_for_nothing_from_elsewhere(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert invoke("--cache", run / "cache.sqlite", "--out", out).exit_code == 0
    assert asks_for_something(out.read_text(encoding="utf-8")) == []
    assert asks_for_something('<p><a href="https://x.org/">x</a></p>') == ["https://x.org/", "https://x.org/"]


def test_a_run_brings_its_searches(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    result = invoke("--cache", run / "cache.sqlite", "--out", out)
    assert result.exit_code == 0, result.output
    assert f"studies: {run / 'studies.sqlite'}" in result.output and "2 rows, 36 trials of 2 searches" in result.output
    document = Document(out.read_text(encoding="utf-8"))
    words = " ".join(document.words)
    for section in ("Winners", "Gain over the default", "Roofline", "Search", "Dimensions", "Fates", "Environment"):
        assert section in words
    assert "process died (SIGSEGV)" in words and "each warp owns 16 rows" in words
    assert FULL.kernel_hash in words and FULL.driver in words
    assert "not faster than the default" in words and "1.108 [1.100, 1.120]" in words


def test_hostile_text_stays_text(run: Path, tmp_path: Path) -> None:
    rows = [row(config={**CONFIG, "MASKED": EVIL}, driver=EVIL, pruned={"spills": 3}, errors={EVIL: {"max": 1.0}})]
    rows.append(row({"gpu": f"GPU {EVIL}"}, obtained_on=EVIL))
    export(rows, tmp_path / "cache.sqlite")
    out = tmp_path / "page.html"
    result = invoke("--cache", tmp_path / "cache.sqlite", "--studies", run / "studies.sqlite", "--out", out)
    assert result.exit_code == 0, result.output
    text = out.read_text(encoding="utf-8")
    document = Document(text)
    assert "<script>alert" not in text and "alert(1)&lt;/script&gt;" in text
    assert [attrs.get("type") for tag, attrs in document.tags if tag == "script"] == ["application/json", None]
    assert sum(tag == "style" for tag, _ in document.tags) == 1
    words = " ".join(document.words)
    assert EVIL in words and f"200 values spilled {EVIL}" in words and f"o: NaN {EVIL}" in words
    assert any(EVIL in text for entry in document.data["rows"] for _, text in entry)


def test_the_script_is_one_that_an_engine_can_parse() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    script = Path(page.__file__).with_name("page.js")
    done = subprocess.run([node, "--check", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- what is shown of which files


def test_studies_alone_show_the_rows_they_crowned(run: Path) -> None:
    found = sources.gather(None, run / "studies.sqlite")
    assert list(found.rows) == reader.read(run / "cache.sqlite")
    assert [search.key.bucket for search in found.searches] == [512, 4096]
    search = found.searches[0]
    assert search.obtained == MEASURED
    told = {tuple(o.config.items()): o for o in outcomes()}
    assert {tuple(t.config.items()): (t.time_us, t.fate, t.why) for t in search.trials} == {
        where: (o.time_us, o.fate, o.why) for where, o in told.items()
    }
    assert [why for _, why in search.wrong] == [f"o: NaN {EVIL}"]
    assert all(trial.filed for trial in search.trials)


def test_of_two_studies_of_a_key_the_later_counts(tmp_path: Path) -> None:
    path = tmp_path / "studies.sqlite"
    file_study(path, KEY, STAMP.replace("3.6.0", "3.5.0"), count=12)
    file_study(path, KEY)
    optuna.create_study(storage=f"sqlite:///{path}", study_name="somebody else's")
    found, _, notes = sources.read_studies(path)
    assert [search.name for search in found] == [study_name(KEY, STAMP)]
    assert notes[0].startswith("1 older studies") and notes[1].startswith("1 studies")


def test_reading_changes_no_file(run: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    sources.gather(run / "cache.sqlite", None)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize(
    "key",
    [KEY, replace(KEY, gpu="NVIDIA Some Card 96GB", causal=False), replace(KEY, gpu="a100-sxm-80gb@42sm", precision="tf32")],
    ids=lambda key: key.gpu,
)  # fmt: skip
def test_a_studys_name_says_its_key(key: TuningKey) -> None:
    assert sources.key_of(study_name(key, STAMP)) == (key, STAMP)


def test_other_names_say_none() -> None:
    assert sources.key_of("no-name") is None
    assert sources.key_of(study_name(KEY, STAMP).replace("causal=True", "causal=maybe")) is None


def test_without_options_the_users_cache_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "user_path", lambda: tmp_path / "cache.sqlite")
    result = invoke("--out", tmp_path / "page.html")
    assert result.exit_code == 2 and "fa2tune tune" in result.output and str(tmp_path / "cache.sqlite") in result.output
    export([FULL], tmp_path / "cache.sqlite")
    assert invoke("--out", tmp_path / "page.html").exit_code == 0


def test_errors_name_the_argument_and_the_file(run: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("no database")
    (tmp_path / "half.json").write_text('{"schema": 1, "cells": [')
    (tmp_path / "bare.json").write_text('{"schema": 1}')
    export([], tmp_path / "none.sqlite")
    out = tmp_path / "page.html"
    cache = run / "cache.sqlite"
    for arguments, said in (
        (["--cache", tmp_path / "gone.sqlite"], ("--cache", "gone.sqlite", "no such file")),
        (["--cache", tmp_path / "none.sqlite"], ("--cache", "none.sqlite", "no rows")),
        (["--cache", run / "studies.sqlite"], ("--cache", "no fa2tune cache")),
        (["--studies", cache], ("--studies", "cache.sqlite", "--cache")),
        (["--studies", tmp_path / "text.txt"], ("--studies", "text.txt", "not a database")),
        (["--studies", tmp_path / "gone.sqlite"], ("--studies", "no such file")),
        (["--cache", cache, "--bench", tmp_path / "half.json"], ("--bench", "half.json")),
        (["--cache", cache, "--bench", tmp_path / "bare.json"], ("--bench", "bare.json", "its cells are not")),
        (["--cache", cache, "--bench", tmp_path / "gone.json"], (f"--bench: {tmp_path / 'gone.json'}: No such file",)),
        (["--cache", cache, "--out", tmp_path / "page.pdf"], ("--out", "page.pdf", ".html")),
        (["--cache", cache, "--out", tmp_path / "nowhere" / "page.html"], ("--out", "nowhere", "no folder")),
    ):
        result = invoke("--out", out, *arguments)
        assert result.exit_code == 2, result.output
        assert all(word in " ".join(result.output.split()) for word in said), result.output
    assert not out.exists() and not (tmp_path / "gone.sqlite").exists()


@pytest.mark.usefixtures("portable_kernels")
def test_what_the_tuner_leaves_can_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run with fake hands: its files, as they are, give its page, times by the model included."""
    hands = Hands("tuner_fakes:judge", "tuner_fakes:race", "tuner_fakes:check", "tuner_fakes:check_backward")
    h200 = gpus.named("h200")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("FA2TUNE_FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(plan, "resolve_target", lambda name: plan.Target(h200, MEASURED, h200))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    request = plan.TuneRequest(dtypes=("bf16",), causal=(True,), pass_="fwd", buckets=(512, 4096), trials=8, workers=1,
                               cache=tmp_path / "cache.sqlite")  # fmt: skip
    done = tuner.tune(request, hands=hands)
    found = sources.gather(request.cache, None)
    assert (
        {row.key for row in found.rows} == {row.key for row in done.rows} == {search.key for search in found.searches}
    )
    timed = sum(len(search.timed) for search in found.searches)
    assert len(page.pairs_of(found.searches)) == timed > 0
    words = " ".join(Document(page.render(found)).words)
    assert f"{timed} candidates that were both predicted by the model and measured" in words
    rows = {(row.key, row.variant) for row in sources.gather(None, tmp_path / "studies.sqlite").rows}
    assert rows == {(row.key, row.variant) for row in found.rows}


# ---- what is reckoned


def test_the_best_row_of_a_key_is_what_a_call_takes() -> None:
    rows = [row(variant="pointer", time_us=100.0), row(variant="descriptor", time_us=100.0 * (1 + MARGIN / 2))]
    rows += [row(variant="descriptor", time_us=50.0, obtained=PREDICTED)]
    assert [(s.row.variant, s.row.obtained) for s in facts.standings(rows) if s.best] == [("descriptor", MEASURED)]


def test_intensity_and_share_of_the_peak() -> None:
    (standing,) = facts.standings([row(batch=1, heads_q=16, heads_kv=4, tflops=494.7)])
    elements = 4096 * 128
    moved = 2 * (16 + 4 + 4 + 16) * elements + 4 * 16 * 4096  # q, k, v, o in bf16, and lse
    assert standing.intensity == pytest.approx(2 * 16 * 4096 * 4096 * 128 / moved)
    assert standing.share == pytest.approx(0.5)  # of 989.4
    assert standing.nearness == pytest.approx(0.0039 / 0.0086)
    (unlisted,) = facts.standings([row({"gpu": "Some Card"})])
    assert unlisted.share is None


def test_every_rule_has_its_reason_and_stage() -> None:
    assert facts.stage("rows_per_warp_block_m") == facts.BY_ARITHMETIC and "16 rows" in facts.why(
        "rows_per_warp_block_m"
    )
    assert facts.stage("spills") == facts.BY_LIMITS and facts.why("spills")
    assert facts.stage("timeout") == facts.BY_FAILURE
    assert facts.stage(HOPELESS) == facts.BY_ARITHMETIC and facts.why(HOPELESS)
    source = (ROOT / "fa2tune" / "compiling" / "limits.py").read_text()
    for reason in re.findall(r'Refusal\(\s*"(\w+)"', source):
        assert facts.stage(reason) != facts.BY_FAILURE and facts.why(reason), reason


def test_pruned_points_are_counted_once_a_family() -> None:
    rows = [row({"bucket": b}, variant=v, pruned={"spills": n}) for b, v, n in ((512, "pointer", 3), (512, "descriptor", 3),
                                                                               (1024, "pointer", 5))]  # fmt: skip
    rows.append(row({"causal": False}, pruned={"spills": 10}))
    (found,) = facts.pruned(rows)
    assert found.counts == {("fwd", 128): 15}


def test_best_so_far_and_importance(run: Path) -> None:
    found = sources.gather(None, run / "studies.sqlite").searches
    steps = searches.best_so_far(found[0])
    assert [count for count, *_ in steps] == [1, 2, 3, 4, 18]
    assert [ratio for *_, ratio in steps][-2:] == [1.0, 1.0] and steps[0][2] > 2
    shares = searches.importances(found)["fwd", 128]
    assert max(shares, key=shares.__getitem__) == "BLOCK_M"
    short = [replace(found[0], trials=found[0].trials[: searches.LEAST_TRIALS - 1])]
    assert searches.importances(short) == {}


def test_pairs_of_times_are_ranked() -> None:
    pairs = [charts.Pair(KEY, str(n), float(n), float(n * n)) for n in range(1, 9)]
    assert charts.rank_correlation(pairs) == pytest.approx(1.0)
    assert charts.rank_correlation([replace(p, predicted_us=-p.predicted_us) for p in pairs]) == pytest.approx(-1.0)
    assert charts.rank_correlation([replace(p, predicted_us=1.0) for p in pairs]) is None
    assert "Spearman 1.00" in charts.predictions(pairs)


def test_a_roofline_holds_its_points() -> None:
    standings = facts.standings(
        [row({"bucket": bucket}, tflops=rate) for bucket, rate in ((512, 12.0), (16384, 900.0))]
    )
    drawing = str(charts.roofline(gpus.named("h200"), standings, "bf16", "ieee"))
    width, height = re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawing)[-1]  # after the legend's
    places = [
        (float(x), float(y))
        for x, y in re.findall(r'points="([\d.]+),([\d.]+) [^"]*" class="dot[^"]*" data-t', drawing)
    ]
    assert len(places) == 2 and places[0][1] > places[1][1] and places[0][0] < places[1][0]
    assert all(0 <= x <= int(width) and 0 <= y <= int(height) for x, y in places)


def test_scales_and_figures() -> None:
    assert svg.Linear(0, 1000, 0, 100)(250) == 25 and svg.Linear(0, 1000).ticks(5) == [0, 200, 400, 600, 800, 1000]
    assert svg.Log(1, 100, 0, 10)(10) == pytest.approx(5) and svg.Log(8, 120).ticks() == [10, 20, 50, 100]
    assert [charts.figure(v) for v in (None, 0.0, 0.01234, 12.34, 1234.0)] == ["", "0", "0.0123", "12.3", "1234"]
    assert report.length_name(KEY.bucket) in charts.title_of(KEY)


def test_exhaustive_tables_have_a_page_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import synthetic_tables

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table_page = importlib.import_module("table_page")
    table = synthetic_tables.synthetic()
    path, out = tmp_path / f"table{table_page.tables.SUFFIX}", tmp_path / "tables.html"
    table_page.tables.pack(table, path)
    result = CliRunner().invoke(table_page.main, [str(path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = table_page.search(table)
    assert len(found.trials) == len(table.times) + len(table.fates) and f"{len(found.trials)} configs" in result.output
    words = " ".join(Document(out.read_text(encoding="utf-8")).words)
    assert "Dimensions" in words and "Best so far" not in words  # a table is no search
    assert f"{len(table.times)} timed candidates of 1 key" in words
    (tmp_path / "half.jsonl").write_text("{}\n")
    assert CliRunner().invoke(table_page.main, [str(tmp_path / "half.jsonl")]).exit_code == 1
