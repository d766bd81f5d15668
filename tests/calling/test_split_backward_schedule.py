"""Times of the split Hopper backward by its schedule, and whether both kernels run at a time, against the records."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from benchmark_scripts import BENCHMARKS

from fa2tune import gpus
from fa2tune.calling import choosing, serving
from fa2tune.calling.schedules import group_parts_schedule
from fa2tune.calling.schedules import split_backward_schedule as schedule
from fa2tune.calling.schedules.split_backward_schedule import Tiles
from fa2tune.compiling.choice import Choice
from fa2tune.launching.overlapped import DKDV_FIRST, DQ_AT_ONCE, DQ_FIRST, ORDERS
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem

H200 = gpus.named("h200")
SHAPE = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
#: What the record's "dQ beside dK and dV" had before: delta by a kernel of its own, dQ first.
BESIDE, DELTA_US = "dQ beside dK and dV", 2.3

#: (call, parts of its groups, microseconds of one kernel after the other)
Recorded = tuple[Problem, int, float]


def read(name: str) -> Any:
    data = (BENCHMARKS / "calls" / name).read_bytes()
    return json.loads(gzip.decompress(data) if name.endswith(".gz") else data)


def first_two() -> list[Any]:
    """Drawings, of 2026-11-25."""
    return read("random_calls.json.gz")["runs"][:2]  # type: ignore[no-any-return]


def posed(call: Mapping[str, Any]) -> Problem:
    return Problem(call["dtype"], *(call[name] for name in SHAPE), {"full": FULL, "causal": CAUSAL}[call["mask"]])


def square(batch: int, heads: int, seqlen: int, dim: int, mask: Mask = FULL) -> Problem:
    return Problem("bf16", batch, heads, heads, seqlen, seqlen, dim, dim, mask)


@cache
def chosen(problem: Problem, deterministic: bool = False) -> dict[str, Choice]:
    return choosing.choose_backward(choosing.Chooser(problem, H200), deterministic)[1]


def order(problem: Problem, deterministic: bool = False) -> str:
    choices = chosen(problem, deterministic)
    return schedule.order_of(problem, choices, group_parts_schedule.parts(problem, choices, H200), H200)


def at_a_time() -> dict[str, tuple[Problem, int, float, float]]:
    """Of the record: name -> (call, parts, microseconds of one kernel after the other, and of both at a time)."""
    drawn = {f"{'ab'[place]} {name}": call for place, run in enumerate(first_two())
             for name, call in run["calls"].items()}  # fmt: skip
    found = {}
    for name, call in read("dense_backwards.json")["calls"].items():
        if BESIDE in call["us"]:
            problem = posed(drawn[name])
            parts = group_parts_schedule.parts_of(problem, "bwd_dkdv", chosen(problem)["bwd_dkdv"], H200)
            found[name] = problem, parts, call["us"]["row, chosen"], call["us"][BESIDE]
    return found


def first_drawings() -> list[Recorded]:
    """Of 2026-11-25; of a call that was timed again, that time, as sums of parts have become faster."""
    again, found = at_a_time(), []
    for place, run in enumerate(first_two()):
        for name, call in run["calls"].items():
            problem = posed(call)
            if "bwd" in call and "served" in call["bwd"] and schedule.covers(problem, chosen(problem)):
                us, parts = call["bwd"]["us"]["fa2tune"], call["bwd"]["served"]["parts"]
                found.append((problem, parts, again.get(f"{'ab'[place]} {name}", (0, 0, us))[2]))
    return found


def later() -> list[Recorded]:
    return [
        (posed(call), call["parts"], call["us"]["fa2tune"]) for call in read("split_backwards.json")["calls"].values()
    ]


def spread(errors: Iterable[float]) -> float:
    found = list(errors)
    return math.sqrt(sum(error**2 for error in found) / len(found))


def off(problem: Problem, parts: int, us: float) -> float:
    return math.log(schedule.predicted_us(problem, chosen(problem), parts, H200) / us)


def test_times_of_calls_that_were_not_fitted() -> None:
    """The constants are fitted to every second call of both records, the first among them."""
    first, second = first_drawings(), later()
    assert (len(first), len(second)) == (63, 53)
    fit = [off(*one) for one in (*first[::2], *second[::2])]
    held_out = [off(*one) for one in (*first[1::2], *second[1::2])]
    assert spread(fit) < 0.068 and spread(held_out) < 0.067
    assert abs(sum(held_out) / len(held_out)) < 0.03


def gain_off(problem: Problem, parts: int, after: float, both: float) -> float:
    moved = problem.batch * problem.heads_q * problem.seqlen_q * problem.head_dim_v * 4
    predicted = [
        schedule.predicted_us(problem, chosen(problem), parts, H200, one, DELTA_US + moved / schedule.BYTES_PER_US)
        for one in ("", DQ_FIRST)
    ]
    return math.log(predicted[0] / predicted[1] * both / after)


def test_what_both_at_a_time_gain() -> None:
    """Fitted to every second call as well."""
    errors = [gain_off(*one) for one in at_a_time().values()]
    assert len(errors) == 14
    assert spread(errors[::2]) < 0.03 and spread(errors[1::2]) < 0.055


def test_the_choice_is_within_2_percent_of_the_better_form() -> None:
    """Of those that were measured: one kernel after the other, and both at a time with delta by a kernel of its own."""
    found = {name: order(problem) for name, (problem, *_) in at_a_time().items()}
    for name, (_, _, after, both) in at_a_time().items():
        assert (both if found[name] else after) <= 1.025 * min(after, both), name
    assert {name for name, one in found.items() if one} == {"a 27 unequal", "b 0 unequal", "b 14 unequal", "b 6 unequal",
                                                            "b 7 any"}  # fmt: skip


@cache
def drawn() -> dict[str, tuple[Problem, dict[str, float]]]:
    """Of dense_backwards_drawn.json: name -> (call, microseconds by order; "": one kernel after the other)."""
    calls, found = read("random_calls_3.json.gz")["calls"], {}
    for named, raced in read("dense_backwards_drawn.json")["calls"].items():
        problem = posed(calls[named.removeprefix("a ")])
        if schedule.covers(problem, chosen(problem)):
            us = {form.removesuffix(", chosen").removeprefix("at a time, "): one for form, one in raced["us"].items()}
            found[named] = problem, {"" if form == "row" else form: one for form, one in us.items()}
    return found


def test_gains_of_long_calls_are_what_is_predicted() -> None:
    """LONG_MARGIN is set by these twelve: eight of dense_backwards.json, four of a later drawing, in the library's form."""
    errors = [gain_off(*one) for one in at_a_time().values() if one[2] >= schedule.LONG_US]
    for problem, us in drawn().values():
        if us[""] >= schedule.LONG_US:
            after, both = (schedule.predicted_us(problem, chosen(problem), 1, H200, one) for one in ("", DQ_FIRST))
            errors.append(math.log(after / both * us[DQ_FIRST] / us[""]))
    assert len(errors) == 12 and max(errors) < 0.02 < schedule.LONG_MARGIN


