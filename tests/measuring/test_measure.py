"""Statistics of timings, which select or refuse; the timing itself needs a GPU (tests/gpu)."""

import random
from dataclasses import replace

import pytest

from fa2tune import gpus
from fa2tune.compiling.registry import portable_of
from fa2tune.measuring import measure
from fa2tune.measuring.clock_monitor import ClockMonitor
from fa2tune.measuring.samples import CRAWLING, Gain, Race, gain_over, median_interval, quantile
from fa2tune.measuring.worker import Job
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import Specialization
from fa2tune.tuning.request.provenance import Provenance
from fa2tune.tuning.search import status
from fa2tune.tuning.search.failures import BLAMELESS, FAULTS
from fa2tune.tuning.search.study import TrialOutcome
from fa2tune.tuning.select import evidence, finalists

KEY = TuningKey("h200", 132, 90, "fwd", "bf16", "ieee", 128, 128, "full", 2048)


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


def outcome(block_m, time_us=1.0):
    return TrialOutcome({"BLOCK_M": block_m, "LOADS": "pointer"}, time_us)


def test_the_default_stays_unless_beaten_beyond_the_interval():
    default = [100.0, 101.0, 99.0, 100.0, 102.0, 98.0, 100.0, 100.0]
    sure = [time / 1.02 for time in default]
    unsure = [
        time / ratio for time, ratio in zip(default, (1.02, 1.02, 1.02, 0.99, 1.02, 1.02, 1.02, 0.99), strict=True)
    ]
    assert finalists.replaces(default, sure) and not finalists.replaces(default, unsure)
    assert gain_over(default, unsure).median > 1.0
    assert not finalists.replaces(default, default)


def test_finalists_are_those_a_screening_cannot_tell_apart():
    ranked = [outcome(n, time_us) for n, time_us in enumerate((100.0, 101.0, 103.9, 104.5, 110.0))]
    assert finalists.finalists(ranked) == ranked[:3]
    assert len(finalists.finalists([outcome(n, 100.0) for n in range(20)])) == finalists.FINALISTS
    assert finalists.finalists([]) == []


def test_the_leader_is_the_fastest_by_paired_ratios_of_those_that_ran_to_the_end():
    drift = [1.0, 1.1, 1.2, 1.3]
    race = Race([[100 * d for d in drift], [90 * d for d in drift], [50.0, 50.0], [95 * d for d in drift]])
    assert finalists.leader(race, [0, 1, 2, 3]) == 1 and finalists.leader(race, [2, 3]) == 3


def test_contested_are_near_leaders_that_have_near_rivals_of_their_implementation_and_these():
    drift = [1.0, 1.1, 1.2, 1.3]
    race = Race([[100 * d for d in drift], [98 * d for d in drift], [101.0, 111.1], [130.0, 143.0], []])
    assert finalists.contested(race, {"pointer": 0, "descriptor": 3}, {"pointer": [0, 1, 4], "descriptor": [3, 2]}) == [
        0,
        1,
    ]
    assert finalists.contested(race, {"pointer": 0, "descriptor": 2}, {"pointer": [0, 1], "descriptor": [2, 3]}) == [
        0,
        1,
    ]
    assert finalists.contested(race, {"pointer": 0, "descriptor": 1}, {"pointer": [0], "descriptor": [1]}) == []
    many = Race([[100.0 + i / 10] for i in range(9)])
    assert finalists.contested(many, {"pointer": 7}, {"pointer": range(9)}) == [7, *range(finalists.SUSTAINED - 1)]


@pytest.mark.parametrize(
    ("first", "leads"), [((102.0, 101.5), 8), ((101.0, 101.5), 5), ((104.0, 99.0), 5), ((98.0, 98.0), 5)]
)
def test_what_leads_its_implementation_is_overruled_only_where_clearly_slower_in_both_turns(first, leads):
    """Of the final's contenders 5, 8 and 2 had turns; 2 is of another implementation, 1 leads a third."""
    turns = Race([list(first), [100.0, 100.0], [50.0, 50.0]])
    leading = {"descriptor": 5, "warp_specialized": 2, "pointer": 1}
    of = {"descriptor": [5, 8, 9], "warp_specialized": [2], "pointer": [1]}
    assert finalists.overruled(turns, [5, 8, 2], leading, of) == {**leading, "descriptor": leads}
    assert finalists.overruled(replace(turns, tainted=2), [5, 8, 2], leading, of) == leading


def test_what_a_row_has_to_beat():
    space = portable_of("fwd").space
    spec = Specialization("bf16", 128, 128, "causal")
    default, by_pointer = space.default(spec, 90), space.default(replace(spec, aligned=False), 90)
    assert default["LOADS"] == "descriptor" and by_pointer["LOADS"] == "pointer"
    assert finalists.rival(space, spec, 90, "descriptor") == default
    assert finalists.rival(space, spec, 90, "pointer") == by_pointer
    exact = Specialization("fp32", 128, 128, "causal")  # whose default is by pointer
    assert {finalists.rival(space, exact, 90, loads)["LOADS"] for loads in ("pointer", "descriptor")} == {"pointer"}


def test_measured_row_holds_its_evidence():
    provenance = Provenance("measured", "NVIDIA H200", "580.1")
    row = evidence.measured(KEY, "pointer", {"BLOCK_M": 64}, provenance, [100.0, 110.0, 90.0], [200.0, 220.0, 180.0])
    assert (row.time_us, row.gain, row.samples, row.default_time_us) == (100.0, 2.0, 3, 200.0)
    assert row.tflops == pytest.approx(KEY.workload().flops("fwd") / 100e-6 / 1e12)
    assert row.time_low_us < row.time_us < row.time_high_us and row.proof == "target"
    assert (row.batch, row.heads_q, row.heads_kv) == (8, 16, 16)


