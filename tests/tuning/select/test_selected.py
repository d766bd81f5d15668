"""Which candidates become rows, by measurement."""

import json
import sqlite3
from dataclasses import replace

import pytest
from tuner_fakes import hangs, true_time
from tuner_runs import H100, H200, HERE, SPEC

from fa2tune.compiling.registry import portable_of
from fa2tune.rows.row import SIBLING
from fa2tune.tuning.request.plan import Target
from fa2tune.tuning.select import finalists, gpu_jobs

pytestmark = pytest.mark.usefixtures("portable_kernels", "quick_starts")


def test_crashes_hangs_and_lies_cost_candidates_not_the_run(bench, monkeypatch):
    monkeypatch.setattr(gpu_jobs, "DEADLINE", 6.0)
    monkeypatch.setenv("FA2TUNE_FAKE_POISON", "crash hang wrong")
    report = bench.tune(HERE, trials=26, buckets=(512,), sampler="random", seed=2)
    compiled = bench.tried()
    good = [c for c in compiled if c["num_stages"] != 4 and c["BLOCK_N"] != 128 and not hangs(c)
            and c["HEADS_PER_WAVE"] != 1]  # fmt: skip
    best = min(report.rows, key=lambda row: row.time_us)
    assert true_time(best.config, 512) == min(true_time(c, 512) for c in good)
    for row in report.rows:
        assert row.config["HEADS_PER_WAVE"] != 1
        assert row.pruned["crash"] == sum(c["BLOCK_N"] == 128 and c["num_stages"] != 4 for c in compiled)
        assert row.pruned["timeout"] == sum(hangs(c) and c["num_stages"] != 4 for c in compiled)
    assert any("a child process died" in line and "SIGSEGV" in line for line in bench.lines)