def test_the_choice_of_a_later_drawing_is_within_2_percent() -> None:
    assert len(drawn()) == 6
    for name, (problem, us) in drawn().items():
        assert us[order(problem)] <= 1.02 * min(us.values()), name


@pytest.mark.parametrize(
    ("shape", "begins"),
    [
        ((1, 14, 14, 285, 827, 160, 160, FULL), DQ_AT_ONCE),  # calls that were behind FlashAttention-4
        ((4, 10, 10, 127, 96, 200, 200, CAUSAL), DQ_AT_ONCE),
        ((2, 2, 2, 484, 484, 256, 256, FULL), DQ_AT_ONCE),
        ((8, 2, 2, 185, 844, 256, 256, CAUSAL), DQ_AT_ONCE),
        ((3, 5, 5, 196, 196, 232, 232, FULL), DQ_AT_ONCE),
        ((4, 3, 3, 721, 7949, 184, 184, FULL), DQ_FIRST),
        ((5, 2, 2, 3160, 217, 224, 224, FULL), DKDV_FIRST),  # few long tiles of keys
        ((13, 50, 50, 1103, 1103, 224, 224, FULL), ""),  # many tiles of both
        ((24, 14, 14, 74, 74, 184, 184, FULL), ""),
    ],
)
def test_which_kernel_begins(shape: tuple[Any, ...], begins: str) -> None:
    assert order(Problem("bf16", *shape)) == begins


