"""Which kernels and configs the backward of packed sequences is served by, from the shipped rows; and how TMA addresses it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.compiling import limits, registry
from fa2tune.launching.launch import _addressed
from fa2tune.rows import lookup
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import FUSED, SPLIT, Problem
from fa2tune.spec.score import score_of
from fa2tune.spec.variant import WARP_SPECIALIZED, implementation_of

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
        assert choosing.strategy_of(problem, H200, False, node=NODE) == (FUSED, {"bwd_fused": True})
        choice = choosing.choose(problem, "bwd_fused", H200, True, node=NODE)
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
        choice = choosing.choose(problem, "bwd_fused", H200, True, node=NODE)
        assert choice.answer is not None and choice.answer.row.key.bucket == bucket


@pytest.mark.parametrize(
    ("problem", "deterministic"),
    [
        (posed(128), True),
        (posed(256), False),
        (posed(128, dtype="fp32"), False),
        (posed(128, score=score_of(30.0)), False),
        (posed(128, aligned=False, tma=False), False),
        (posed(128, wide=True), False),
    ],
    ids=["deterministic", "256", "fp32", "soft cap", "unaligned", "4 GiB"],
)
def test_the_portable_kernels_serve_the_rest(problem: Problem, deterministic: bool) -> None:
    strategy, kinds = choosing.strategy_of(problem, H200, deterministic, node=NODE)
    assert strategy == SPLIT or not kinds["bwd_fused"]
    for kernel in kinds:
        config = choosing.choose(problem, kernel, H200, kinds[kernel], node=NODE).config
        assert implementation_of(config) != WARP_SPECIALIZED


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
