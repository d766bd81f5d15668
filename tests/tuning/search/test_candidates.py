"""Candidates, samplers and studies."""

import pytest
from tuner_fakes import true_time
from tuner_runs import A100, H200, SPEC

from fa2tune.compiling.registry import portable_of
from fa2tune.sharing.storage import Storage
from fa2tune.sharing.study_writer import StudyWriter
from fa2tune.spec.key import TuningKey
from fa2tune.tuning.request.plan import SAMPLERS
from fa2tune.tuning.search.candidates import Field, UnseenSampler, legal, point
from fa2tune.tuning.search.proposals import Search
from fa2tune.tuning.search.study import KeyStudy, TrialOutcome

pytestmark = pytest.mark.usefixtures("portable_kernels", "quick_starts")


def test_winners_are_all_tried_whatever_the_number_of_trials():
    field = Field(portable_of("fwd").space, legal(portable_of("fwd"), SPEC, A100).configs[:40])
    first, *others = field.configs
    key = TuningKey("a100-sxm-80gb", 108, 80, "fwd", "fp16", "ieee", 128, 128, "causal", 512)
    study = KeyStudy(key, "", UnseenSampler("random", field, 0, 2), StudyWriter(Storage()))
    search = Search(field, {*field.points}, [study], 2, [first, others[0]])
    illegal = {**first, "BLOCK_M": 1}
    search.start_from([illegal, *others[5:8]])
    assert [search.propose() for _ in range(4)] == [first, *others[5:8]]
    assert search.trials == 4 and search.propose() is None


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_propose_unseen_legal_points_only(name):
    variant = portable_of("fwd")
    configs = legal(variant, SPEC, A100).configs[::7]
    sampler = UnseenSampler(name, Field(variant.space, configs), seed=1, trials=6)
    key = TuningKey("a100-sxm-80gb", 108, 80, "fwd", "bf16", "ieee", 128, 128, "causal", 512)
    study = KeyStudy(key, "stamp", sampler, StudyWriter(Storage()))
    count = 5
    proposed = []
    for _ in range(count):
        proposed.append(study.ask(set()))
        study.tell(TrialOutcome(proposed[-1], true_time(proposed[-1], 512)))
    assert len({point(config) for config in proposed}) == count
    assert {point(config) for config in proposed} <= {point(config) for config in configs}
    if name != "gp":  # slow
        while (config := study.ask(set())) is not None:
            study.tell(TrialOutcome(config, None, "spills", "why"))
            proposed.append(config)
        assert len(proposed) == len(configs)


def test_tpe_learns():
    variant = portable_of("fwd")
    configs = legal(variant, SPEC, H200).configs
    ranks = sorted(true_time(config, 512) for config in configs)
    key = TuningKey("h200", 132, 90, "fwd", "bf16", "ieee", 128, 128, "causal", 512)
    best = []
    for seed in range(3):
        sampler = UnseenSampler("tpe", Field(variant.space, configs), seed, trials=40)
        study = KeyStudy(key, "", sampler, StudyWriter(Storage()))
        for _ in range(40):
            config = study.ask(set())
            study.tell(TrialOutcome(config, true_time(config, 512)))
        best.append(ranks.index(study.ranked()[0].time_us) / len(ranks))
    assert max(best) < 0.01


def test_legal_points_keep_every_limit_and_the_rest_have_a_reason():
    variant = portable_of("fwd")
    found = legal(variant, SPEC, A100)
    total = sum(1 for _ in variant.space.points())
    assert len(found.configs) + sum(found.refused.values()) == total and len(found.configs) > 100
    assert all(config["LOADS"] == "pointer" for config in found.configs)


def test_a_study_survives_on_disk(tmp_path):
    variant = portable_of("fwd")
    configs = legal(variant, SPEC, A100).configs
    key = TuningKey("a100-sxm-80gb", 108, 80, "fwd", "bf16", "ieee", 128, 128, "causal", 512)

    def opened(stamp="one"):
        writer = StudyWriter(Storage.of_studies(tmp_path / "studies.sqlite"))
        return KeyStudy(key, stamp, UnseenSampler("tpe", Field(variant.space, configs), 0, 20), writer)

    study = opened()
    study.tell(TrialOutcome(configs[0], 12.5, binary={"registers": 1}))
    study.tell(TrialOutcome(configs[1], None, "crash", "SIGSEGV"))
    study.disqualify(configs[0], "NaN")
    study.writer.close()
    again = opened()
    assert (
        again.outcomes == study.outcomes
        and again.ranked() == []
        and again.statuses() == {"crash": 1, "wrong_result": 1}
    )
    assert opened("two").outcomes == {}
