"""Races on a simulated GPU: what is dropped, where samples go, what drift, noise and throttling may not do."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import replace
from statistics import median

import pytest
from benchmark_scripts import script as script_named
from click.testing import CliRunner
from simulated_gpu import SimulatedGpu

from fa2tune import gpus
from fa2tune.compiling.registry import portable_of
from fa2tune.measuring import racing
from fa2tune.measuring.samples import EFFORTS, gain_over
from fa2tune.rows.row import MEASURED
from fa2tune.tuning.request import plan
from fa2tune.tuning.request.plan import Target
from fa2tune.tuning.request.provenance import Provenance
from fa2tune.tuning.search.candidates import point
from fa2tune.tuning.select import evidence, finalists

SCREEN, FINAL, PROOF = EFFORTS["screen"], EFFORTS["final"], EFFORTS["proof"]
SMOOTH = {"noise": 1e-6, "drift": 0.0, "outliers": 0.0}


def race(gpu, effort=FINAL, groups=None, **options):
    count = len(gpu.truth)
    return racing.run(gpu, groups or [0] * count, range(count), effort, **options)


def test_a_block_is_a_round_and_its_reverse_so_that_even_drift_cancels():
    gpu = SimulatedGpu([100.0, 100.0, 100.0], drift=0.3, noise=1e-6, warms_in=0.02)
    race(gpu, PROOF)
    assert all(s[:3] == s[:2:-1] and sorted(s[:3]) == [0, 1, 2] for s in gpu.schedules)
    assert len({tuple(s) for s in gpu.schedules}) > 3  # none always runs behind the same neighbour


def test_those_far_behind_leave_after_few_launches_and_the_close_get_the_samples():
    gpu = SimulatedGpu([1000.0, 1500.0, 1150.0, 1050.0, 902.0, 900.0], seed=3)
    found = race(gpu)
    counts = [len(times) for times in found.times]
    assert counts[1] == 2 and counts[2] <= 4 and counts[3] <= 12
    assert counts[0] == counts[5] >= 12 and counts[4] >= 10
    assert finalists.leader(found, range(6)) in (4, 5)


def test_a_race_ends_when_its_leader_is_known():
    smooth, rough = (SimulatedGpu([1000.0, 990.0, 980.0], seed=1, noise=noise, drift=0) for noise in (1e-4, 0.01))
    assert len(race(smooth).times[0]) <= 8 < len(race(rough).times[0]) <= FINAL.rounds(1e-3)


def test_rounds_follow_the_time_of_a_launch():
    assert SCREEN.rounds(10e-6) == SCREEN.most and SCREEN.rounds(1.0) == SCREEN.fewest
    assert PROOF.fewest >= 20 and FINAL.rounds(2e-3) == 50
    gpu = SimulatedGpu([20000.0, 19990.0], noise=0.02)
    assert len(race(gpu).times[0]) == FINAL.fewest


def test_the_anchor_is_never_dropped():
    found = race(SimulatedGpu([5000.0, 1000.0], **SMOOTH), SCREEN)
    assert len(found.times[0]) == len(found.times[1]) >= racing.FIRST_LOOK


def test_the_best_known_from_elsewhere_ends_a_heat_of_losers():
    gpu = SimulatedGpu([1000.0, 980.0, 950.0], **SMOOTH)
    found = race(gpu, SCREEN, best_ratios={0: 0.5})
    assert [len(times) for times in found.times] == [2, 2, 2]
    ahead = race(SimulatedGpu([1000.0, 520.0], **SMOOTH), SCREEN, best_ratios={0: 0.5})
    assert len(ahead.times[1]) == racing.FIRST_LOOK


def test_the_best_of_one_implementation_drops_nothing_of_another():
    gpu = SimulatedGpu([1000.0, 980.0, 1300.0], **SMOOTH)
    found = race(gpu, SCREEN, ["d", "d", "p"], best_ratios={"d": 0.5})
    assert len(found.times[1]) == 2 and len(found.times[2]) == racing.FIRST_LOOK


@pytest.mark.parametrize("effort", [SCREEN, FINAL])
def test_there_is_a_leader_for_each_implementation(effort):
    truth = [1000.0, 960.0, 1400.0, 1300.0, 1800.0]
    found = race(SimulatedGpu(truth, seed=2), effort, ["d", "d", "p", "p", "p"])
    assert finalists.leader(found, [0, 1]) == 1 and finalists.leader(found, [2, 3, 4]) == 3
    assert len(found.times[4]) == 2


def test_a_proof_runs_every_round_of_everybody():
    found = race(SimulatedGpu([1000.0, 2000.0, 500.0]), PROOF)
    assert {len(times) for times in found.times} == {PROOF.rounds(1e-3)}


def test_those_that_cannot_run_are_left_out():
    found = racing.run(SimulatedGpu([1000.0, 1.0, 1000.0]), [0, 0, 0], [0, 2], SCREEN)
    assert found.times[1] == [] and len(found.times[2]) >= racing.FIRST_LOOK


def test_throttled_samples_are_rejected_taken_again_and_counted():
    gpu = SimulatedGpu([1000.0, 990.0], seed=5, throttled=[(0.01, 0.4), (1.2, 1.6)])
    found = race(gpu, PROOF)
    assert not gpu.bad & {t for times in found.times for t in times} and gpu.bad and not found.tainted
    assert found.throttled % 4 == 0 and len(gpu.bad) <= found.throttled <= 12
    assert {len(times) for times in found.times} == {PROOF.rounds(1e-3)}
    assert 1980 <= found.clock_mhz < 2200 and found.power_capped == 1.0


def test_a_gpu_that_stays_throttled_is_taken_as_it_is_and_said_to_be():
    gpu = SimulatedGpu([1000.0, 500.0], throttled=[(0.0, 1e9)], patience=3)
    found = race(gpu, PROOF)
    assert len(found.times[0]) >= PROOF.fewest
    # three blocks were rejected, every other one was kept: no report says that it was rejected
    assert found.throttled == 4 * 3 and found.tainted == 4 * (len(gpu.schedules) - 3) == 2 * len(found.times[0])
    assert evidence.watched(found)["throttled"] == 12
    assert finalists.replaces(*found.times) and not finalists.replaces(*found.times, found.tainted)
    assert gpu.patience == -1  # not asked again once it had time enough


def test_what_was_not_watched_is_not_called_fine():
    found = race(SimulatedGpu([1000.0, 990.0], watched=False), SCREEN)
    assert (found.throttled, found.clock_mhz, found.power_capped) == (None, None, None)
    watched = race(SimulatedGpu([1000.0, 990.0]), SCREEN)
    assert watched.throttled == 0 and evidence.watched(found, watched)["throttled"] == 0
    assert evidence.watched(found) == {"clock_mhz": None, "power_limit_w": None, "throttled": None}


# ---- never slower


def contest(seed, truth):
    """(leader, whether the final's own samples would select it, whether the proof does)."""
    gpu = SimulatedGpu(truth, seed)
    final = race(gpu)
    leader = finalists.leader(final, range(len(truth)))
    gpu.truth = [truth[0], truth[leader]]
    proof = race(gpu, PROOF)
    return leader, finalists.replaces(final.times[0], final.times[leader]), finalists.replaces(*proof.times)


def test_noise_is_not_selected():
    """200 races of 20 equal candidates: the default stays in nearly all of them."""
    found = [contest(seed, [1000.0] * 20) for seed in range(200)]
    assert sum(proved for leader, _, proved in found if leader) <= 10
    # and that is not for want of lucky leaders
    assert sum(flattered for leader, flattered, _ in found if leader) >= 20


def test_what_is_faster_is_selected():
    truth = [1000.0] * 19 + [985.0]
    found = [contest(seed, truth) for seed in range(50)]
    assert sum(leader == 19 and proved for leader, _, proved in found) >= 48


# ---- the order of candidates


class Player:
    """Does the tuner's jobs on a simulated GPU."""

    def __init__(self, script, seed, truth, **gpu):
        self.script, self.truth = script, truth
        self.gpu = SimulatedGpu(seed=seed, **gpu)

    def __call__(self, job):
        job.began, job.notes = True, [-1]
        if job.function == self.script.FUNCTIONS.check:
            job.result = {}
            return job
        _, contenders, effort, *best = job.arguments
        self.gpu.truth = [self.truth[point(config)] for config in contenders]
        groups = [config["LOADS"] for config in contenders]
        job.result = racing.run(self.gpu, groups, range(len(groups)), EFFORTS[effort], *best)
        return job


@pytest.fixture
def script(monkeypatch):
    h200 = gpus.named("h200")
    monkeypatch.setattr(plan, "resolve_target", lambda name: Target(h200, MEASURED, h200))
    return script_named("order_reversal")


def test_reversing_the_candidates_changes_the_winner_by_less_than_a_percent(script, tmp_path):
    """A cool GPU that loses 8 % within the races, noise, outliers, a throttled spell; 24 candidates, many of them close."""
    request = script.plan_for("fwd", 128, "causal", 4096, tmp_path / "cache.sqlite")
    provenance = Provenance(MEASURED, "simulated", "1")
    naive = []
    for seed in range(6):
        first = script.task_of("fwd", request)
        dice = random.Random(seed)
        defaults = script.candidates(first, [], most=2)
        others = [config for config in dice.sample(first.space.legal.configs, 40) if config not in defaults]
        configs = [*defaults, *others[:22]]
        truth = {point(config): 1000 * (1 + 0.06 * dice.random()) for config in configs}
        winners, alone = [], []
        for number, order in enumerate((configs, configs[::-1])):
            player = Player(script, 10 * seed + number, truth, throttled=[(0.3, 0.35)])
            task = first if number == 0 else script.task_of("fwd", request)
            row = script.tuned(task, order, player, tmp_path / f"{seed}-{number}.sqlite", provenance).winner
            assert row.throttled and row.clock_mhz and row.gain_low is not None
            assert dict(row.config) == dict(task.default) or row.gain_low > 1.0
            winners.append(truth[point(row.config)])
            # one after the other, each ten times, as it comes: the cool GPU favours what comes first
            gpu = SimulatedGpu([truth[point(config)] for config in order], 10 * seed + number, warms_in=0.1)
            times = [median(gpu.launch([index] * 10)) for index in range(len(order))]
            alone.append(truth[point(order[times.index(min(times))])])
        naive.append(max(alone) / min(alone))
        assert max(winners) / min(winners) <= 1.01
        assert max(winners) <= 1.01 * min(truth.values())
    assert max(naive) > 1.01


def test_a_row_that_beats_nothing_is_the_default_of_its_implementation(script, tmp_path):
    """All equal: each implementation keeps the default that serves it, with the pair that says so."""
    request = script.plan_for("fwd", 128, "causal", 4096, tmp_path / "cache.sqlite")
    task = script.task_of("fwd", request)
    space = portable_of("fwd").space
    by_pointer = space.default(replace(task.spec, aligned=False), 90)
    configs = script.candidates(task, [], most=16)
    assert by_pointer in configs and by_pointer["LOADS"] != task.default["LOADS"]
    truth = {point(config): 1000.0 if config["LOADS"] == "descriptor" else 1100.0 for config in configs}
    script.tuned(task, configs, Player(script, 4, truth), tmp_path / "c.sqlite", Provenance(MEASURED, "simulated"))
    rows = {row.filed_as: row for row in script.reader.read(tmp_path / "c.sqlite")}
    assert dict(rows["descriptor"].config) == dict(task.default)
    assert dict(rows["pointer"].config) == dict(by_pointer)
    assert [rows["pointer"].gain, rows["pointer"].gain_low, rows["pointer"].gain_high] == [1.0, 1.0, 1.0]


def test_pointer_rows_are_held_against_the_default_by_pointer(script, tmp_path):
    request = script.plan_for("fwd", 128, "causal", 4096, tmp_path / "cache.sqlite")
    task = script.task_of("fwd", request)
    by_pointer = portable_of("fwd").space.default(replace(task.spec, aligned=False), 90)
    configs = script.candidates(task, [], most=16)
    best = next(c for c in configs if c["LOADS"] == "pointer" and c != by_pointer)
    truth = {point(config): 1000.0 if config["LOADS"] == "descriptor" else 1300.0 for config in configs}
    truth[point(best)] = 1250.0
    script.tuned(task, configs, Player(script, 1, truth), tmp_path / "c.sqlite", Provenance(MEASURED, "simulated"))
    row = next(row for row in script.reader.read(tmp_path / "c.sqlite") if row.implementation == "pointer")
    assert dict(row.config) == dict(best)
    assert row.gain == pytest.approx(1300 / 1250, rel=0.01) and row.gain_low > 1.0
    assert row.default_time_us == pytest.approx(1300, rel=0.05)


def test_a_gpu_that_stays_throttled_in_the_proof_replaces_no_default(script, tmp_path, monkeypatch):
    request = script.plan_for("fwd", 128, "causal", 4096, tmp_path / "cache.sqlite")
    task = script.task_of("fwd", request)
    configs = script.candidates(task, [], most=8)
    truth = {point(config): 1000.0 for config in configs}
    truth[point(next(c for c in configs if c["LOADS"] == "descriptor" and c != task.default))] = 800.0
    player = Player(script, 1, truth)

    def hot(job):
        proof = job.function == script.FUNCTIONS.race and job.arguments[2] == "proof"
        player.gpu.windows, player.gpu.patience = [(0.0, 1e9)] if proof else [], 3
        return player(job)

    lines = []
    monkeypatch.setattr(script.Watcher, "line", lambda self, text: lines.append(text))
    script.tuned(task, configs, hot, tmp_path / "c.sqlite", Provenance(MEASURED, "simulated"))
    rows = {row.filed_as: row for row in script.reader.read(tmp_path / "c.sqlite")}
    assert dict(rows["descriptor"].config) == dict(task.default) and rows["descriptor"].throttled
    assert any("stayed throttled" in line for line in lines)
    assert task.kept() is None  # the next run looks again


def test_the_record_of_two_orders(script, tmp_path):
    request = script.plan_for("bwd_dq", 64, "full", 512, tmp_path / "cache.sqlite")
    task = script.task_of("bwd_dq", request)
    shipped = next(path for path in script.reader.shipped_paths() if path.stem == "h200")
    configs = script.candidates(task, script.reader.read(shipped))
    assert len(configs) == script.CANDIDATES and len({point(config) for config in configs}) == len(configs)
    truth = {point(config): 500.0 for config in configs}
    provenance = Provenance(MEASURED, "simulated")
    one = script.tuned(task, configs, Player(script, 0, truth), tmp_path / "c.sqlite", provenance)
    worse = replace(one.winner, config={**one.winner.config, "maxnreg": 128})
    joint = race(SimulatedGpu([500.0, 500.0, 510.0]), PROOF)
    found = script.report(task.keys[0], one, script.Tuned(worse, 1.0), joint)
    assert not found["passed"] and found["low"] > 1.01 and "FAIL" in script.line(found)
    assert script.report(task.keys[0], one, one, joint)["passed"]
    assert gain_over(joint.times[1], joint.times[2]).median == pytest.approx(1 / found["ratio"])


def test_the_script_prints_a_line_a_key_and_writes_its_figures(script, tmp_path, monkeypatch):
    class Everything(dict):
        def __missing__(self, where):
            return 900.0 + zlib.crc32(repr(where).encode()) % 100

    player = Player(script, 7, Everything())
    monkeypatch.setattr(script, "performed", lambda crew, job: player(job))
    monkeypatch.setattr(script, "compiled", lambda tasks, wanted: wanted)
    monkeypatch.setattr(script, "COOL_SECONDS", 0.0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "simulated")
    result = CliRunner().invoke(script.main, [str(tmp_path / "out.json")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert sum(line.endswith("PASS") for line in result.output.splitlines()) == len(script.KEYS) == 5
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["gpu"] == "simulated" and all(
        key["passed"] and len(key["candidates"]) == 12 for key in figures["keys"]
    )
    kinds = {(key["kernel"] == "fwd", key["head_dim"]) for key in figures["keys"]}
    assert {head_dim for _, head_dim in kinds} == {64, 128, 256} and {forward for forward, _ in kinds} == {True, False}
