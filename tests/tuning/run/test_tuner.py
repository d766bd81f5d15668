"""The tuner's bookkeeping, with fake functions in real child processes: no GPU, no compiler."""

import json
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from cache_rows import row as cached
from click.testing import CliRunner
from tuner_fakes import true_time
from tuner_runs import A100, FAKES, HERE, SPEC, Listener

from fa2tune.cli import main
from fa2tune.cli.tune import tune as tune_command
from fa2tune.compiling.compiler import binary_config
from fa2tune.compiling.registry import portable_of
from fa2tune.report import contents, facts
from fa2tune.rows import reader
from fa2tune.rows.row import PREDICTED
from fa2tune.rows.store import export
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import BACKWARD, FUSED, SPLIT
from fa2tune.tuning.request import plan
from fa2tune.tuning.request.plan import Target, TuneRequest
from fa2tune.tuning.run import budget, progress, tuner
from fa2tune.tuning.search.candidates import legal, point
from fa2tune.tuning.select import finalists, gpu_jobs, predicted
from fa2tune.tuning.select.predicted import EQUAL_WITHIN

pytestmark = pytest.mark.usefixtures("portable_kernels", "quick_starts")


def binary(config):
    return point(binary_config(portable_of("fwd"), config))


def test_measured_run_selects_the_best_it_tried_and_files_the_evidence(bench):
    report = bench.tune(HERE, trials=20, record=bench.folder / "record.jsonl")
    compiled = [config for *_, config in bench.did("compile")]
    assert len(compiled) == 20 and len({binary(config) for config in compiled}) == 20
    assert portable_of("fwd").space.default(SPEC, 90) in compiled
    tried = bench.tried()
    assert len(tried) > 20 and {binary(config) for config in tried} == {binary(config) for config in compiled}
    rows = reader.read(bench.folder / "cache.sqlite")
    assert {(row.key.bucket, row.implementation) for row in rows} == {
        (b, v) for b in (512, 4096) for v in ("pointer", "descriptor")
    }
    for row in rows:
        runnable = [c for c in tried if c["num_stages"] != 4 and c["LOADS"] == row.implementation]
        assert dict(row.config) == min(runnable, key=lambda c: true_time(c, row.key.bucket))
        assert (row.obtained, row.proof, row.obtained_on) == ("measured", "target", "NVIDIA H200")
        assert row.tried == len(tried) and row.samples == 9 and row.clock_mhz == 1980 and row.power_limit_w == 700
        default = true_time(finalists.rival(portable_of("fwd").space, SPEC, 90, row.implementation), row.key.bucket)
        assert row.gain == pytest.approx(default / true_time(row.config, row.key.bucket))
        assert row.gain_low <= row.gain <= row.gain_high and row.errors["o"]["max"] == 0.1
        assert row.registers == 128 and row.binary_hash == "0123456789abcdef" * 4
        assert row.kernel_hash and row.space_hash and row.triton and row.created
        assert row.pruned.get("shared_memory", 0) == sum(c["num_stages"] == 4 for c in compiled)
    recorded = [json.loads(line) for line in (bench.folder / "record.jsonl").read_text().splitlines()]
    assert {entry["stage"] for entry in recorded} <= {"screen", "final", "sustained", "proof"}
    assert {"screen", "proof"} <= {entry["stage"] for entry in recorded}
    assert report.compiled == 20 and not report.interrupted


def test_the_same_command_does_nothing_twice_and_more_trials_go_on(bench):
    first = bench.tune(HERE)
    bench.forget()
    again = bench.tune(HERE)
    assert again.compiled == 0 and not bench.did("screen") and not bench.did("proof") and not bench.did("check")
    assert sorted(again.rows, key=repr) == sorted(first.rows, key=repr)
    more = bench.tune(HERE, trials=15)
    assert {binary(config) for config in bench.tried()}
    assert 3 <= more.compiled <= 3 + first.compiled  # three new ones, and old ones whose other launches are wanted now
    assert all(row.tried > before.tried for row, before in zip(more.rows, first.rows, strict=True))


def test_a_new_length_takes_the_trials_of_the_others(bench):
    bench.tune(HERE, buckets=(512,))
    tried = {point(config) for config in bench.tried()}
    bench.forget()
    report = bench.tune(HERE, buckets=(512, 1024))
    assert {point(config) for config in bench.tried()} >= tried
    assert {binary(config) for config in bench.tried()} == {binary(dict(where)) for where in tried}
    assert len(bench.did("compile")) == len({binary(dict(where)) for where in tried})
    default = point(portable_of("fwd").space.default(SPEC, 90))  # the anchor of every race
    again = {point(config) for _, bucket, configs in bench.did("screen") if bucket == 512 for config in configs}
    assert not again & tried - {default}
    assert {row.key.bucket for row in report.rows} == {512, 1024}


