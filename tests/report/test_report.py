"""The page of ``fa2tune report``: whole, self-contained, and right about what it shows."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import altair as alt
import optuna
import pytest
from cache_rows import CONFIG, FULL, KEY, row
from click.testing import CliRunner
from optuna.distributions import CategoricalDistribution, IntDistribution

from fa2tune import gpus
from fa2tune.bench import tables
from fa2tune.calling.choosing import Chooser
from fa2tune.cli import main
from fa2tune.report import charts, compared, contents, document, facts, searches, served, sources
from fa2tune.rows import lookup, reader
from fa2tune.rows.reader import Layer
from fa2tune.rows.row import MEASURED, PREDICTED, TIE_MARGIN, Row
from fa2tune.rows.store import export
from fa2tune.sharing.storage import Storage
from fa2tune.sharing.study_writer import StudyWriter
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import BUCKETS
from fa2tune.spec.variant import WARP_SPECIALIZED
from fa2tune.tuning.request import plan
from fa2tune.tuning.request.watcher import WorkerFunctions
from fa2tune.tuning.run import tuner
from fa2tune.tuning.search.space import PRUNED
from fa2tune.tuning.search.study import SELECTED, KeyStudy, TrialOutcome, study_name

pytestmark = pytest.mark.usefixtures("quick_starts")

ROOT = Path(__file__).parents[2]
EVIL = "<script>alert(1)</script>\"'&</style>"
#: Elements that HTML closes by itself.
VOID = {"meta", "input", "br", "link", "img"}


class Document(HTMLParser):
    """Checks that elements nest; keeps attributes, rows of winners, scripts, styles and the embedded JSON."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, Any] = {}
        self.words: list[str] = []
        self.code: dict[str, list[str]] = {"script": [], "style": []}
        self._json = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.code and "type" not in dict(attrs):
            self.code[tag].append("")
        self._json = (dict(attrs).get("id") or "").removeprefix("json-") if tag == "script" else ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self._json = ""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._json:
            self.data[self._json] = json.loads(data)
        elif self.open and self.open[-1] in self.code:
            self.code[self.open[-1]][-1] += data  # comes in pieces
        else:
            self.words.append(data)

    @property
    def winners(self) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.tags if tag == "tr" and "data-n" in attrs]

    def records(self, name: str) -> list[dict[str, Any]]:
        """A data set of the charts."""
        table = self.data["data"][name]
        return [dict(zip(table["fields"], row, strict=True)) for row in table["rows"]]


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


def outcomes(count: int = 16) -> list[TrialOutcome]:
    """BLOCK_M decides; the last two have no time."""
    found = []
    for number in range(count):
        config = {"BLOCK_M": 32 << number % 4, "BLOCK_N": 16 << number // 4 % 4, "LOADS": "pointer", "num_warps": 4,
                  "num_stages": 1 + number % 3, "maxnreg": 0}  # fmt: skip
        found.append(TrialOutcome(config, 1000.0 / config["BLOCK_M"] + 0.1 * number, binary={"registers": 128}))
    found.append(TrialOutcome({**CONFIG_OF_STUDY, "LOADS": EVIL}, None, "spills", f"200 values spilled {EVIL}"))
    found.append(TrialOutcome({**CONFIG_OF_STUDY, "num_stages": 4}, None, "crash", "process died (SIGSEGV)"))
    return found


CONFIG_OF_STUDY = {"BLOCK_M": 128, "BLOCK_N": 64, "LOADS": "pointer", "num_warps": 8, "num_stages": 2, "maxnreg": 168}