@pytest.mark.parametrize(
    ("count", "heads", "rows", "longest", "begins"),
    [
        (85, 1, (3472, 23680), 2048, DQ_FIRST),  # 40 queries a sequence on average, of up to 1900 keys
        (102, 4, (2199, 2199), 512, ""),
        (17, 16, (16752, 16752), 8192, ""),
    ],
)
def test_which_kernel_begins_of_packed_sequences(
    count: int, heads: int, rows: tuple[int, int], longest: int, begins: str
) -> None:
    extent = Extent(RAGGED, count, longest)
    asked = Problem("bf16", 1, heads, heads, *rows, 256, 256, CAUSAL, extent=extent)
    choices = choosing.choose_backward(choosing.Chooser(asked, H200), False)[1]
    assert order(asked) == begins and schedule.key_parts(asked, choices, {}, H200) == 1


def test_no_other_call_has_it() -> None:
    few = square(2, 2, 484, 256)
    assert order(few) and order(few, deterministic=True)
    assert not order(replace(few, mask=band(64, 0)))
    assert not order(square(2, 2, 484, 128)) and not order(square(2, 2, 484, 128), deterministic=True)
    a100 = gpus.named("a100")
    portable = choosing.choose_backward(choosing.Chooser(few, a100), True)[1]
    assert not schedule.order_of(few, portable, {}, a100)


# ---- how tiles are given out


def test_tiles_go_to_the_multiprocessor_that_is_free_first() -> None:
    few_long, many_short = Tiles((100.0,), 2, 4), Tiles((10.0,), 40, 4)
    assert schedule.at_a_time(few_long, many_short, DQ_FIRST, 0.0, 4) == pytest.approx(150)
    assert schedule.at_a_time(few_long, many_short, DKDV_FIRST, 0.0, 4) == pytest.approx(200)
    assert schedule.at_a_time(few_long, many_short, DQ_FIRST, 5.0, 4) == pytest.approx(155)
    assert schedule.at_a_time(few_long, many_short, DQ_AT_ONCE, 5.0, 4) == pytest.approx(155)


def test_dq_at_once_hides_delta_where_dq_is_the_longer() -> None:
    long, short = Tiles((100.0,), 2, 1), Tiles((10.0,), 3, 1)
    assert schedule.at_a_time(long, short, DQ_AT_ONCE, 5.0, 8) == pytest.approx(100 * schedule.LONGEST)
    assert schedule.at_a_time(long, short, DQ_FIRST, 5.0, 8) == 105
    assert schedule.orders(long, short, 8) == (DQ_AT_ONCE,)
    assert schedule.orders(Tiles((100.0,), 5, 1), short, 8) == (DQ_FIRST,)
    assert schedule.orders(Tiles((100.0,), 6, 1), short, 8) == (DQ_FIRST, DKDV_FIRST)


def test_many_tiles_are_not_given_out_one_by_one() -> None:
    long, few, many = Tiles((900.0,), 20, 1), Tiles((7.0, 9.0), 2000, 4), Tiles((7.0, 9.0), 2100, 4)
    times = [schedule.at_a_time(long, one, DQ_FIRST, 0.0, 132) for one in (few, many)]
    assert times[1] == pytest.approx(900) and times[0] == pytest.approx(900)
    times = [schedule.at_a_time(Tiles((90.0,), 20, 1), one, DQ_FIRST, 0.0, 132) for one in (few, many)]
    assert times[1] / times[0] == pytest.approx(1.05, rel=0.02)


def test_last_tiles_of_a_causal_call_come_first() -> None:
    problem = Problem("bf16", 1, 2, 2, 300, 100, 192, 192, CAUSAL)
    choices = chosen(problem)
    dq = schedule._dq_tiles(problem, choices["bwd_dq"])
    assert dq.number == 6 and list(dq.costs) == sorted(dq.costs, reverse=True) and dq.costs[-1] < dq.costs[0]
    dkdv = schedule._dkdv_tiles(problem, choices["bwd_dkdv"], 1)
    assert dkdv.number == 4 and dkdv.costs[0] > dkdv.costs[1]


# ---- where it is said


def test_explain_says_it() -> None:
    found = serving.explain_problem(square(2, 2, 484, 256), H200, present=False)
    assert found.as_dict()["kernels"][1]["order"] == DQ_AT_ONCE
    assert "both kernels run at a time (dQ with delta), which is expected to be faster" in found.about_launch
    other = serving.explain_problem(square(13, 50, 1103, 224), H200, present=False)
    assert "at a time" not in other.about_launch and other.as_dict()["kernels"][1]["order"] is None


def test_every_order_has_words() -> None:
    assert len({schedule.about(one) for one in ORDERS}) == len(ORDERS) and schedule.about("") == ""
