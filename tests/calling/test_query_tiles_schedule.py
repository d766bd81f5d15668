"""Which backwards are made by tiles of queries, estimates beside the record, and what explain says of them."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from benchmark_scripts import BENCHMARKS, script

from fa2tune import gpus
from fa2tune.calling import backward_plans, choosing, forward_plans, serving
from fa2tune.calling.schedules import query_tiles_schedule
from fa2tune.compiling import compiler, limits
from fa2tune.compiling.compiler import CompileError
from fa2tune.fleet import precompile
from fa2tune.gpus import Gpu
from fa2tune.launching import query_tiles
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.roles import BWD_QUERY_TILES
from fa2tune.spec.variant import Variant

H200, timing = gpus.named("h200"), script("query_tiles")
#: One tile a head, whose keys are split; two tiles of a few heads; many heads.
SPLIT = Problem("bf16", 9, 2, 2, 86, 894, 192, 192, CAUSAL)
SHORT = Problem("bf16", 18, 2, 2, 183, 183, 128, 128, CAUSAL)
MANY = Problem("bf16", 30, 54, 54, 107, 4496, 136, 136, FULL)


def recorded(name: str) -> Iterator[tuple[str, Problem, Mapping[str, float]]]:
    """(Name, call, its times; without the kernel: "served")."""
    record = json.loads(gzip.decompress((BENCHMARKS / f"calls/{name}.json.gz").read_bytes()))
    for name, call in record["calls"].items():
        yield name, timing.posed(call), call["us"]


RECORD = list(recorded("query_tiles"))


@pytest.fixture(autouse=True)
def nothing_refused() -> Any:
    backward_plans.forget()
    yield
    backward_plans.forget()


def chosen(problem: Problem, gpu: Gpu = H200, deterministic: bool = False) -> Config | None:
    _, served = choosing.choose_backward(choosing.Chooser(problem, gpu), deterministic)
    whole, _ = backward_plans.whole(problem, served, backward_plans.division(problem, served, gpu), gpu)
    return whole.config if whole is not None and whole.role == BWD_QUERY_TILES else None


def config_of(problem: Problem, name: str) -> Config:
    """As the script names it."""
    rows, splits = (int(one.split()[0]) for one in name.split(", "))
    found: Config = query_tiles.space_of(problem, 90).config_of(problem.specialization, rows, splits)
    return found


def test_estimates_are_near_the_times_that_they_were_fitted_to() -> None:
    errors = [
        math.log(query_tiles_schedule.query_tiles_us(problem, config_of(problem, name), H200) / time)
        for _, problem, us in RECORD
        for name, time in us.items()
        if name != "served"
    ]
    assert len(errors) == 374
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) < 0.12


def test_what_is_taken_was_faster() -> None:
    """In the record that the model was fitted to, and in a later one."""
    ratios, untimed = dict[str, float](), list[str]()
    for name, problem, us in (*RECORD, *recorded("query_tiles_held_out")):
        if (config := chosen(problem)) is not None:
            if (time := us.get(f"{config['BLOCK_M']} rows, {config['SPLITS']} parts")) is None:
                untimed.append(name)
            else:
                ratios[name] = time / us["served"]
    assert len(ratios) >= 25 and len(untimed) <= 2
    assert max(ratios.values()) < 0.99
    assert math.exp(sum(map(math.log, ratios.values())) / len(ratios)) < 0.8


def test_calls_that_gained_much_are_taken() -> None:
    """Six that gained 13 to 20 % are left."""
    left = {
        name: min(us.values()) / us["served"]
        for name, problem, us in RECORD
        if chosen(problem) is None and min(us.values()) < 0.88 * us["served"]
    }
    assert len(left) <= 6 and min(left.values()) > 0.79


def test_few_queries_and_short_sequences() -> None:
    split = chosen(SPLIT, deterministic=True)
    assert split is not None and (split["BLOCK_M"], split["STAGES"]) == (128, 2) and split["SPLITS"] > 3
    short = chosen(SHORT)
    assert short is not None and (short["BLOCK_M"], short["SPLITS"]) == (64, 1)
    many = chosen(MANY)
    assert many is not None and (many["BLOCK_M"], many["SPLITS"], many["WHOLE"]) == (128, 1, True)
    assert chosen(replace(MANY, dtype="fp16")) is not None


@pytest.mark.parametrize(
    "other",
    [
        {"seqlen_q": query_tiles_schedule.MOST_QUERIES + 1},
        {"seqlen_k": 0},
        {"dtype": "fp32"},
        {"mask": Mask("band", 30, 5)},
        {"aligned": False},
        {"extent": Extent(RAGGED, 5, 250, 894)},
    ],
    ids=str,
)
def test_other_calls_are_not(other: dict[str, Any]) -> None:
    assert query_tiles_schedule.asked(SPLIT, H200)
    assert not query_tiles_schedule.asked(replace(SPLIT, **other), H200) and chosen(replace(SPLIT, **other)) is None


def test_several_tiles_of_ungrouped_heads_must_gain_more() -> None:
    """Their dK and dV are rounded twice: one tile of 128 rows serves unless two of 64 are 15 % faster."""
    for queries in range(65, 129, 9):
        problem = Problem("bf16", 8, 6, 6, queries, 300, 64, 64, CAUSAL)
        found = query_tiles_schedule.best(problem, H200)
        assert found is not None
        times = {
            config["BLOCK_M"]: query_tiles_schedule.query_tiles_us(problem, config, H200)
            for config in query_tiles_schedule.candidates(problem, H200)
            if config["SPLITS"] == 1
        }
        assert (found[1]["BLOCK_M"] == 128) is (times[64] > 0.85 * times[128]) or found[1]["SPLITS"] > 1


def test_nor_on_other_gpus_or_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(SPLIT, gpus.named("a100")) is None
    monkeypatch.setattr(query_tiles_schedule, "QUERY_TILES", False)
    assert chosen(SPLIT) is None and not query_tiles_schedule.all_kernels(SPLIT, 90)


def test_sums_take_limited_memory() -> None:
    wide, fewer = (replace(MANY, batch=batch, seqlen_q=200) for batch in (30, 1))
    assert query_tiles_schedule.best(fewer, H200) is not None
    for problem in (MANY, wide, fewer, SPLIT):
        for config in query_tiles_schedule.candidates(problem, H200):
            spaces = query_tiles.workspaces(problem, config)
            taken = sum(math.prod(sizes) * (4 if dtype == "fp32" else 2) for sizes, dtype in spaces.values())
            assert taken <= query_tiles_schedule.MOST_BYTES
    assert query_tiles_schedule.best(wide, H200) is None


def test_kernels_fit_the_gpu() -> None:
    for dims in ((16, 16), (48, 80), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256)):
        spec = replace(SPLIT, head_dim=dims[0], head_dim_v=dims[1]).specialization
        space = query_tiles.space_of(SPLIT, 90)
        for rows in space.rows_of(spec):
            for splits in (1, 2):
                config = space.config_of(spec, rows, splits)
                kernel = query_tiles.kernels(SPLIT, config, 90)[0][0]
                assert limits.before_compile(kernel, spec, config, H200) is None
                assert all(config[name] in values for name, values in space.SPACE.dimensions.items())


def test_explain_names_the_kernels() -> None:
    found = serving.explain_problem(SPLIT, H200, ("bwd",))
    (whole,) = found.kernels
    assert whole.status == "estimated" and list(whole.runs or ()) == ["sm90/bwd_query_tiles", "bwd_dq_combine"]
    assert whole.whole is not None
    splits = whole.whole.config["SPLITS"]
    assert f"keys are split into {splits} parts, whose dQ is summed after." in str(found)
    assert found.as_dict()["kernels"][0]["query_tiles"]["SPLITS"] == splits and "tiles of queries" in str(whole)
    tiles = str(serving.explain_problem(SHORT, H200, ("bwd",)))
    assert "3 tiles of a key head have dK and dV of their own, which are summed after." in tiles
    assert serving.served_by(SHORT, H200, True)["bwd"] == "sm90/bwd_query_tiles + bwd_gather"


def test_what_was_refused_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def tiles(problem: Problem, **given: Any) -> str:
        made.append("tiles")
        raise CompileError("ptxas failed")

    def plan(problem: Problem, **given: Any) -> str:
        made.append("strategy")
        return "plan"

    kinds, (_, choices) = backward_plans.WHOLE_KINDS, choosing.choose_backward(choosing.Chooser(SHORT, H200), False)
    monkeypatch.setitem(kinds, BWD_QUERY_TILES, kinds[BWD_QUERY_TILES]._replace(plan=tiles))
    monkeypatch.setattr(backward_plans, "BackwardPlan", plan)
    for _ in range(2):
        assert backward_plans.backward_plan(SHORT, "fused", choices, H200, {}, True) == "plan"
    assert made == ["tiles", "strategy", "strategy"]
    found = serving.explain_problem(SHORT, H200, ("bwd",))
    assert "bwd: tiles of queries: expected to be faster, but ptxas failed." in str(found)


def test_what_served_is_counted() -> None:
    plan = object.__new__(query_tiles.QueryTilesPlan)
    assert forward_plans.steps(plan, {}) == ["schedule model, tiles of queries"]


def test_files_of_binaries_have_what_any_call_loads() -> None:
    def binaries(kernels: Iterable[tuple[Variant, Config, Problem]]) -> set[object]:
        return {(one.name, problem.specialization, tuple(sorted(compiler.binary_config(one, config).items())))
                for one, config, problem in kernels}  # fmt: skip

    for problem, kernel in ((SPLIT, "bwd_dq"), (SHORT, "bwd_fused"), (MANY, "bwd_dq")):
        tuned = replace(problem, batch=1, heads_q=2, heads_kv=2, seqlen_q=512, seqlen_k=512)
        choices = choosing.choose_backward(choosing.Chooser(tuned, H200), False)[1]
        filed = binaries(precompile._by_shape(kernel, tuned, choices[kernel], 90))
        for call in (problem, replace(problem, batch=50), replace(problem, seqlen_q=200)):
            for config in query_tiles_schedule.candidates(call, H200):
                assert binaries(query_tiles.kernels(call, config, 90)) <= filed
