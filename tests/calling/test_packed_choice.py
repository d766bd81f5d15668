"""Which kernels and configs the backward of packed sequences is served by, from the shipped rows; and how TMA addresses it."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest
from benchmark_scripts import BENCHMARKS, script

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.calling.kinds import PORTABLE_ROWS, WARP_SPECIALIZED_ROWS
from fa2tune.calling.schedules import packed_schedule
from fa2tune.compiling import limits, registry
from fa2tune.launching.launch import _addressed
from fa2tune.rows import lookup
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import FUSED, SPLIT, STRATEGIES, Problem
from fa2tune.spec.score import score_of
from fa2tune.spec.variant import WARP_SPECIALIZED, implementation_of

PACKED_CHOICES = script("packed_choices")
H200 = gpus.named("h200")
#: Where no row is stale: which kernel serves is to be seen here, not which row was measured last.
NODE = lookup.Toolchain(triton="3.6.0")


def posed(dim: int, mask: Mask = CAUSAL, dtype: str = "bf16", longest: int = 0, **more: object) -> Problem:
    extent = Extent(RAGGED, 16, longest)
    return Problem(dtype, 1, 16, 4, 16384, 16384, dim, dim, mask, extent=extent, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [40, 64, 80, 128])
@pytest.mark.parametrize("mask", [CAUSAL, FULL, band(256, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_fused_hopper_backward_serves(dim: int, mask: Mask, dtype: str) -> None:
    for longest in (0, 512, 4096, 16384):
        problem = posed(dim, mask, dtype, longest)
        assert choosing.strategy_of(problem, H200, False, node=NODE) == (FUSED, {"bwd_fused": WARP_SPECIALIZED_ROWS})
        choice = choosing.choose(problem, "bwd_fused", H200, WARP_SPECIALIZED_ROWS, node=NODE)
        assert implementation_of(choice.config) == WARP_SPECIALIZED
        assert bwd_fused.PACKED.items() <= choice.config.items()
        variant = registry.variant_of("bwd_fused", choice.config)
        assert limits.before_compile(variant, problem.specialization, choice.config, H200) is None


def test_the_length_chooses_the_row() -> None:
    for sequences, longest, parts, bucket in (
        (16, 0, 1, 1024),
        (16, 1024, 1, 1024),
        (2, 8192, 1, 8192),
        (6, 0, 3, 8192),
    ):
        problem = replace(posed(128), extent=Extent(RAGGED, sequences, longest, parts))
        choice = choosing.choose(problem, "bwd_fused", H200, WARP_SPECIALIZED_ROWS, node=NODE)
        assert choice.answer is not None and choice.answer.row.key.bucket == bucket


@pytest.mark.parametrize(
    ("problem", "deterministic"),
    [
        (posed(128, dtype="fp32"), False),
        (posed(256, dtype="fp32"), True),
        (posed(256, aligned=False, tma=False), False),
        (posed(256, wide=True), False),
        (posed(128, aligned=False, tma=False), False),
        (posed(128, wide=True), False),
    ],
    ids=["fp32", "fp32, 256", "unaligned, 256", "4 GiB, 256", "unaligned", "4 GiB"],
)
def test_the_portable_kernels_serve_the_rest(problem: Problem, deterministic: bool) -> None:
    strategy, kinds = choosing.strategy_of(problem, H200, deterministic, node=NODE)
    assert strategy == SPLIT or kinds["bwd_fused"] == PORTABLE_ROWS
    for kernel in kinds:
        config = choosing.choose(problem, kernel, H200, kinds[kernel], node=NODE).config
        assert implementation_of(config) != WARP_SPECIALIZED


@pytest.mark.parametrize(("dim", "deterministic"), [(128, False), (256, True)])
def test_the_hopper_backward_computes_score_terms(dim: int, deterministic: bool) -> None:
    problem = posed(dim, score=score_of(30.0))
    _, kinds = choosing.strategy_of(problem, H200, deterministic, node=NODE)
    assert {*kinds.values()} == {WARP_SPECIALIZED_ROWS}


@pytest.mark.parametrize(
    ("dim", "deterministic"), [(128, True), (96, True), (192, False), (192, True), (256, False), (256, True)]
)
@pytest.mark.parametrize(
    ("dtype", "mask"),
    [("bf16", CAUSAL), ("fp16", FULL), ("bf16", band(256, 0)), ("bf16", Mask("chunked", 512))],
    ids=str,
)
def test_the_split_hopper_backward_serves(dim: int, deterministic: bool, mask: Mask, dtype: str) -> None:
    for longest in (512, 16384):
        problem = posed(dim, mask, dtype, longest)
        strategy, choices = choosing.choose_backward(choosing.Chooser(problem, H200, None, NODE), deterministic)
        assert strategy == SPLIT
        for kernel in STRATEGIES[SPLIT]:
            assert choices[kernel].variant.name == f"sm90/{kernel}"
            refused = limits.before_compile(
                choices[kernel].variant, problem.specialization, choices[kernel].config, H200
            )
            assert refused is None


def test_forms_that_packed_sequences_cannot_have_are_refused() -> None:
    variant, spec = registry.variant_named("sm90/bwd_fused"), posed(128).specialization
    good = variant.space.default(spec, 90)
    assert limits.before_compile(variant, spec, good, H200) is None
    for form in ({"PERSISTENT": False, "DYNAMIC": False}, {"DYNAMIC": False}, {"PAIRS": True, "DYNAMIC": False}):
        refused = limits.before_compile(variant, spec, {**good, **form}, H200)
        assert refused is not None and refused.name == "packed_sequences_in_one_form"


def test_a_descriptor_ends_where_a_sequence_ends() -> None:
    """Coordinates (2^30, row behind the sequence, head, 2^30 - its length + row) are those of the row, by addresses that wrap
    around, and a row that the sequence has not is one that the tensor has not."""
    rows, heads, dim, most = 16384, 16, 128, 1 << 30
    strides = (rows * heads * dim, dim, heads * dim)
    for name in ("q", "k", "dk"):
        shape, steps = _addressed(name, posed(dim), strides, {})
        assert all(0 < 2 * step < 1 << 40 and 2 * step % 16 == 0 for step in steps[:-1])
        assert all(0 < size <= 1 << 32 for size in shape)
        for first, length in ((0, 5), (100, 0), (16000, 384), (7, 1000)):
            for row in (0, 3, 4, 5, 999, 1000):
                place = (most, first + length, 3, most - length + row, 0)
                assert all(0 <= at < size for at, size in zip(place, shape, strict=True)) == (row < length)
                address = sum(at * 2 * step for at, step in zip(place, steps, strict=True))
                assert address % (1 << 64) == 2 * ((first + row) * strides[2] + 3 * strides[1])
    dense = Problem("bf16", 2, heads, heads, rows, rows, dim, dim, CAUSAL)
    assert _addressed("q", dense, strides, {}) == ([2, heads, rows, dim], [*strides, 1])


def sequences(count: int, heads: tuple[int, int], rows: tuple[int, int], dim: int, mask: Mask, longest: int) -> Problem:
    return Problem("bf16", 1, *heads, *rows, dim, dim, mask, extent=Extent(RAGGED, count, longest))


def forward(problem: Problem) -> choosing.Choice:
    return choosing.choose(problem, "fwd", H200, node=NODE)


@pytest.mark.parametrize(
    ("problem", "rows"),
    [
        (sequences(45, (64, 8), (3529, 19136), 128, CAUSAL, 4096), 64),  # 78 queries a sequence
        (sequences(300, (16, 16), (16300, 16300), 128, CAUSAL, 512), 64),
        (sequences(16, (16, 16), (16384, 16384), 128, CAUSAL, 1024), 128),
        (sequences(4, (16, 16), (16384, 16384), 128, CAUSAL, 4096), 128),
        (sequences(17, (2, 2), (16061, 21041), 128, FULL, 4096), 128),
    ],
    ids=str,
)
def test_short_sequences_have_small_tiles_in_the_forward(problem: Problem, rows: int) -> None:
    choice = forward(problem)
    assert choice.config["BLOCK_M"] == rows and choice.few_tiles == (rows == 64)
    assert limits.before_compile(choice.variant, problem.specialization, choice.config, H200) is None


@pytest.mark.parametrize(
    ("problem", "rescale"),
    [
        (sequences(1, (8, 4), (10934, 10934), 64, CAUSAL, 16384), "never"),
        (sequences(5, (32, 8), (12982, 12982), 64, CAUSAL, 8192), "never"),
        (sequences(1, (32, 32), (7368, 7368), 128, CAUSAL, 8192), "never"),
        (sequences(1, (4, 2), (16690, 18296), 96, CAUSAL, 32768), "never"),
        (sequences(3, (8, 4), (2736, 2736), 64, CAUSAL, 1024), "lazy"),
        (sequences(300, (16, 16), (16300, 16300), 128, CAUSAL, 512), "lazy"),
        (sequences(1, (8, 4), (10934, 10934), 64, band(500, 0), 16384), "lazy"),
        (
            sequences(64, (8, 8), (64, 65536), 64, CAUSAL, 1024),
            "lazy",
        ),  # few queries: all keys once more are most of it
    ],
    ids=str,
)
def test_a_pass_over_the_keys_is_for_calls_that_it_is_short_in(problem: Problem, rescale: str) -> None:
    """And what other lengths of such calls have is precompiled with it."""
    choice = forward(problem)
    assert choice.config["RESCALE"] == rescale
    assert choice.row is not None
    found = {form["RESCALE"] for form in packed_schedule.forms(problem, choice.of_row)}
    assert found == ({"lazy", choice.row.config["RESCALE"]} if problem.mask.measured else set())


def test_heads_share_a_band_where_few_tiles_would_end_unevenly() -> None:
    """One sequence of two key heads: with heads one by one the last head's longest tile would start last."""
    asked = sequences(1, (4, 2), (9209, 9209), 128, CAUSAL, 16384)
    choice = choosing.choose(asked, "bwd_fused", H200, WARP_SPECIALIZED_ROWS, node=NODE)
    assert choice.row is not None and choice.row.config["HEADS_PER_WAVE"] == 1 < choice.config["HEADS_PER_WAVE"]
    same = {name: value for name, value in choice.config.items() if name != "HEADS_PER_WAVE"}
    assert all(
        choice.row.config.get(name, value) == value for name, value in same.items() if name not in bwd_fused.PACKED
    )
    many = choosing.choose(posed(128, longest=1024), "bwd_fused", H200, WARP_SPECIALIZED_ROWS, node=NODE)
    assert many.row is not None and many.config["HEADS_PER_WAVE"] == many.row.config["HEADS_PER_WAVE"]


