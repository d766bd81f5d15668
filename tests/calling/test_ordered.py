"""Which deterministic calls the fused backward in a fixed order serves: in turns, or by how many programs a head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from fa2tune import gpus
from fa2tune.calling import choosing, dispatch, serving
from fa2tune.calling.schedules import ampere_turns, fused_schedule, ordered
from fa2tune.compiling import registry
from fa2tune.compiling.choice import Choice
from fa2tune.compiling.compiler import CompileError, NoTritonError, binary_config
from fa2tune.fleet import precompile
from fa2tune.launching.launch import CaptureMiss
from fa2tune.rows import lookup
from fa2tune.spec import visits
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import BACKWARD, FUSED, SPLIT, Problem

A100, H200, L4 = (gpus.named(name) for name in ("a100", "h200", "l4"))
#: Where no row is stale.
NODE = lookup.Toolchain(triton="3.6.0")
FREE, ORDERED = (registry.variant_named(f"sm80/bwd_{name}") for name in ("fused", "ordered"))


def posed(
    length: int = 4096, dim: int = 128, mask: Mask = CAUSAL, heads: tuple[int, int] = (16, 16), **more: Any
) -> Problem:
    return Problem("bf16", max(1, 16384 // length), *heads, length, length, dim, dim, mask, **more)


def chosen(problem: Problem, gpu: Any = A100) -> tuple[str, Mapping[str, Choice]]:
    return choosing.choose_backward(choosing.Chooser(problem, gpu, node=NODE), True)


@pytest.fixture
def by_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is expected to be faster in turns."""
    monkeypatch.setattr(ordered, "BUFFERS_REACH", math.inf)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("mask", [CAUSAL, FULL, Mask("band", 500, 0)], ids=str)