def test_what_surrounds_a_backward_is_memory_traffic():
    problem, h200 = KEY.workload(), gpus.named("h200")
    split, fused = (evidence.streaming_us(problem, strategy, h200) for strategy in ("split", "fused"))
    assert 10 < split < 30 and fused > 2 * split
    assert evidence.streaming_us(problem, "split", replace(h200, hbm_gbs=h200.hbm_gbs / 2)) == pytest.approx(2 * split)


class Queue:
    """A stream on which a launch takes what it says, and nothing else takes time."""

    def __init__(self, monkeypatch):
        self.now, self.did, self.reports = 0.0, [], []
        queue = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = queue.now
                queue.did.append("event")

            def elapsed_time(self, end):
                return end.at - self.at

        monkeypatch.setattr("torch.cuda.Event", Event)
        monkeypatch.setattr("torch.cuda.synchronize", lambda: self.did.append("wait"))
        monkeypatch.setattr("time.sleep", lambda seconds: self.did.append("sleep"))
        monkeypatch.setattr(measure.worker, "report", lambda note, seconds=None: self.reports.append(note))

    flush_buffer = property(lambda self: self)
    last_used = 0.0

    def zero_(self):
        self.did.append("flush")

    def warm_up(self):
        self.did.append("warm")

    def runner(self, name, milliseconds):
        def run():
            self.did.append(name)
            self.now += milliseconds

        return run


def test_each_launch_stands_between_events_behind_a_flush(monkeypatch):
    queue = Queue(monkeypatch)
    track = measure._Track(queue, {0: queue.runner("a", 1.0), 2: queue.runner("b", 3.0)}, ClockMonitor(""), 0.0)
    assert track.launch([2, 0, 0, 2]) == pytest.approx([3000, 1000, 1000, 3000])
    one = ["flush", "event", "{}", "event"]
    each = [word.format(name) for name in "baab" for word in one]
    assert queue.did == ["flush"] * measure.LEAD + each + ["wait"] and queue.reports == [-1]


def test_a_turn_is_timed_once_it_has_settled_on_a_hot_card(monkeypatch):
    queue = Queue(monkeypatch)
    monkeypatch.setattr(measure.time, "monotonic", lambda: queue.now / 1e3)
    track = measure._Track(queue, {0: queue.runner("a", 10.0)}, ClockMonitor(""), 0.5)
    assert track.launch([0]) == pytest.approx([10_000])
    assert queue.now / 1e3 == pytest.approx(measure.HOT_SECONDS + 0.5, abs=0.2) and queue.last_used == queue.now / 1e3
    timed = ["event", *["a"] * round(0.5 * (1 - measure.SETTLING) / 0.010), "event", "wait"]
    assert queue.did[-len(timed) :] == timed and "flush" not in queue.did
    before = queue.now
    track.launch([0])
    assert queue.now - before == pytest.approx(500, abs=100)  # hot it is
    track.rest()
    before = queue.now
    track.launch([0])
    assert queue.now - before == pytest.approx(1e3 * (measure.HOT_SECONDS + 0.5), abs=200)


def test_a_slow_kernel_is_launched_a_few_times_a_turn_and_said_to_live(monkeypatch):
    queue = Queue(monkeypatch)
    monkeypatch.setattr(measure.time, "monotonic", lambda: queue.now / 1e3)
    track = measure._Track(queue, {0: queue.runner("a", 2000.0)}, ClockMonitor(""), 0.5)
    track.hot = True
    assert track.launch([0]) == pytest.approx([2e6])
    assert queue.did.count("a") == 2 * measure.FEW and queue.reports == [-1] * 2


def test_a_throttled_gpu_rests_so_often_and_no_more(monkeypatch):
    queue = Queue(monkeypatch)
    monkeypatch.setattr(measure, "RESTS", 2)
    for _ in range(2):  # in each race anew
        track = measure._Track(queue, {}, ClockMonitor(""), 0.0)
        assert [track.rest() for _ in range(4)] == [True, True, False, False]
    assert queue.did == ["sleep", "warm"] * 4 and queue.reports == [-1] * 4  # it is alive


def test_a_slow_first_launch_is_launched_again_before_it_is_refused(monkeypatch):
    """Contender 1 crawls, 2 was held up once."""
    now, took = [0.0], {0: [0.001], 1: [2.0, 2.0], 2: [2.0, 0.001], 3: [0.1]}
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(measure.time, "monotonic", lambda: now[0])

    def runner(key, contender, tensors):
        return lambda: now.__setitem__(0, now[0] + took[contender].pop(0))

    monkeypatch.setattr(measure, "_runner", runner)
    runners, failures = measure._line_up(KEY, [0, 1, 2, 3], {})
    assert list(runners) == [0, 2, 3] and not any(took.values())
    assert list(failures) == [1] and status.refusal_status(failures[1]) == CRAWLING not in FAULTS | BLAMELESS


def test_memory_that_is_missing_at_a_launch_is_no_configs_fault():
    assert status.refusal_status("OutOfMemoryError: CUDA out of memory") == "failed"
    assert status.refusal_status("OutOfResources: shared memory") == "launch_error"
    job = Job("m:f", (), 1.0, began=True, failure="OutOfMemoryError: CUDA out of memory")
    assert status.launch_status(job) == "failed"
    job.died = True
    assert status.launch_status(job) == "out_of_memory"