@pytest.mark.parametrize("mask", [CAUSAL, FULL, band(256, 0)], ids=str)
@pytest.mark.parametrize("dim", [72, 80, 96])
def test_the_fused_backward_has_head_dims_in_parts_as_that_of_dense_calls(dim: int, mask: Mask) -> None:
    for longest in (512, 4096, 16384):
        choice = choosing.choose(posed(dim, mask, longest=longest), "bwd_fused", H200, WARP_SPECIALIZED_ROWS, node=NODE)
        assert choice.config["IN_PARTS"] and choice.config["REDUCE"] == "vector" and choice.config["num_warps"] == 4
    whole = choosing.choose(posed(48, mask), "bwd_fused", H200, WARP_SPECIALIZED_ROWS, node=NODE)
    assert not whole.config["IN_PARTS"]


def test_bands_are_wider_where_all_that_they_have_in_use_stays_in_the_l2() -> None:
    """Of 10934 tokens q, dO and the sums of dQ of four query heads are 28 MB; of 109340 ten times as much."""
    for rows, wider in ((10934, True), (109340, False)):
        asked = sequences(1, (8, 4), (rows, rows), 64, CAUSAL, 16384)
        choice = choosing.choose(asked, "bwd_fused", H200, WARP_SPECIALIZED_ROWS, node=NODE)
        own = choice.row.config["HEADS_PER_WAVE"] if choice.row is not None else 0
        assert (choice.config["HEADS_PER_WAVE"] > own) == wider


