"""A run over a small space of which some configs are poisoned."""

import json
import random
import sqlite3
from collections import Counter
from dataclasses import replace

import fake_log
import isolation_fakes as faults
import optuna
import pytest
from child_processes import ROOM, resident
from click.testing import CliRunner
from tuner_fakes import true_time

from fa2tune import gpus
from fa2tune.cli.tune import tune as tune_command
from fa2tune.compiling import compiler
from fa2tune.compiling.registry import portable_of
from fa2tune.rows import reader
from fa2tune.rows.row import MEASURED
from fa2tune.spec.problem import Specialization
from fa2tune.tuning.request import plan
from fa2tune.tuning.request.plan import Target, TuneRequest
from fa2tune.tuning.request.watcher import Watcher, WorkerFunctions
from fa2tune.tuning.run import compiles, tuner

SPEC = Specialization("bf16", 128, 128, "causal")


H200 = gpus.named("h200")


FWD = portable_of("fwd")

FAKES = WorkerFunctions(
    "isolation_fakes:compile_check", "isolation_fakes:race", "isolation_fakes:check", "tuner_fakes:check_backward"
)

BUCKETS = (512, 4096)


class Bench:
    """Runs the tuner over a small space, of which some configs are poisoned, and tells what came of it."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.log = folder, folder / "faults.jsonl"
        self.lines = []
        monkeypatch.setenv("FA2TUNE_FAKE_LOG", str(folder / "log.jsonl"))
        monkeypatch.setenv("FA2TUNE_FAULTS", str(folder / "faults.json"))
        monkeypatch.setattr(reader, "shipped_paths", list)
        monkeypatch.setattr(plan, "resolve_target", lambda name: Target(H200, MEASURED, H200))
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
        monkeypatch.setattr(compiles, "AT_FIRST", 10.0)
        monkeypatch.setattr(compiles, "AT_LEAST", 10.0)
        monkeypatch.setattr(compiles, "MEMORY", resident() + ROOM)
        self.space = FWD.space
        dimensions = {
            "BLOCK_M": (64, 128), "BLOCK_N": (32, 64), "LOADS": ("pointer", "descriptor"), "MASKED": ("last",),
            "HEADS_PER_WAVE": (1, 4), "num_warps": (4,), "num_stages": (2, 3), "maxnreg": (0,),
        }  # fmt: skip
        default = dict(self.space.default(SPEC, 90)) | {name: values[0] for name, values in dimensions.items()}
        small = replace(self.space, dimensions=dimensions, default=lambda spec, arch: default)
        object.__setattr__(FWD, "space", small)
        self.default = default
        compiler.runtime_names(FWD)  # imports Triton, which takes a second that deadlines as short as these would miss
        self.poison([])

    def close(self):
        object.__setattr__(FWD, "space", self.space)

    def poison(self, faulty):
        """(config, fault) of each that shall go wrong."""
        table = {"faults": list(faulty), "log": str(self.log)}
        (self.folder / "faults.json").write_text(json.dumps(table))
        return table

    def one_each(self, kinds, spared=()):
        """Each fault on a binary of its own; the default and ``spared`` stay healthy."""
        taken = [faults.binary_of(config) for config in (self.default, *spared)]
        chosen = []
        free = random.Random(1).sample(points := bench_configs(), len(points))
        for kind in kinds:
            config = next(config for config in free if faults.binary_of(config) not in taken)
            taken.append(faults.binary_of(config))
            chosen.append((config, kind))
        return chosen

    def request(self, name, **more):
        values = {
            "trials": 1000,
            "buckets": BUCKETS,
            "dtypes": ("bf16",),
            "masks": ("causal",),
            "pass_": "fwd",
            "workers": 2,
        }
        return TuneRequest(
            cache=self.folder / f"{name}.sqlite", studies=self.folder / f"{name}-studies.sqlite", **{**values, **more}
        )

    def tune(self, name, **more):
        self.log.unlink(missing_ok=True)
        lines = self.lines = []

        class Listener(Watcher):
            def line(self, text):
                lines.append(text)

        return tuner.tune(self.request(name, **more), Listener(), FAKES)

    def tried(self, name):
        """Every config of the studies of one file."""
        storage = f"sqlite:///{self.folder / name}-studies.sqlite"
        studies = [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]
        trials = [trial.params for study in studies for trial in study.trials]
        return [dict(found) for found in dict.fromkeys(tuple(sorted(params.items())) for params in trials)]

    def done(self):
        """(fault, config) of each that happened."""
        return [tuple(entry) for entry in fake_log.read(self.log)]


@pytest.fixture
def bench(tmp_path, monkeypatch, portable_kernels, quick_starts):
    """How a child starts is tested above."""
    bench = Bench(tmp_path, monkeypatch)
    yield bench
    bench.close()


def winners(report):
    return {(row.key.bucket, row.implementation): dict(row.config) for row in report.rows}


def test_three_poisoned_in_ten_change_no_winner_and_none_is_tried_twice(bench, monkeypatch):
    best = winners(bench.tune("clean"))
    assert set(best) == {(bucket, loads) for bucket in BUCKETS for loads in ("pointer", "descriptor")}

    kinds = (*faults.COMPILING, *faults.LAUNCHING)
    table = bench.poison(bench.one_each(kinds, best.values()))
    poisoned = bench.tune("poisoned")
    tried = bench.tried("clean")
    hit = [fault for config in tried if (fault := faults.fault_of(config, table))]
    assert len(hit) > 0.3 * len(tried) and {fault for fault, _ in bench.done()} == set(hit) == set(kinds)
    assert winners(poisoned) == best
    assert sorted(map(repr, bench.tried("poisoned"))) == sorted(map(repr, tried))  # none was lost on the way
    counted = Counter(faults.STATUS[fault] for fault in hit)
    for row in poisoned.rows:
        assert {status: row.pruned.get(status, 0) for status in counted} == counted and "failed" not in row.pruned

    # a compile that took too long is given another chance, by the next run only
    monkeypatch.setattr(compiles, "AT_FIRST", 3.0)  # nothing else is compiled in that run
    second = bench.tune("poisoned")
    monkeypatch.setattr(compiles, "AT_FIRST", 10.0)
    assert {fault for fault, _ in bench.done()} == {"stall"} and second.compiled == 1 and winners(second) == best

    # another study (a file of its own, other lengths) leaves them out, and says so
    again = bench.tune("another", buckets=(1024,))
    assert not bench.done()
    assert len(bench.tried("another")) == len(tried) - len(hit)
    for row in again.rows:
        assert {name: row.pruned.get(f"{name}_before", 0) for name in counted} == counted
    (said,) = [line for line in bench.lines if "candidates left out, as they failed" in line]
    assert "--retry-failed" in said and said.count("earlier run") == 1 and "_" not in said
    assert {v: c for (_, v), c in winners(again).items()} == {v: c for (b, v), c in best.items() if b == 512}

    # the study they failed in resumes without a word, and takes a new length without them
    before = bench.tune("poisoned")
    assert before.compiled == 0 and winners(before) == best and not bench.done()
    assert not any("candidates left out" in line for line in bench.lines)
    bench.tune("poisoned", buckets=(*BUCKETS, 1024))
    assert not bench.done()


def test_a_check_that_hangs_disqualifies_its_candidate(bench):
    best = winners(bench.tune("clean", buckets=(512,)))
    bench.poison([(best[512, "pointer"], "check_hang")])
    sick = bench.tune("sick", buckets=(512,))
    assert {fault for fault, _ in bench.done()} == {"check_hang"} and len(bench.done()) == 2  # looked at twice
    assert set(winners(sick)) == set(best) and winners(sick)[512, "pointer"] != best[512, "pointer"]
    bench.tune("another", buckets=(512,))
    assert not bench.done()


def test_retry_failed_tries_again_and_a_cured_candidate_may_win(bench, monkeypatch):
    best = winners(bench.tune("clean", buckets=(512,)))
    bench.poison(zip(best.values(), ("crash", "illegal"), strict=True))
    sick = bench.tune("sick", buckets=(512,))
    failed = {json.dumps(config, sort_keys=True) for fault, config in bench.done()}
    assert failed and winners(sick) != best
    bench.poison([])
    assert winners(bench.tune("sick", buckets=(512,))) == winners(sick)  # cured, but not tried again
    cured = bench.tune("sick", buckets=(512,), retry_failed=True)
    assert cured.compiled == len(failed) and winners(cured) == best
    assert cured.statuses == {}
    assert winners(bench.tune("sick", buckets=(512,))) == best and not any("left out" in line for line in bench.lines)


def test_another_driver_tries_launches_again_and_compiles_not(bench, monkeypatch):
    driver = ["580.1"]
    monkeypatch.setattr("fa2tune.compiling.fingerprint.driver_version", lambda: driver[0])
    bench.poison(bench.one_each(faults.QUICK))
    bench.tune("study", buckets=(512,))
    kinds = Counter(fault for fault, _ in dict.fromkeys((f, json.dumps(c)) for f, c in bench.done()))
    assert sum(kinds[kind] for kind in faults.COMPILING) and sum(kinds[kind] for kind in faults.LAUNCHING)
    driver[0] = "590.1"
    rows = bench.tune("study", buckets=(512,)).rows
    assert rows and {row.driver for row in rows} == {"590.1"}  # none that was kept under the other
    again = Counter(fault for fault, _ in dict.fromkeys((f, json.dumps(c)) for f, c in bench.done()))
    assert {kind: n for kind, n in kinds.items() if kind not in faults.COMPILING} == again


def bench_configs():
    """Every point of the small space."""
    return list(FWD.space.points())


def test_the_failure_record_is_no_part_of_a_cache_file(bench):
    bench.poison(bench.one_each(("abort", "crash")))
    bench.tune("cache", buckets=(512,))
    assert (bench.folder / "ledger.sqlite").exists()
    with sqlite3.connect(bench.folder / "cache.sqlite") as connection:
        assert {name for (name,) in connection.execute("select name from sqlite_master")} == {"rows"}


def test_the_command_tells_what_failed_and_how_to_try_again(bench, monkeypatch):
    monkeypatch.setattr("fa2tune.tuning.request.watcher.WorkerFunctions", lambda: FAKES)
    bench.poison(bench.one_each(("abort", "crash")))
    bench.tune("first", buckets=(512,))
    arguments = [
        "--dtype",
        "bf16",
        "--causal",
        "--pass",
        "fwd",
        "--seqlen",
        "512",
        "--trials",
        "1000",
        "--workers",
        "2",
    ]
    files = ["--cache", str(bench.folder / "c.sqlite"), "--studies", str(bench.folder / "s.sqlite")]
    result = CliRunner().invoke(tune_command, [*arguments, *files])
    assert result.exit_code == 0, result.output
    (messages,) = [line for line in result.output.splitlines() if "candidates left out" in line]
    assert "--retry-failed" in messages and "crash: " in messages
    assert any(
        line.strip().startswith("portable/fwd: ") and "crash, in an earlier run: " in line
        for line in result.output.splitlines()
    )
    (bench.folder / "ledger.sqlite").write_text("poem, and long enough that SQLite looks at it " * 20)
    result = CliRunner().invoke(tune_command, [*arguments, *files])
    assert result.exit_code == 1 and "no database" in result.output.replace("not a", "no") and "ledger" in result.output


def test_true_times_of_the_small_space_differ(bench):
    """Or else the same winner would be luck."""
    times = sorted(true_time(config, 512) for config in bench_configs() if config["LOADS"] == "pointer")
    assert times[0] < times[1]