def test_the_fused_kernel_s_row_serves_them_in_turns(dim: int, mask: Mask) -> None:
    for length, group in product((512, 4096, 16384), (1, 4)):
        heads = max(4, 2048 // dim // 4 * 4)
        problem = posed(length, dim, mask, (heads, heads // group))
        strategy, choices = chosen(problem)
        free = choosing.choose_backward(choosing.Chooser(problem, A100, node=NODE), False)[1]["bwd_fused"]
        assert free.variant is FREE and strategy == FUSED and list(choices) == ["bwd_fused"]
        found = choices["bwd_fused"]
        assert found.variant is FREE and found.row is free.row and found.estimated
        band = found.config["HEADS_PER_WAVE"]
        assert found.config == {**free.config, "IN_ORDER": True, "HEADS_PER_WAVE": band} and band in ampere_turns.BANDS
        assert FREE.space.broken(found.config, problem.specialization, 80) is None


def test_a_tile_that_the_one_before_does_not_cover_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mask whose later key tiles begin at earlier queries a turn would never come."""
    seen = visits.queries_of_tiles

    def backwards(*given: Any) -> visits.Visits:
        return visits.Visits(*(side[::-1] for side in seen(*given)))

    monkeypatch.setattr(visits, "queries_of_tiles", backwards)
    ordered._tiles_follow.cache_clear()
    try:
        found = chosen(posed(4096, 128, CAUSAL, (16, 16)))[1]["bwd_fused"]
    finally:
        ordered._tiles_follow.cache_clear()
    assert not found.config.get("IN_ORDER") and found.variant is not FREE


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
@pytest.mark.usefixtures("by_buffers")
def test_the_fused_kernel_s_row_serves_them(dim: int, mask: Mask) -> None:
    for length in (512, 4096, 16384):
        problem = posed(length, dim, mask, (2048 // dim, 2048 // dim))
        strategy, choices = chosen(problem)
        free = choosing.choose_backward(choosing.Chooser(problem, A100, node=NODE), False)[1]["bwd_fused"]
        assert free.variant is FREE and strategy == FUSED and list(choices) == ["bwd_fused"]
        found = choices["bwd_fused"]
        assert found.variant is ORDERED and found.row is free.row
        assert found.config == {**free.config, "DQ_BUFFERS": found.config["DQ_BUFFERS"]}
        assert binary_config(ORDERED, found.config) == binary_config(FREE, free.config), "a launch chooses the rest"
        assert ORDERED.space.broken(found.config, problem.specialization, 80) is None


@pytest.mark.parametrize(
    ("problem", "gpu"),
    [
        (replace(posed(), heads_q=4 * posed().heads_q), H200),  # grouped heads, 128 columns
        (posed(aligned=False, tma=False), A100),
        (replace(posed(), dtype="fp32"), A100),
        (replace(posed(), batch=1, extent=Extent(RAGGED, 16)), A100),
    ],
    ids=["h200", "unaligned", "fp32", "packed"],
)
def test_others_are_split(problem: Problem, gpu: Any) -> None:
    assert chosen(problem, gpu)[0] == SPLIT


@pytest.mark.usefixtures("by_buffers")
def test_little_memory() -> None:
    assert chosen(posed(65536, 256, FULL, (1, 1)), L4)[0] == SPLIT


@pytest.mark.parametrize(
    ("problem", "least"),
    [
        (posed(8192, 128, FULL), 0.97),
        (posed(2048, 256, FULL, (8, 8)), 0.96),
        (posed(16384, 64, CAUSAL, (32, 32)), 0.97),
        (posed(512, 128, CAUSAL), 0.8),  # keys of 64: tiles that get shorter by a block
        (posed(4096, 128, CAUSAL, (28, 4)), 0.9),  # in parts
    ],
    ids=str,
)
def test_most_tiles_do_not_wait(problem: Problem, least: float) -> None:
    free = choosing.choose_backward(choosing.Chooser(problem, A100, node=NODE), False)[1]["bwd_fused"]
    config, speed = ordered.in_turns(problem, free.config, A100)
    assert least <= speed <= 1
    narrow = ampere_turns.speed(
        ordered.group_parts_schedule.rows_of_tiles(
            problem.seqlen_q, problem.seqlen_k, config["BLOCK_N"], problem.mask
        ),
        problem.batch * problem.heads_kv, problem.group, config["BLOCK_M"], 108, 1,
    )  # fmt: skip
    assert narrow < speed, "all tiles of a head at a time"


@pytest.mark.parametrize(("programs", "tiles"), [*product((1, 2, 3, 4, 7, 8), (1, 2, 5, 8, 9, 16, 31, 64))])
def test_the_longest_way(programs: int, tiles: int) -> None:
    """As the kernel has it: turns go there and back."""
    if programs <= tiles:
        for costs in ([1.0] * tiles, [float(tiles - one) for one in range(tiles)]):
            ways = [0.0] * programs
            for tile, cost in enumerate(costs):
                turn, place = divmod(tile, programs)
                ways[place if turn % 2 == 0 else programs - 1 - place] += cost
            assert ordered.longest(costs, programs) == max(ways)


def test_programs_fill_the_gpu_and_fit_its_memory() -> None:
    for gpu, dim, mask, length in product(
        (A100, H200, L4), (64, 128, 256), (CAUSAL, FULL), (512, 2048, 8192, 16384, 65536)
    ):
        problem = posed(length, dim, mask, (2048 // dim, 2048 // dim))
        arch = 80 if gpu is H200 else gpu.arch
        config = FREE.space.default(problem.specialization, arch)
        buffers, speed = ordered.buffers_of(problem, config, gpu)
        tiles, most = -(-length // config["BLOCK_N"]), gpu.hbm_bytes * ordered.MOST_MEMORY
        assert 1 <= buffers <= tiles and (buffers == 1 or buffers * ordered.buffer_bytes(problem) <= most)
        assert 0 < speed <= 1.0 and (gpu is L4 or dim == 256 or speed > 0.7)
    (buffers, speed) = ordered.buffers_of(posed(16384), FREE.space.default(posed().specialization, 80), H200)
    assert buffers == 8 and speed > 0.9, "16 heads of 8 programs for 132 multiprocessors"


def test_tiles_of_few_keys_are_bound_by_memory() -> None:
    """Where sums leave L2, a tile of 64 keys moves twice as much for an operation, and an L4 has a sixth of the bandwidth."""
    speeds = {}
    for length in (512, 8192):
        problem = posed(length)
        config = FREE.space.default(problem.specialization, L4.arch)
        assert config["BLOCK_N"] == 64
        speeds[length] = ordered.buffers_of(problem, config, L4)[1]
    assert speeds[512] > 0.9 and speeds[8192] < ordered.LEAST_SPEED


def test_a_group_is_split(request: pytest.FixtureRequest) -> None:
    """For programs with sums of their own as without an order; in turns no less."""
    problem, of = posed(8192, heads=(16, 1)), ordered.group_parts_schedule.parts
    free = {"bwd_fused": Choice(FREE, chosen(problem)[1]["bwd_fused"].config | {"IN_ORDER": False})}
    assert of(problem, chosen(problem)[1], A100)["bwd_fused"] >= of(problem, free, A100)["bwd_fused"] > 1
    request.getfixturevalue("by_buffers")
    assert of(problem, chosen(problem)[1], A100) == of(problem, free, A100)


@pytest.mark.usefixtures("by_buffers")
def test_explain_tells_of_the_split_kernels_where_its_own_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(variant: Any, *_: Any) -> tuple[Any, str]:
        return (None, "no file holds it") if variant is ORDERED else (object(), "a file")

    monkeypatch.setattr(serving.precompiled, "find", find)
    asked = partial(serving.explain_problem, posed(), A100, (BACKWARD,), deterministic=True, present=False)
    assert [one.kernel for one in asked().kernels] == [BACKWARD, "bwd_fused"], "compiled at the first call"
    monkeypatch.setattr("fa2tune.compiling.fingerprint.triton_version", lambda: "")
    found = asked()
    assert [one.kernel for one in found.kernels] == [BACKWARD, "bwd_dq", "bwd_dkdv"] and not found.lacking


def test_explain_tells_of_turns() -> None:
    found = serving.explain_problem(posed(), A100, (BACKWARD,), deterministic=True, present=False)
    whole, fused = found.kernels
    assert whole.row is not None and whole.row.strategy == FUSED and fused.kernel == "bwd_fused"
    assert whole.form == fused.form == fused_schedule.IN_ORDER_FORM
    assert fused.binaries is not None and "sm80/bwd_fused" in fused.binaries


@pytest.mark.usefixtures("by_buffers")
def test_explain_tells_it() -> None:
    found = serving.explain_problem(posed(), A100, (BACKWARD,), deterministic=True, present=False)
    whole, fused = found.kernels
    assert whole.row is not None and whole.row.strategy == FUSED and fused.kernel == "bwd_fused"
    assert fused.changed is not None and fused.changed["DQ_BUFFERS"] == (1, fused.config["DQ_BUFFERS"])
    assert fused.binaries is not None
    assert [*fused.binaries][-1] == "sm80/bwd_ordered_finish" and "sm80/bwd_ordered" in fused.binaries


@pytest.mark.parametrize("error", [CompileError("no registers"), NoTritonError(ImportError("none")), OSError("full")])
def test_what_does_not_load_gives_way_to_the_split_kernels(error: Exception) -> None:
    def make(strategy: str, choices: Mapping[str, Choice]) -> tuple[str, list[str]]:
        if strategy == FUSED:
            raise error
        return strategy, sorted(choices)

    chooser = choosing.Chooser(posed(), A100, node=NODE)
    assert dispatch._backward_plan(chooser, True, make) == (SPLIT, ["bwd_dkdv", "bwd_dq"])


def test_other_errors_stay() -> None:
    def make(strategy: str, choices: Mapping[str, Choice]) -> None:
        raise CaptureMiss("sm80/bwd_ordered")

    with pytest.raises(CaptureMiss, match="sm80/bwd_ordered"):
        dispatch._backward_plan(choosing.Chooser(posed(), A100, node=NODE), True, make)


def test_a_file_of_binaries_has_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch, heads and lengths decide."""
    turns = chosen(posed())[1]["bwd_fused"]
    monkeypatch.setattr(ordered, "BUFFERS_REACH", math.inf)
    buffers = chosen(posed())[1]["bwd_fused"]
    for one, other in ((turns, buffers), (buffers, turns)):
        found = ordered.other_form(one)
        assert found is not None and found.variant is other.variant
        assert binary_config(found.variant, found.config) == binary_config(other.variant, other.config)
        asked = precompile._by_shape("bwd_fused", posed(), one, 80)
        assert other.variant.name in {variant.name for variant, _, _ in asked}
    free = choosing.choose_backward(choosing.Chooser(posed(), A100, node=NODE), False)[1]["bwd_fused"]
    assert ordered.other_form(free) is None
