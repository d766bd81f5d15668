"""What benchmarks/few_queries.py --hopper and --grouped will time, on a machine without a GPU."""

from __future__ import annotations

import pytest
from benchmark_scripts import script

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.calling.kinds import WARP_SPECIALIZED_ROWS
from fa2tune.calling.schedules import in_place_schedule, key_splits_schedule
from fa2tune.compiling import limits

few_queries = script("few_queries")
H200 = gpus.named("h200")


@pytest.mark.parametrize("name", few_queries.HOPPER_CALLS)
def test_a_call_of_few_tiles_is_timed_by_what_would_serve_it(name: str) -> None:
    problem = few_queries.posed(name)
    configs = few_queries.candidates(problem, H200, False, True)
    labels = [few_queries.label(config) for config in configs]
    assert len(set(labels)) == len(labels) <= 12
    assert sum(label.startswith("hopper") for label in labels) >= 4, labels
    choice = choosing.choose(problem, "fwd", H200, WARP_SPECIALIZED_ROWS)
    tuned, chosen = choice.config, key_splits_schedule.config_of(problem, choice.config, H200, choice.row)
    assert chosen is None or few_queries.label(chosen) in labels
    for config in (tuned, *configs):
        for variant, its_config, what in few_queries.kernels_of(name, config):
            assert limits.before_compile(variant, what.specialization, its_config, H200) is None


def test_they_span_what_the_choice_depends_on() -> None:
    problems = [few_queries.posed(name) for name in few_queries.HOPPER_CALLS]
    assert {problem.group for problem in problems} >= {1, 4, 8}
    assert {problem.head_dim for problem in problems} >= {64, 128, 192, 256}
    assert {problem.mask.name for problem in problems} == {"full", "causal"}
    choices = {problem: choosing.choose(problem, "fwd", H200, WARP_SPECIALIZED_ROWS) for problem in problems}
    chosen = [key_splits_schedule.config_of(problem, one.config, H200, one.row) for problem, one in choices.items()]
    by_hopper = [split for split in chosen if split and key_splits_schedule.splitting(split).name == "sm90/fwd_split"]
    assert 0 < len(by_hopper) < len(chosen), "some for which it is predicted to be worth it, and some not"


@pytest.mark.parametrize("name", few_queries.GROUPED_CALLS)
def test_a_call_of_grouped_heads_is_timed_by_what_would_serve_it(name: str) -> None:
    problem = few_queries.posed(name)
    configs = few_queries.candidates(problem, H200, False, False, True)
    labels = [few_queries.label(config) for config in configs]
    assert len(set(labels)) == len(labels) <= 10
    assert sum(label.startswith("grouped") for label in labels) >= 3, labels
    choice = choosing.choose(problem, "fwd", H200, WARP_SPECIALIZED_ROWS)
    chosen = in_place_schedule.instead_of(problem, choice.config, H200, choice.row)
    assert chosen is None or few_queries.label(chosen) in labels
    for config in configs:
        for variant, its_config, what in few_queries.kernels_of(name, config):
            assert limits.before_compile(variant, what.specialization, its_config, H200) is None