@pytest.mark.parametrize(
    ("window", "rows", "count"), [(7, 39068, 1), (119, 20439, 1), (45, 23874, 94), (1200, 14907, 241)]
)
def test_where_windows_are_narrow_or_sequences_short_nothing_runs_overlapped(
    window: int, rows: int, count: int
) -> None:
    asked = sequences(count, (4, 4), (rows, rows), 128, band(window, 0), 0)
    choice = choosing.choose(asked, "bwd_fused", H200, WARP_SPECIALIZED_ROWS, node=NODE)
    assert choice.row is not None and choice.row.config["BESIDE"] and not choice.config["BESIDE"]
    wide = sequences(1, (4, 4), (39068, 39068), 128, band(4096, 0), 0)
    choice = choosing.choose(wide, "bwd_fused", H200, WARP_SPECIALIZED_ROWS, node=NODE)
    assert choice.row is not None and choice.config["BESIDE"] == choice.row.config["BESIDE"]


def test_of_short_sequences_nothing_runs_overlapped() -> None:
    """As benchmarks/calls/packed_choices.json has it: 0.55 to 0.86 of the time with up to 399 queries a sequence."""
    for count, heads, rows, mask in (
        (19, (2, 2), (7580, 7580), FULL), (45, (64, 8), (3529, 19136), CAUSAL), (169, (64, 32), (5585, 5585), CAUSAL),
        (4, (4, 4), (2721, 2721), FULL), (67, (32, 4), (42226, 42226), CAUSAL),
    ):  # fmt: skip
        few = sequences(count, heads, rows, 128, mask, 1024)
        choice = choosing.choose(few, "bwd_fused", H200, WARP_SPECIALIZED_ROWS, node=NODE)
        assert choice.row is not None and choice.row.config["BESIDE"]
        assert not choice.config["BESIDE"] and not choice.config["FINISH_BESIDE"]
        tiles = few.extent.tiles(1, rows[1], 128) * heads[1]
        assert choice.variant.programs(few, choice.config, H200.sm_count) == min(tiles, H200.sm_count)
        assert limits.before_compile(choice.variant, few.specialization, choice.config, H200) is None