def test_a_gpu_that_is_gone_ends_the_run_and_blames_no_candidate(bench, monkeypatch):
    monkeypatch.setenv("FA2TUNE_FAKE_POISON", "lost")
    with pytest.raises(gpu_jobs.GpuLost, match="no CUDA-capable device"):
        bench.tune(HERE, trials=4, buckets=(512,))
    monkeypatch.setenv("FA2TUNE_FAKE_POISON", "")
    report = bench.tune(HERE, trials=4, buckets=(512,))
    assert report.rows and "failed" not in report.statuses


def test_a_compiler_that_aborts_costs_one_candidate(bench, monkeypatch):
    monkeypatch.setenv("FA2TUNE_FAKE_ABORT", "1")
    report = bench.tune(HERE, trials=10, buckets=(512,), sampler="grid")
    compiled = [config for *_, config in bench.did("compile")]
    aborted = sum(c["BLOCK_N"] == 16 and c["num_stages"] != 4 for c in compiled)
    assert aborted and report.statuses["crash"] == aborted and report.rows


def test_ctrl_c_keeps_what_was_done(bench):
    class Impatient(Listener):
        def progress(self, done, total, left_s, now, statuses):
            if done >= 4:
                raise KeyboardInterrupt

    monkey = bench.monkeypatch
    monkey.setattr(progress, "PROGRESS_S", 0.0)
    monkey.setattr(plan, "resolve_target", lambda name: Target(A100, PREDICTED, None))
    request = TuneRequest(cache=bench.folder / "cache.sqlite", trials=10, buckets=(512,), dtypes=("bf16",), masks=("causal",),
                          pass_="fwd", workers=1)  # fmt: skip
    report = tuner.tune(request, Impatient(), FAKES)
    assert report.interrupted
    before = {point(config) for *_, config in bench.did("compile")}
    bench.forget()
    report = tuner.tune(request, Listener(), FAKES)
    after = {point(config) for *_, config in bench.did("compile")}
    assert not report.interrupted and report.rows
    assert len(before & after) <= 2  # at most what was under way
    assert report.compiled <= 10 - 4


def test_a_budget_too_small_for_finals_still_searches(bench):
    """What finals are left is no more than half of it; and a search that waits for others' winners is not left out."""
    report = bench.tune(HERE, trials=6, time_budget_s=8.0, dtypes=("bf16", "fp16"))
    assert report.compiled and {row.key.dtype for row in report.rows} == {"bf16", "fp16"}


def test_time_budget_ends_the_search_and_still_selects(bench, monkeypatch):
    """A compile is a second of its clock, whatever the host is busy with."""
    clock = SimpleNamespace(monotonic=lambda: float(len(bench.did("compile"))), process_time=time.process_time)
    monkeypatch.setattr(budget, "time", clock)
    report = bench.tune(Target(A100, PREDICTED, None), trials=1000, buckets=(512,), time_budget_s=9.0, workers=1)
    assert report.rows and 4 <= report.compiled < 9


def test_the_command_prints_one_line_a_key_and_ends_in_a_table(bench, monkeypatch):
    monkeypatch.setattr(plan, "resolve_target", lambda name: Target(A100, PREDICTED, None))
    monkeypatch.setattr("fa2tune.tuning.request.watcher.WorkerFunctions", lambda: FAKES)
    path = bench.folder / "cache.sqlite"
    arguments = ["--gpu", "a100", "--dtype", "bf16", "--causal", "--pass", "fwd", "--seqlen", "512", "--seqlen", "2048"]
    result = CliRunner().invoke(tune_command, [*arguments, "--trials", "5", "--cache", str(path)])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "Not present: candidates are compiled for it" in lines[0]
    assert sum(line.startswith("portable/fwd bf16 128 causal") and "x portable default" in line for line in lines) == 2
    assert any(line.startswith("fwd 128 causal: candidates to compile: portable/fwd bf16 5 (from ") for line in lines)
    table = [line.split() for line in lines if line.startswith("fwd        ") or line.split()[:2] == ["fwd", "bf16"]]
    assert any(row[-2:] == ["predicted,", "interpreter"] and row[4] == "2048" for row in table)
    assert any("descriptor loads without TMA: " in line for line in lines) and f"cache: {path}" in lines
    assert any(line.endswith("fa2tune explain --gpu a100-sxm-80gb") for line in lines), (
        "shipped rows serve before these"
    )
    assert lines[-1].startswith("machine code: ") and str(path.with_suffix(".kernels")) in lines[-1]