def file_study(path: Path, key: TuningKey, stamp: str = STAMP, rows: Sequence[Row] = (), count: int = 16) -> None:
    """Through the tuner's own KeyStudy, so that this page and that room agree."""
    sampler: Any = optuna.samplers.RandomSampler(seed=0)
    sampler.field = SimpleNamespace(distributions=DISTRIBUTIONS)
    writer = StudyWriter(Storage.of_studies(path))
    study = KeyStudy(key, stamp, sampler, writer)
    for outcome in outcomes(count):
        study.tell(outcome)
    study.disqualify(outcomes(count)[0].config, f"o: NaN {EVIL}")
    study.keep(SELECTED, "18", rows)
    writer.close()


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
    assert out.stat().st_size < 3_200_000  # of which the chart library has 0.9 MB
    text, rows = out.read_text(encoding="utf-8"), reader.read(cache)
    document = Document(text)
    shown = [set((attrs["data-f"] or "").split()) - {"other"} for attrs in document.winners]
    assert len(shown) == len(rows)
    assert {frozenset(words) for words in shown} == {frozenset(words.split()) for words in tokens_of(rows)}
    assert [int(attrs["data-n"] or -1) for attrs in document.winners] == list(range(len(rows)))
    assert len(document.data["details"]["rows"]) == len(document.data["details"]["facts"]["rows"]) == len(rows)
    best = [attrs for attrs in document.winners if attrs.get("class") != "other"]
    assert len(best) == len({row.key for row in rows})
    assert ("Against other implementations" in text) == (name == "h200")
    keys = document.records(charts.BEST_OF_KEYS)
    assert {record["title"] for record in keys} == {charts.title_of(row.key) for row in rows}
    gains = {record["n"]: record["gain"] for record in keys if record["gain"] is not None}
    by_number = {n: s.row.gain for n, s in enumerate(facts.standings(rows)) if s.best and s.row.gain is not None}
    assert gains == pytest.approx(by_number, rel=1e-4) and max(gains.values()) > 1.4


def asks_for_something(text: str) -> list[str]:
    """Whatever a browser would fetch, the chart library aside: it holds addresses, and the policy keeps it from using any."""
    document_ = Document(text)
    asked = [
        value
        for tag, attrs in document_.tags
        for name, value in attrs.items()
        if name in ("src", "srcset", "action", "data", "poster") or (name.endswith("href") and (value or "x")[0] != "#")
    ]  # fmt: skip
    asked += [tag for tag, _ in document_.tags if tag in ("link", "iframe", "object", "embed", "base")]
    rest = text.replace(document.chart_library(), "")
    return asked + re.findall(r"https?://[^\s\"'<]+|@import[^;]*|url\([^)]*\)|\bfetch\(|XMLHttpRequest|import\(", rest)


