"""Which calls have their divisors from the host (DIVISORS), and what says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_early_start_choice import SPLIT, check_fallback, choices, posed

from fa2tune import gpus
from fa2tune.calling import choosing, serving
from fa2tune.calling.schedules import forward_schedule, fused_schedule, split_backward_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.fleet import precompile
from fa2tune.rows.row import MEASURED
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, band
from fa2tune.spec.problem import Problem
from fa2tune.spec.score import Score

H200 = gpus.named("h200")
SHORT = [
    posed(5, 8, 247, 247, 120, CAUSAL), posed(3, 17, 935, 935, 16, FULL), posed(8, 4, 396, 396, 144, FULL),
    posed(2, (41, 1), 593, 593, 200, FULL),
]  # fmt: skip
LONG = [posed(8, 16, 4096, 4096, 128, CAUSAL), posed(2, 10, 8000, 8000, 248, FULL)]
OTHER = [
    replace(SHORT[0], mask=band(100, 0)), replace(SHORT[0], score=Score("softcap", 20.0)),
    replace(SHORT[0], batch=1, seqlen_q=1235, seqlen_k=1235, extent=Extent(RAGGED, 5, 247)), posed(1, 2, 0, 500, 64, FULL),
]  # fmt: skip


def forward(problem: Problem) -> Choice:
    return choosing.choose(problem, "fwd", H200)


@pytest.mark.parametrize("problem", SHORT, ids=str)
def test_short_forwards_have_them(problem: Problem) -> None:
    choice = forward(problem)
    assert choice.config["DIVISORS"] and choice.estimated and not choice.of_row.config.get("DIVISORS")


@pytest.mark.parametrize("problem", LONG, ids=str)
def test_long_forwards_have_not(problem: Problem) -> None:
    assert not forward(problem).config.get("DIVISORS")


@pytest.mark.parametrize("problem", OTHER, ids=str)
def test_other_masks_scores_packed_calls_and_no_queries_have_not(problem: Problem) -> None:
    assert not forward(problem).config.get("DIVISORS")


def test_the_workload_of_a_row_has_what_was_measured() -> None:
    rows = [
        row for layer in choosing.layers() for row in layer.rows
        if (row.key.gpu, row.key.kernel, row.key.mask, row.obtained) == ("h200", "fwd", "causal", MEASURED)
    ]  # fmt: skip
    served = [choice for row in rows if (choice := forward(row.key.workload())).row is row]
    short = [choice for choice in served if choice.row.time_us <= forward_schedule.DIVISORS_US]  # type: ignore[union-attr]
    assert short and not any(choice.config.get("DIVISORS") for choice in served)


@pytest.mark.parametrize("problem", SPLIT, ids=str)
def test_short_split_backwards_have_them(problem: Problem) -> None:
    assert all(choice.config["DIVISORS"] and choice.otherwise for choice in choices(problem).values())


def test_split_backwards_have_them_where_no_kernel_starts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel on a side stream waits for events, and copies for parts of groups come between: neither has to do with these."""
    for problem in (posed(4, 6, 400, 400, 192, FULL), posed(1, (32, 2), 300, 300, 256, FULL)):
        found = choices(problem).values()
        assert all(choice.config["DIVISORS"] and not choice.config.get("EARLY_START") for choice in found)
    monkeypatch.setattr(fused_schedule, "EARLY_START", False)
    assert all(choice.config["DIVISORS"] for choice in choices(SPLIT[2]).values())


@pytest.mark.parametrize(("queries", "us", "have"), [(850, 93, True), (900, 108, False), (4096, 1086, False)])
def test_split_backwards_about_the_limit(queries: int, us: float, have: bool) -> None:
    problem = posed(4, 6, queries, queries, 256, CAUSAL)
    found = choices(problem)
    assert all(choice.config.get("DIVISORS", False) == have for choice in found.values())
    assert split_backward_schedule.predicted_us(problem, found, 1, H200) == pytest.approx(us, rel=0.02)


def test_split_backwards_that_are_short_because_kernels_run_at_a_time_have_them() -> None:
    problem = posed(1, 1, 987, 10898, 152, FULL)
    found, limit = choices(problem), split_backward_schedule.SHORT_US
    order = split_backward_schedule.order_of(problem, found, {}, H200)
    assert order and split_backward_schedule.predicted_us(problem, found, 1, H200) > 1.1 * limit
    splits = split_backward_schedule.key_parts(problem, found, {}, H200)
    assert split_backward_schedule.predicted_us(problem, found, 1, H200, order, splits=splits) < limit
    assert all(choice.config["DIVISORS"] and choice.otherwise for choice in found.values())


@pytest.mark.parametrize("problem", [*SHORT, SPLIT[0]], ids=str)
def test_binaries_are_made_ahead(problem: Problem) -> None:
    """Of the config that serves, from what precompile asks of the row's."""
    chosen = {"fwd": forward(problem)} if problem in SHORT else choices(problem)
    for kernel, choice in chosen.items():
        asked = [config for variant, config, _ in precompile._by_shape(kernel, problem, choice.of_row, 90)
                 if variant is choice.variant]  # fmt: skip
        own = dict(choice.config)
        names = [name for name in own if name != "HEADS_PER_WAVE"]  # a launch argument
        assert any(all(one.get(name, False) == own[name] for name in names) for one in map(dict, asked))


def test_the_rows_own_config_serves_where_the_form_cannot_be_had() -> None:
    check_fallback(SPLIT[0], "DIVISORS")


def test_explain_says_so() -> None:
    short = posed(4, 30, 300, 300, 256, FULL)
    assert "fwd: divisors from the host, not as the row has it" in str(serving.explain_problem(short, H200))
    for other in (
        LONG[0],
        posed(14, 1, 212, 212, 192, FULL),
    ):  # the last one's keys are in one tile: another kernel runs
        assert "fwd: divisors from the host" not in str(serving.explain_problem(other, H200))