def test_tune_report_and_explain_name_the_same_backward_of_a_gpu_that_is_not_there(bench, monkeypatch):
    """The fused backward is predicted the faster one, and no call gets it on the word of a prediction."""
    monkeypatch.setattr(plan, "resolve_target", lambda name: Target(A100, PREDICTED, None))
    monkeypatch.setattr("fa2tune.tuning.request.watcher.WorkerFunctions", lambda: FAKES)
    path, out = bench.folder / "cache.sqlite", bench.folder / "page.html"
    arguments = ["--gpu", "a100", "--dtype", "bf16", "--causal", "--pass", "bwd", "--seqlen", "16384", "--trials", "5"]
    tuned = CliRunner().invoke(main, ["tune", *arguments, "--cache", str(path)])
    assert tuned.exit_code == 0, tuned.output
    strategies = {row.strategy: row for row in reader.read(path) if row.key.kernel == BACKWARD}
    assert strategies[FUSED].rank_us < strategies[SPLIT].rank_us

    lines = tuned.output.splitlines()
    (messages,) = [line for line in lines if line.startswith("bwd bf16 128 causal 16384:")]
    assert f", {strategies[SPLIT].gain:.2f} x portable default; {SPLIT}" in messages and FUSED not in messages
    (marked,) = [line for line in lines if line.endswith(", not served")]
    assert marked.split()[:2] == ["bwd", "bf16"] and f"{FUSED}: bwd_fused pointer" in marked
    assert f"not served: it {strategies[FUSED].barred}" in lines

    standings = facts.standings(reader.read(path))
    assert [s.row.strategy for s in standings if s.best and s.row.key.kernel == BACKWARD] == [SPLIT]
    (mean,) = [
        tile.figure for tile in contents.tiles(standings, []) if tile.what == "whole backward over the portable default"
    ]
    assert mean == f"{strategies[SPLIT].gain:.3f} x"
    assert CliRunner().invoke(main, ["report", "--cache", str(path), "--out", str(out)]).exit_code == 0
    assert out.read_text(encoding="utf-8").count(">not served</span>") == 1

    asked = ["explain", "-v", "--gpu", "a100", "--causal", "--pass", "bwd", "--seqlen", "16384", "--cache", str(path)]
    explained = CliRunner().invoke(main, asked)
    assert explained.exit_code == 0, explained.output
    (first,) = (part for part in explained.output.split("\n\n") if part.startswith("bwd: "))
    assert (
        f"config    {SPLIT} portable" in first
        and f"refused   {FUSED} portable, " in first
        and strategies[FUSED].barred in first
    )


@pytest.mark.parametrize("target", [HERE, Target(A100, PREDICTED, None)], ids=["measured", "predicted"])
def test_a_follower_with_few_trials_tries_what_won_for_the_other_dtype(bench, monkeypatch, target):
    """Also where cache files have more winners to try than it has trials. The fake GPU is as fast at both."""
    monkeypatch.setattr(
        predicted, "MARGIN", 0.0
    )  # what six trials find of the model is 1 to 3 % faster than the default
    configs = legal(portable_of("fwd"), SPEC, target.gpu).configs
    slow = sorted(configs, key=lambda config: -true_time(config, 512))[:4]
    key = TuningKey("rtx-4090", 128, 89, "fwd", "fp16", "ieee", 128, 128, "causal", 512)
    others = [cached(asdict(key.with_(bucket=2048 << n)), config=config) for n, config in enumerate(slow)]
    export(others, bench.folder / "others.sqlite")
    monkeypatch.setattr(reader, "shipped_paths", lambda: [bench.folder / "others.sqlite"])
    report = bench.tune(target, trials=6, dtypes=("bf16", "fp16"), workers=1)
    compiled = {
        dtype: [config for _, its, _, config in bench.did("compile") if its == dtype] for dtype in ("bf16", "fp16")
    }
    won = {binary(found.config) for found in report.rows if found.key.dtype == "bf16"}
    default = binary(portable_of("fwd").space.default(SPEC, target.gpu.arch))
    assert won - {default}, "bf16 found something"
    tried = list(dict.fromkeys(binary(config) for config in compiled["fp16"]))
    assert tried[0] == default and {*tried[1 : 1 + len(won - {default})]} == won - {default}
    assert len(compiled["bf16"]) == 6 and len(compiled["fp16"]) <= 6
    times = {(r.key, r.implementation): true_time(r.config, r.key.bucket) for r in report.rows}
    assert {key.dtype for key, _ in times} == {"bf16", "fp16"}
    for (key, name), time_us in times.items():
        assert key.dtype == "bf16" or time_us <= times[key.with_(dtype="bf16"), name] * (1 + EQUAL_WITHIN)