def test_a_default_that_crashes_leaves_rows_without_a_gain(bench, monkeypatch):
    space = portable_of("fwd").space
    bad = {**space.default(SPEC, 90), "BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 2, "num_warps": 8}
    object.__setattr__(portable_of("fwd"), "space", replace(space, default=lambda spec, arch: bad))
    try:
        monkeypatch.setenv("FA2TUNE_FAKE_POISON", "crash")
        report = bench.tune(HERE, trials=12, buckets=(512,))
    finally:
        object.__setattr__(portable_of("fwd"), "space", space)
    assert report.rows and all(row.gain is None and row.default_time_us is None for row in report.rows)
    assert all(row.config["BLOCK_N"] != 128 for row in report.rows)


@pytest.mark.parametrize("quarrels", [1, 2])
def test_a_race_that_dies_with_no_config_failing_alone_is_no_configs_fault(bench, monkeypatch, quarrels):
    """Run again once; what fails together again is left out of this final, and not filed as failing."""
    monkeypatch.setenv("FA2TUNE_FAKE_QUARRELS", str(quarrels))
    report = bench.tune(HERE, trials=8, buckets=(512,))
    proofs = [contenders for *_, contenders in bench.did("proof") if len(contenders) > 1]
    assert len(bench.did("together")) == quarrels and proofs[0] == proofs[1]
    default = portable_of("fwd").space.default(SPEC, 90)
    with sqlite3.connect(bench.folder / "ledger.sqlite") as database:
        assert database.execute("select count(*) from failures where stage = 'launch'").fetchone() == (0,)
    if quarrels == 1:
        assert len(proofs) == 2 and all(row.gain is not None and row.gain >= 1 for row in report.rows)
    else:
        assert report.rows and default not in proofs[2]
        why = "the descriptor row has no gain, as the default config cannot run (failed: "
        assert any(why in line for line in bench.lines)
    monkeypatch.setenv("FA2TUNE_FAKE_QUARRELS", "0")
    again = bench.tune(HERE, trials=8, buckets=(512,))
    assert again.rows and all(row.gain is not None for row in again.rows)


def test_a_default_without_a_time_races_in_the_proof_all_the_same(bench, monkeypatch):
    default = dict(portable_of("fwd").space.default(SPEC, 90))
    monkeypatch.setenv("FA2TUNE_FAKE_SHY", json.dumps(default))
    monkeypatch.setenv("FA2TUNE_FAKE_POISON", "shy")
    report = bench.tune(HERE, trials=8, buckets=(512,))
    assert any(default in contenders for *_, contenders in bench.did("proof"))
    assert default in [config for *_, config in bench.did("check")]
    row = next(row for row in report.rows if row.implementation == "descriptor")
    assert row.gain == pytest.approx(true_time(default, 512) / true_time(row.config, 512))


@pytest.mark.parametrize("cool", ["", "1"])
def test_of_those_that_a_final_leaves_close_the_fastest_alone_is_proved(bench, monkeypatch, cool):
    """But where the GPU was never at its power limit: there no contender sets its clock."""
    monkeypatch.setattr(finalists, "NEAR", 10.0)
    # all that a final has: how many the search finds of each implementation differs from run to run
    monkeypatch.setattr(finalists, "SUSTAINED", 2 * finalists.FINALISTS)
    # of those that the search finds, two may be closer than 1.5 %
    monkeypatch.setattr(finalists, "CLEARLY_SLOWER", 1.0)
    monkeypatch.setenv("FA2TUNE_FAKE_HUNGRY", "1")
    monkeypatch.setenv("FA2TUNE_FAKE_COOL", cool)
    report = bench.tune(HERE, buckets=(4096,))

    def fastest_first(kind):
        (contenders,) = (raced for *_, raced in bench.did(kind))
        return sorted((c for c in contenders if c["LOADS"] == "descriptor"), key=lambda c: true_time(c, 4096))

    if cool:
        assert not bench.did("sustained") and fastest_first("proof")[0] == fastest_first("final")[0]
    else:
        turns = fastest_first("sustained")
        assert 1 < len(turns) <= finalists.SUSTAINED and turns[0] == fastest_first("final")[0]
        assert {json.dumps(c) for c in (turns[0], turns[-1])} <= {json.dumps(c) for c in fastest_first("proof")}
        default = true_time(finalists.rival(portable_of("fwd").space, SPEC, 90, "descriptor"), 4096)
        faster = next((c for c in (turns[-1], turns[0]) if true_time(c, 4096) < default), None)
        (row,) = (row for row in report.rows if row.implementation == "descriptor")
        assert (
            faster is not None and dict(row.config) == faster
        )  # or the leader launch by launch, if that beats the default


def test_a_fused_strategy_that_dies_does_not_cost_the_split_row(bench, monkeypatch):
    monkeypatch.setenv("FA2TUNE_FAKE_POISON", "whole")
    report = bench.tune(HERE, pass_="bwd", trials=3, buckets=(1024,))
    assert not [row for row in report.rows if row.key.kernel == "bwd"]
    monkeypatch.setenv("FA2TUNE_FAKE_POISON", "fused")  # that none came of a failure was not kept
    report = bench.tune(HERE, pass_="bwd", trials=3, buckets=(1024,))
    assert {row.filed_as for row in report.rows if row.key.kernel == "bwd"} == {"split portable"}
    bench.forget()
    monkeypatch.setattr(
        "fa2tune.compiling.fingerprint.backward_hash", lambda strategy, *others: f"other kernels on {strategy}"
    )
    bench.tune(HERE, pass_="bwd", trials=3, buckets=(1024,))
    assert {kernel for kernel, *_ in bench.did("proof")} == {"bwd"}


def test_backward_ends_in_split_and_fused_rows(bench):
    report = bench.tune(HERE, pass_="bwd", trials=5, buckets=(1024,))
    whole = {row.strategy: row for row in report.rows if row.key.kernel == "bwd"}
    assert {row.implementation for row in whole.values()} == {"portable"}
    assert {row.binary_hash for row in whole.values()} == {None}
    assert set(whole) == {"split", "fused"}
    assert set(whole["split"].config) == {"bwd_dq", "bwd_dkdv"} and set(whole["fused"].config) == {"bwd_fused"}
    assert {name for row in whole.values() for name in row.config.values()} <= {"pointer", "descriptor"}
    best = {
        k: min((r for r in report.rows if r.key.kernel == k), key=lambda r: r.time_us)
        for k in ("bwd_dq", "bwd_dkdv", "bwd_fused")
    }
    defaults = sum(true_time(portable_of(k).space.default(SPEC, 90), 1024) for k in ("bwd_dq", "bwd_dkdv"))
    winners = sum(true_time(best[k].config, 1024) for k in ("bwd_dq", "bwd_dkdv"))
    assert whole["split"].gain == pytest.approx(defaults / winners)
    assert whole["fused"].gain == pytest.approx(defaults / true_time(best["bwd_fused"].config, 1024))
    bench.forget()
    bench.tune(HERE, pass_="bwd", trials=5, buckets=(1024,))
    assert not bench.log.exists()


def test_sibling_rows_say_so(bench):
    report = bench.tune(Target(H100, SIBLING, H200), trials=3, buckets=(512,))
    assert {(r.key.gpu, r.obtained, r.proof, r.obtained_on) for r in report.rows} == {
        ("h100-sxm", "sibling", "sibling", "NVIDIA H200")
    }
