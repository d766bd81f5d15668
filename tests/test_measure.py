"""Statistics of timings, which crown or refuse; the timing itself needs a GPU (tests/gpu)."""

import random
from dataclasses import replace

import pytest

from fa2tune import crown, gpus, measure
from fa2tune.problem import TuningKey
from fa2tune.samples import EFFORTS, Gain, gain_over, median_interval, quantile
from fa2tune.study import Outcome

KEY = TuningKey("h200", 132, 90, "fwd", "bf16", "ieee", 128, 128, False, 2048)


def test_quantiles():
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([1.0, 2.0, 3.0], 0.0) == 1.0 and quantile([1.0, 2.0, 3.0], 1.0) == 3.0
    assert quantile([7.0], 0.9) == 7.0


def test_interval_is_the_binomial_one():
    # n = 20: the 6th smallest and the 6th largest hold the median with 95.9 %
    assert median_interval([float(i) for i in range(1, 21)]) == (6.0, 15.0)
    assert median_interval([1.0, 2.0, 3.0]) == (1.0, 3.0)


def test_interval_covers_the_median_as_often_as_it_says():
    rng = random.Random(0)
    hits = 0
    for _ in range(600):
        low, high = median_interval([rng.lognormvariate(0, 1) for _ in range(25)])
        hits += low <= 1.0 <= high
    assert 0.93 < hits / 600 <= 1.0


def test_gain_pairs_round_by_round_so_that_drift_cancels():
    drift = [1 + 0.02 * i for i in range(30)]
    gain = gain_over([110 * d for d in drift], [100 * d for d in drift])
    assert gain == Gain(pytest.approx(1.1), pytest.approx(1.1), pytest.approx(1.1))
    with pytest.raises(ValueError):
        gain_over([1.0], [])


def outcome(block_m):
    return Outcome({"BLOCK_M": block_m, "LOADS": "pointer"}, 1.0)


def test_the_default_stays_unless_beaten_beyond_the_interval():
    default, other = outcome(64), outcome(128)
    unsure = [(default, Gain(1.0, 1.0, 1.0)), (other, Gain(1.01, 0.99, 1.03))]
    sure = [(default, Gain(1.0, 1.0, 1.0)), (other, Gain(1.03, 1.01, 1.05))]
    assert crown.winner(default, unsure) == 0
    assert crown.winner(default, sure) == 1
    assert crown.winner(None, unsure) == 1


def test_measured_row_holds_its_evidence():
    toolchain = crown.Toolchain("measured", "NVIDIA H200", "580.1")
    row = crown.measured(KEY, "pointer", {"BLOCK_M": 64}, toolchain, [100.0, 110.0, 90.0], [200.0, 220.0, 180.0])
    assert (row.time_us, row.gain, row.samples, row.default_time_us) == (100.0, 2.0, 3, 200.0)
    assert row.tflops == pytest.approx(KEY.workload().flops("fwd") / 100e-6 / 1e12)
    assert row.time_low_us < row.time_us < row.time_high_us and row.proof == "target"
    assert (row.batch, row.heads_q, row.heads_kv) == (8, 16, 16)


def test_what_surrounds_a_backward_is_memory_traffic():
    problem, h200 = KEY.workload(), gpus.named("h200")
    split, fused = (crown.streaming_us(problem, road, h200) for road in ("split", "fused"))
    assert 20 < split < 60 and fused > 2 * split
    assert crown.streaming_us(problem, "split", replace(h200, hbm_gbs=h200.hbm_gbs / 2)) == pytest.approx(2 * split)


def test_rounds_follow_the_time_of_a_launch():
    screen, final = EFFORTS["screen"], EFFORTS["final"]
    assert screen.rounds(10e-6) == screen.most_rounds and screen.rounds(1.0) == screen.least_rounds
    assert final.least_rounds >= 20 and final.rounds(2e-3) == 40


class Clock:
    """A GPU on which a launch takes what it says, and nothing else takes time."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.last_used = 0.0
        self.order = []
        clock = self

        class Event:
            def __init__(self, enable_timing):
                self.at = 0.0

            def record(self):
                self.at = clock.now

            def elapsed_time(self, end):
                return end.at - self.at

        monkeypatch.setattr("torch.cuda.Event", Event)
        monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
        monkeypatch.setattr(measure, "_card", lambda: self)

    def runner(self, name, milliseconds):
        def run():
            self.order.append(name)
            self.now += milliseconds

        return run

    def time(self, run, start, end):
        start.record()
        run()
        end.record()


def test_rounds_are_interleaved_and_the_hopeless_dropped(monkeypatch):
    clock = Clock(monkeypatch)
    runners = {0: clock.runner("default", 1.0), 1: clock.runner("slow", 3.0), 2: clock.runner("good", 0.9)}
    times = measure._run(runners, 4, EFFORTS["final"], 1.0)
    assert clock.order[:6] == ["default", "slow", "good", "slow", "good", "default"]
    assert times[1] == [pytest.approx(3000)] * measure.HOPELESS_AFTER and times[3] == []
    assert len(times[0]) == len(times[2]) == EFFORTS["final"].rounds(1e-3)
    assert gain_over(times[0], times[2]).median == pytest.approx(1 / 0.9)


def test_the_anchor_is_never_dropped(monkeypatch):
    clock = Clock(monkeypatch)
    times = measure._run({0: clock.runner("a", 5.0), 1: clock.runner("b", 1.0)}, 2, EFFORTS["screen"], 0.2)
    assert len(times[0]) == len(times[1]) == EFFORTS["screen"].rounds(5e-3)
    times = measure._run({0: clock.runner("a", 5.0), 1: clock.runner("b", 4.0)}, 2, EFFORTS["screen"], 0.2)
    assert len(times[1]) == measure.HOPELESS_AFTER  # against the best known, not only against those in the race