def test_of_most_packed_calls_nothing_runs_overlapped() -> None:
    """As benchmarks/calls/packed_choices_11.json has it: 0.95 of the time alone in the geometric mean of all its calls. Three
    that lose 10 to 12 % have query blocks in parts now."""
    lost, asked = [], PACKED_CHOICES.packings(PACKED_CHOICES.ALONE)
    for name, call in json.loads((BENCHMARKS / "calls/packed_choices_11.json").read_text("utf-8"))["calls"].items():
        problem, us = PACKED_CHOICES.posed(asked[name][0]), call["us"]["bwd"]
        own, alone = us["as the row, chosen"], us.get("alone", us["alone, one band"])
        found = PACKED_CHOICES.fused_choice(choosing.Chooser(problem, H200, node=NODE))
        assert found is not None
        lost.append((own if found[0].config["BESIDE"] else alone) / min(own, alone))
    assert len(lost) == 68 and sum(one > 1.05 for one in lost) == 3 and max(lost) < 1.13
    assert statistics.geometric_mean(lost) < 1.01


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_without_wgmma_packed_calls_have_the_kernels_of_dense_ones(dim: int, mask: Mask) -> None:
    a100 = gpus.named("a100")

    def served(deterministic: bool) -> set[str]:
        chooser = choosing.Chooser(posed(dim, mask), a100, node=NODE)
        _, backward = choosing.choose_backward(chooser, deterministic)
        return {choice.variant.name for choice in (chooser.choose("fwd"), *backward.values())}

    assert served(False) == {"sm80/fwd", "sm80/bwd_fused"}
    assert served(True) == {"sm80/fwd", "portable/bwd_dq", "portable/bwd_dkdv"}


@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_sums_of_many_short_sequences_would_take_too_much_memory(gpu: str) -> None:
    """The same rows of the cache, looked up by one process: the number of sequences is none of a key's."""
    here = gpus.named(gpu)
    for sequences, total, strategy in (
        (10_000, 100_000, SPLIT),
        (16, 16384, FUSED),
        (200, 2000, FUSED),
        (64, 2**20, FUSED),
    ):
        problem = Problem("bf16", 1, 32, 32, total, total, 128, 128, CAUSAL, extent=Extent(RAGGED, sequences))
        chooser = choosing.Chooser(problem, here, node=NODE)
        assert choosing.choose_backward(chooser, False)[0] == strategy, (sequences, total)
        refused = [one.why for one in chooser.find_backward(False)[1]]
        assert any("too much memory" in why for why in refused) == (strategy == SPLIT), refused


@pytest.mark.parametrize(("batch", "strategy"), [(8192, SPLIT), (64, FUSED)])
def test_dense_calls_of_many_short_sequences_have_no_large_sums_either(batch: int, strategy: str) -> None:
    """8192 x 16 heads of 16 queries: 4.3 GB of sums for 0.3 GB of Q."""
    chooser = choosing.Chooser(Problem("bf16", batch, 16, 16, 16, 16, 64, 64, FULL), gpus.named("a100"))
    assert choosing.choose_backward(chooser, False)[0] == strategy


@pytest.mark.parametrize(
    ("dims", "columns"), [((16, 16), 32), ((40, 40), 64), ((64, 64), 64), ((64, 128), 128), ((40, 96), 128)]
)
def test_sums_of_dq_are_as_wide_as_the_wider_head_dim(dims: tuple[int, int], columns: int) -> None:
    here = gpus.named("h200")
    # blocks of 128 rows, as many as any lengths can need: one more a sequence than all rows fill
    blocks = here.hbm_bytes * packed_schedule.MOST_MEMORY / (4 * 32 * 128 * columns)
    most = blocks / (1 + 10 / 128)
    for sequences, large in ((int(0.99 * most), False), (int(1.01 * most), True)):
        extent = Extent(RAGGED, sequences)
        problem = Problem("bf16", 1, 32, 32, 10 * sequences, 10 * sequences, *dims, CAUSAL, extent=extent)
        assert packed_schedule.sums_too_large(problem, here) == large, (sequences, columns)