def test_the_page_asks_for_nothing_from_elsewhere(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert invoke("--cache", run / "cache.sqlite", "--out", out).exit_code == 0
    schema = "https://vega.github.io/schema/vega-lite/v6.4.1.json"  # a name that Altair gives each specification
    assert set(asks_for_something(out.read_text(encoding="utf-8"))) <= {schema}
    assert asks_for_something('<p><a href="https://x.org/">x</a></p>') == ["https://x.org/", "https://x.org/"]


def test_the_policy_allows_these_scripts_and_this_style_and_nothing_else(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert invoke("--cache", run / "cache.sqlite", "--out", out).exit_code == 0
    found = Document(out.read_text(encoding="utf-8"))
    (meta,) = [attrs for tag, attrs in found.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    policy = dict(part.split(" ", 1) for part in (meta["content"] or "").split("; "))
    assert policy.pop("default-src") == policy.pop("base-uri") == policy.pop("form-action") == "'none'"
    for kind in ("script", "style"):
        hashes = {
            f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'" for code in found.code[kind]
        }
        assert set(policy.pop(f"{kind}-src").split(" ")) == hashes and hashes
    assert not policy
    # what the policy would refuse: attributes with styles and handlers
    assert not [(tag, name) for tag, attrs in found.tags for name in attrs if name == "style" or name.startswith("on")]
    places = [tag for tag, attrs in found.tags if tag in ("script", "style") or "http-equiv" in attrs]
    assert places[0] == "meta", "a policy counts from where it stands"


def test_charts_are_valid_and_draw_only_data_of_the_page(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    bench = ROOT / "docs" / "bench" / "h200_bf16.json"
    arguments = ["--cache", run / "cache.sqlite", "--bench", bench, "--compare", ROOT / "cache" / "h200.sqlite"]
    assert invoke(*arguments, "--out", out).exit_code == 0
    found = Document(out.read_text(encoding="utf-8"))
    figures = {attrs["data-chart"] for tag, attrs in found.tags if tag == "figure"}
    drawn = {chart["id"]: chart for chart in found.data["charts"]}
    assert figures == set(drawn) >= {
        "gains", "speeds", "roofline", "peers", "compared", "convergence", "progress", "progress-time", "outcomes", "slices-0",
    } - {"convergence"}  # fmt: skip
    for chart in drawn.values():
        alt.Chart.from_dict(chart["spec"])  # raises what Altair's schema refuses
        text = json.dumps(chart["spec"])
        assert '"url"' not in text and set(re.findall(r'"data": {"name": "(\w+)"}', text)) <= {"rows", *chart["extra"]}
        rows = found.records(chart["data"])
        assert rows, chart["id"]
        named = set(re.findall(r'"field": "(\w+)"', text)) - {"config", "rate"}  # made by a fold
        given = {field for row in rows for field in row} | {f for r in chart["extra"].values() for e in r for f in e}
        assert named <= given and {field for field, _ in chart["columns"]} <= given, chart["id"]
        assert chart["title"] and chart["description"]


def test_a_run_brings_its_searches(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    result = invoke("--cache", run / "cache.sqlite", "--out", out)
    assert result.exit_code == 0, result.output
    assert f"studies: {run / 'studies.sqlite'}" in result.output and "2 rows, 36 trials of 2 searches" in result.output
    document = Document(out.read_text(encoding="utf-8"))
    words = " ".join(document.words)
    for section in ("Winners", "Gain over the portable default", "Limits of the GPU", "Search", "Dimensions",
                    "Pruned and failed", "Environment", "What does my model get?"):  # fmt: skip
        assert section in words
    assert "process died (SIGSEGV)" in words and "each warp computes 16 rows" in words
    assert FULL.kernel_hash in words and FULL.driver in words
    assert "not faster than the portable default" in words and "1.108 [1.100, 1.120]" in words


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
    kinds = [attrs.get("type") for tag, attrs in document.tags if tag == "script"]
    assert kinds == ["application/json"] * len(document.data) + [None] * len(document.code["script"])
    assert sum(tag == "style" for tag, _ in document.tags) == 1
    words = " ".join(document.words)
    assert EVIL in words and f"200 values spilled {EVIL}" in words and f"o: NaN {EVIL}" in words
    assert any(EVIL in text for entry in document.data["details"]["rows"] for _, text in entry)


# ---- what is shown of which files


def test_studies_alone_show_the_rows_they_selected(run: Path) -> None:
    found = sources.gather(None, run / "studies.sqlite")
    assert list(found.rows) == reader.read(run / "cache.sqlite")
    assert [search.key.bucket for search in found.searches] == [512, 4096]
    search = found.searches[0]
    assert search.obtained == MEASURED
    messages = {tuple(o.config.items()): o for o in outcomes()}
    assert {tuple(t.config.items()): (t.time_us, t.status, t.why) for t in search.trials} == {
        where: (o.time_us, o.status, o.why) for where, o in messages.items()
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
    [KEY, replace(KEY, gpu="NVIDIA Some GPU 96GB", mask="full"), replace(KEY, gpu="a100-sxm-80gb@42sm", precision="tf32")],
    ids=lambda key: key.gpu,
)  # fmt: skip
def test_a_studys_name_says_its_key(key: TuningKey) -> None:
    assert sources.key_of_study(study_name(key, STAMP)) == (key, STAMP)


def test_a_name_from_before_keys_named_the_mask_says_its_key() -> None:
    older = (
        "gpu=NVIDIA Some Card sm_count=132 arch=90 kernel=fwd dtype=bf16 precision=ieee head_dim=128 head_dim_v=128 "
        f"causal=False bucket=4096 {STAMP}"
    )
    assert sources.key_of_study(older) == (replace(KEY, gpu="NVIDIA Some Card", mask="full"), STAMP)


def test_other_names_say_none() -> None:
    name = "gpu=a sm_count=1 arch=90 kernel=fwd dtype=bf16 precision=ieee head_dim=64 head_dim_v=64 causal=True bucket=512 s"
    assert sources.key_of_study(name) is not None
    assert sources.key_of_study("no-name") is None
    assert sources.key_of_study(name.replace("causal=True", "causal=maybe")) is None


def test_without_options_the_users_cache_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "user_path", lambda: tmp_path / "cache.sqlite")
    result = invoke("--out", tmp_path / "page.html")
    assert result.exit_code == 2 and "fa2tune tune" in result.output and str(tmp_path / "cache.sqlite") in result.output
    assert "`fa2tune cache list` shows the shipped ones" in " ".join(result.output.split())
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
        (["--cache", run / "studies.sqlite"], ("--cache", "not a fa2tune cache")),
        (["--studies", cache], ("--studies", "cache.sqlite", "--cache")),
        (["--studies", tmp_path / "text.txt"], ("--studies", "text.txt", "not a database")),
        (["--studies", tmp_path / "gone.sqlite"], ("--studies", "no such file")),
        (["--cache", cache, "--bench", tmp_path / "half.json"], ("--bench", "half.json")),
        (["--cache", cache, "--bench", tmp_path / "bare.json"], ("--bench", "bare.json", "its cells are not")),
        (["--cache", cache, "--bench", tmp_path / "gone.json"], (f"--bench: {tmp_path / 'gone.json'}: No such file",)),
        (["--cache", cache, "--compare", tmp_path / "gone.sqlite"], ("--compare", "gone.sqlite", "no such file")),
        (["--cache", cache, "--compare", tmp_path / "none.sqlite"], ("--compare", "none.sqlite", "no rows")),
        (["--cache", cache, "--out", tmp_path / "page.pdf"], ("--out", "page.pdf", ".html")),
        (["--cache", cache, "--out", tmp_path / "nowhere" / "page.html"], ("--out", "nowhere", "not a folder")),
    ):
        result = invoke("--out", out, *arguments)
        assert result.exit_code == 2, result.output
        assert all(word in " ".join(result.output.split()) for word in said), result.output
    assert not out.exists() and not (tmp_path / "gone.sqlite").exists()


def test_a_full_disk_leaves_the_page_that_was_there(run: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for the disk: writes fail part-way."""
    out = tmp_path / "page.html"
    out.write_text("the page before")
    code = """
        import resource, signal, sys
        from fa2tune.cli import main
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sys.dont_write_bytecode = True  # of modules that are first imported here half would be written, and stay
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        main(["report", "--cache", sys.argv[1], "--out", sys.argv[2]])
    """
    cache = tmp_path / "cache.sqlite"
    shutil.copy(run / "cache.sqlite", cache)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), cache, out], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert str(out) in done.stderr and "File too large" in done.stderr
    assert out.read_text() == "the page before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.sqlite", "page.html"]


def test_a_fifo_is_refused_at_once(run: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "bench.json"
    os.mkfifo(pipe)
    for option in ("--bench", "--studies", "--cache", "--compare"):
        arguments = [sys.executable, "-m", "fa2tune", "report", "--cache", run / "cache.sqlite", option, pipe]
        done = subprocess.run([*arguments, "--out", tmp_path / "page.html"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, done.stderr
        words = " ".join(done.stderr.split())
        assert f"{option}: " in words and f"{pipe}: is not a regular file" in words


def test_odd_results_of_bench_are_an_error_that_names_the_file(run: Path, tmp_path: Path) -> None:
    good = json.loads((ROOT / "docs" / "bench" / "h200_bf16.json").read_text())
    cell = good["cells"][0]
    own = cell["peers"]["fa2tune"]

    def with_cell(**changes: Any) -> str:
        return json.dumps({**good, "cells": [{**cell, **changes}]})

    path = tmp_path / "odd.json"
    for text, said in (
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": 1, "runs": [], "cells": ' + "[" * 100_000, "nested too deeply"),
        (json.dumps({**good, "runs": {}}), "runs must be a list"),
        (json.dumps({**good, "runs": []}), "any cell needs a run"),
        (json.dumps({**good, "cells": [7]}), "cell 0 is not an object"),
        (with_cell(seqlen="512"), "seqlen of cell 0 must be int, is '512'"),
        (with_cell(causal=0), "causal of cell 0 must be bool"),
        (with_cell(peers={"fa2tune": {**own, "tflops": "NaN"}}), "tflops of 'fa2tune' in cell 0"),
        (with_cell(peers={"fa2tune": {**own, "ms": float("nan")}}), "ms of 'fa2tune' in cell 0"),
        (with_cell(peers={"fa2tune": {"status": "ok", "tflops": 1.0}}), "TFLOP/s without times"),
        (with_cell(peers={"fa2tune": {"status": "failed"}}), "without a reason"),
        ("\xff", "cannot be read as JSON"),
    ):
        path.write_bytes(text.encode("latin-1"))
        result = invoke("--cache", run / "cache.sqlite", "--bench", path, "--out", tmp_path / "page.html")
        assert result.exit_code == 2 and not isinstance(result.exception, RecursionError), text[:80]
        words = " ".join(result.output.split())
        assert f"--bench: {path}" in words and said in words, result.output


@pytest.mark.usefixtures("portable_kernels")
def test_what_the_tuner_leaves_can_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run with fake functions: its files, as they are, give its page, times by the model included."""
    functions = WorkerFunctions(
        "tuner_fakes:compile_check", "tuner_fakes:race", "tuner_fakes:check", "tuner_fakes:check_backward"
    )
    h200 = gpus.named("h200")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.setenv("FA2TUNE_FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(plan, "resolve_target", lambda name: plan.Target(h200, MEASURED, h200))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    request = plan.TuneRequest(dtypes=("bf16",), masks=("causal",), pass_="fwd", buckets=(512, 4096), trials=8, workers=1,
                               cache=tmp_path / "cache.sqlite")  # fmt: skip
    done = tuner.tune(request, functions=functions)
    found = sources.gather(request.cache, None)
    assert (
        {row.key for row in found.rows} == {row.key for row in done.rows} == {search.key for search in found.searches}
    )
    timed = sum(len(search.timed) for search in found.searches)
    assert len(contents.pairs_of(found.searches)) == timed > 0
    words = " ".join(Document(contents.render(found)).words)
    assert f"{timed} candidates that were both predicted by the model and measured" in words
    rows = {(row.key, row.filed_as) for row in sources.gather(None, tmp_path / "studies.sqlite").rows}
    assert rows == {(row.key, row.filed_as) for row in found.rows}


# ---- what is reckoned


def test_the_best_row_of_a_key_is_what_a_call_takes() -> None:
    rows = [
        row(implementation="pointer", time_us=100.0),
        row(implementation="descriptor", time_us=100.0 * (1 + TIE_MARGIN / 2)),
    ]
    rows += [row(implementation="descriptor", time_us=50.0, obtained=PREDICTED)]
    assert [(s.row.filed_as, s.row.obtained) for s in facts.standings(rows) if s.best] == [("descriptor", MEASURED)]


def test_intensity_and_share_of_the_peak() -> None:
    (standing,) = facts.standings([row(batch=1, heads_q=16, heads_kv=4, tflops=494.7)])
    elements = 4096 * 128
    moved = 2 * (16 + 4 + 4 + 16) * elements + 4 * 16 * 4096  # q, k, v, o in bf16, and lse
    assert standing.intensity == pytest.approx(2 * 16 * 4096 * 4096 * 128 / moved)
    assert standing.share == pytest.approx(0.5)  # of 989.4
    assert standing.nearness == pytest.approx(0.0039 / 0.0086)
    (unlisted,) = facts.standings([row({"gpu": "Some GPU"})])
    assert unlisted.share is None


def test_every_rule_has_its_reason_and_stage() -> None:
    rule = "rows_per_warp_block_m"
    assert facts.stage(rule) == facts.BY_ARITHMETIC and "16 rows" in facts.rule_in_words(rule, "fwd")
    assert facts.stage("spills") == facts.BY_LIMITS and facts.rule_in_words("spills", "fwd")
    assert facts.stage("timeout") == facts.BY_FAILURE and not facts.rule_in_words("timeout", "fwd")
    assert facts.stage(PRUNED) == facts.BY_ARITHMETIC and facts.rule_in_words(PRUNED, "fwd")
    source = "".join((ROOT / "fa2tune" / "compiling" / name).read_text() for name in ("limits.py", "support.py"))
    assert source.count("Refusal(") >= 12
    for reason in re.findall(r'Refusal\(\s*"(\w+)"', source):
        assert facts.stage(reason) != facts.BY_FAILURE and facts.rule_in_words(reason, "fwd"), reason


def test_rules_of_one_name_keep_the_reason_of_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {
        ("fwd", False): {"rule": "one reason"},
        ("fwd", True): {"rule": "another"},
        ("bwd_dq", False): {"rule": "one reason"},
    }
    monkeypatch.setattr(facts, "reasons", lambda: words)
    rows = [row({"kernel": kernel}, implementation=name, pruned={"rule": count}) for kernel, name, count in (
        ("fwd", "pointer", 1), ("fwd", WARP_SPECIALIZED, 2), ("bwd_dq", "pointer", 4))]  # fmt: skip
    assert {found.why: dict(found.counts) for found in facts.pruned(rows)} == {
        "one reason": {("fwd", 128): 1, ("bwd_dq", 128): 4}, "another": {("fwd", 128): 2},
    }  # fmt: skip
    shown = contents.pruned_table(rows)
    [rules] = shown["stages"].values()
    assert {why: sum(cells) for _, why, cells in rules} == {"one reason": 5, "another": 2}
    assert facts.rule_in_words("rule", "bwd_fused") == "one reason / another", (
        "a kernel without the rule: all that have it"
    )


def test_every_row_that_ships_has_the_reasons_of_its_own_kernel() -> None:
    rows = [row for path in reader.shipped_paths() for row in reader.read(path) if row.key.kernel != "bwd"]
    assert {(row.key.kernel, row.warp_specialized) for row in rows} <= set(facts.reasons())


def test_pruned_points_are_counted_once_a_search_task() -> None:
    counts = ((512, "pointer", 3), (512, "descriptor", 3), (1024, "pointer", 5))
    rows = [row({"bucket": b}, implementation=name, pruned={"spills": n}) for b, name, n in counts]
    rows.append(row({"mask": "full"}, pruned={"spills": 10}))
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
    pairs = [facts.TimedPrediction(KEY, str(n), float(n), float(n * n)) for n in range(1, 9)]
    assert facts.rank_correlation(pairs) == pytest.approx(1.0)
    assert facts.rank_correlation([replace(p, predicted_us=-p.predicted_us) for p in pairs]) == pytest.approx(-1.0)
    assert facts.rank_correlation([replace(p, predicted_us=1.0) for p in pairs]) is None
    records = charts.pair_records(pairs)
    assert {record["panel"] for record in records} == {"head dim 128, Spearman 1.00"} and len(records) == 8


def test_the_limits_of_a_gpu_lie_above_its_points() -> None:
    standings = facts.standings([row({"bucket": b}, tflops=rate) for b, rate in ((512, 12.0), (16384, 900.0))])
    roofs = charts.roofs_of(standings)
    ridge = 989.4e3 / gpus.named("h200").hbm_gbs
    assert [(entry["intensity"], entry["rate"]) for entry in roofs][1] == pytest.approx((ridge, 989.4))
    assert roofs[0]["rate"] < 12.0 and roofs[0]["intensity"] < min(s.intensity for s in standings)
    assert roofs[2]["rate"] == 989.4 and roofs[2]["intensity"] > max(s.intensity for s in standings)


def test_no_point_is_cut_off(run: Path) -> None:
    """Axes go by the data: no chart of rows has limits of its own, nor clips."""
    rows = [
        row({"bucket": b}, gain=gain, gain_low=gain * 0.9, gain_high=gain * 1.1)
        for b, gain in ((512, 0.2), (1024, 9.0))
    ]
    standings = facts.standings(rows)
    chart = charts.gains(standings)
    assert chart is not None
    text = json.dumps(chart.spec)
    assert '"clamp"' not in text and not re.search(r'"domain": \[[-\d]', text)
    assert [record["gain"] for record in charts.key_records(standings)] == [0.2, 9.0]


def test_panels_are_in_order() -> None:
    keys = [KEY.with_(head_dim=dim, head_dim_v=dim, mask=mask) for dim in (256, 64, 128) for mask in ("causal", "full")]
    order, columns = charts.panels_of(keys)
    assert columns == 3
    assert order == [f"head dim {dim}, {mask}" for mask in ("full", "causal") for dim in (64, 128, 256)]


def test_figures_have_three_digits() -> None:
    assert [facts.figure(v) for v in (None, 0.0, 0.01234, 12.34, 1234.0)] == ["", "0", "0.0123", "12.3", "1234"]
    assert tables.length_name(KEY.bucket) in charts.title_of(KEY)
    assert document.columnar([{"a": 1, "b": float("inf")}, {"a": 0.123456789}]) == {
        "fields": ["a", "b"], "rows": [[1, None], [0.12346, None]],
    }  # fmt: skip


# ---- what a model gets


def test_a_model_gets_what_the_lookup_says() -> None:
    rows = reader.read(ROOT / "cache" / "h200.sqlite")
    standings = facts.standings(rows)
    found = served.served(standings)
    assert found["passes"] == ["forward", "backward"] and found["buckets"] == BUCKETS
    gpu, here = gpus.named("h200"), [Layer("report", Path(), tuple(s.row for s in standings))]
    own = {standing.row.key for standing in standings}
    for dtype, mask, dim in (
        ("bf16", "causal", 128),
        ("fp16", "full", 64),
        ("bf16", "full", 96),
        ("fp16", "causal", 160),
    ):
        lines = found["found"][f"h200@132 {dtype} {mask} {dim}"]
        for kernel, line in zip(("fwd", "bwd"), lines, strict=True):
            for bucket, (number, _) in zip(BUCKETS, line, strict=True):
                key = KEY.with_(kernel=kernel, dtype=dtype, mask=mask, head_dim=dim, head_dim_v=dim, bucket=bucket)
                chooser = Chooser(key.workload(), gpu, here, lookup.Toolchain())
                answer, _ = chooser.find("fwd") if kernel == "fwd" else chooser.find_backward(False)
                assert answer is not None and standings[number].row is answer.row
                assert (answer.row.key == key) == (key in own)
    assert not any(key.split()[1] == "fp32" or int(key.split()[-1]) <= 16 for key in found["found"])


def test_what_no_row_serves_is_the_default_config() -> None:
    """A file of one length and of the forward only."""
    found = served.served(facts.standings([row(config={**CONFIG, "HEADS_PER_WAVE": 1})]))
    lines = found["found"]["h200@132 bf16 causal 128"]
    assert [number for number, _ in lines[0]] == [0] * len(BUCKETS)  # the nearest length
    assert [number for number, _ in lines[1]] == [served.NO_ROW_NUMBER] * len(BUCKETS)
    assert "h200@132 bf16 full 128" not in found["found"]
    costs = [found["costs"][cost] if cost >= 0 else "" for _, cost in lines[0]]
    assert any("next longer" in cost for cost in costs), costs
    assert served.served([])["found"] == {}


# ---- two caches


def test_two_caches_are_compared_key_by_key(tmp_path: Path) -> None:
    here = [row({"bucket": bucket}, time_us=100.0) for bucket in BUCKETS[:-1]]
    there = [row({"bucket": 512}, time_us=150.0), row({"bucket": 1024}, time_us=80.0), row({"bucket": 2048}, time_us=100.3),
             row({"bucket": 4096}, time_us=50.0, obtained=PREDICTED, obtained_on=""), row({"bucket": 16384})]  # fmt: skip
    found = {c.key.bucket: (c.state, c.ratio) for c in compared.compare(here, there)}
    assert found == {
        512: ("faster", pytest.approx(1.5)), 1024: ("slower", pytest.approx(0.8)), 2048: ("alike", pytest.approx(1.003)),
        4096: ("other evidence", None), 8192: ("only here", None), 16384: ("only there", None),
    }  # fmt: skip
    export(here, tmp_path / "here.sqlite")
    export(there, tmp_path / "there.sqlite")
    out = tmp_path / "page.html"
    result = invoke("--cache", tmp_path / "here.sqlite", "--compare", tmp_path / "there.sqlite", "--out", out)
    assert result.exit_code == 0 and f"compared with: {tmp_path / 'there.sqlite'}" in result.output
    text = out.read_text(encoding="utf-8")
    words = " ".join(" ".join(Document(text).words).split())
    assert "1 faster 1 slower 1 alike 1 other evidence 1 only here 1 only there" in words
    assert words.index("0.800") < words.index("1.003") < words.index("1.500")  # the largest loss first
    assert [record["ratio"] for record in Document(text).records("compared")] == [1.5, 0.8, 1.003]


def test_exhaustive_tables_have_a_page_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import synthetic_tables

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table_report = importlib.import_module("table_report")
    table = synthetic_tables.synthetic()
    path, out = tmp_path / f"table{table_report.tables.SUFFIX}", tmp_path / "tables.html"
    table_report.tables.pack(table, path)
    result = CliRunner().invoke(table_report.main, [str(path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = table_report.search(table)
    assert (
        len(found.trials) == len(table.times) + len(table.statuses) and f"{len(found.trials)} configs" in result.output
    )
    words = " ".join(Document(out.read_text(encoding="utf-8")).words)
    assert "Dimensions" in words and "Best time so far" not in words  # a table is no search
    assert f"{len(table.times)} timed candidates of 1 key" in words
    (tmp_path / "half.jsonl").write_text("{}\n")
    assert CliRunner().invoke(table_report.main, [str(tmp_path / "half.jsonl")]).exit_code == 1
