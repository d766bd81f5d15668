"""Which config serves where no row does. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_rows import FULL as ROW

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.calling.defaults import default_config, portable_default, small_tiles
from fa2tune.compiling import limits
from fa2tune.compiling.registry import implementations, variant_named, variant_of
from fa2tune.rows import reader
from fa2tune.rows.row import PORTED, PREDICTED, Row, backward_implementation
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import BACKWARD, FUSED, KERNELS, SPLIT, STRATEGIES, Problem
from fa2tune.spec.score import Score
from fa2tune.spec.variant import WARP_SPECIALIZED, implementation_of

H200, A100, B200 = (gpus.named(name) for name in ("h200", "a100", "b200"))


def problem(dims: tuple[int, int] = (128, 128), dtype: str = "bf16", causal: bool = False, tma: bool = True) -> Problem:
    return Problem(dtype, 1, 16, 16, 2048, 2048, *dims, CAUSAL if causal else FULL, aligned=tma, tma=tma)


@pytest.mark.parametrize("kernel", ["fwd", "bwd_dq", "bwd_dkdv"])
@pytest.mark.parametrize("dims", [(72, 72), (128, 128), (192, 128), (64, 256), (256, 256)])
def test_wide_heads_take_the_warp_specialised_default_on_hopper(kernel: str, dims: tuple[int, int]) -> None:
    asked = problem(dims)
    config = default_config(kernel, asked, H200)
    variant = variant_of(kernel, config)
    assert implementation_of(config) == WARP_SPECIALIZED and variant.serves == kernel
    assert limits.before_compile(variant, asked.specialization, config, H200) is None


def test_other_architectures_take_the_portable_default() -> None:
    assert all(default_config(one, problem(), B200) == portable_default(one, problem(), B200.arch) for one in KERNELS)


@pytest.mark.parametrize("name", ["a100", "a100@42sm", "orin-agx-64gb", "a10", "l4", "rtx-5090"])
@pytest.mark.parametrize("dims", [(64, 64), (72, 40), (96, 96), (128, 128), (256, 256)])
def test_gpus_without_wgmma_take_the_default_of_their_own_kernels(name: str, dims: tuple[int, int]) -> None:
    gpu, asked = gpus.named(name), problem(dims, causal=True)
    for kernel in ("fwd", "bwd_fused"):
        config = default_config(kernel, asked, gpu)
        variant = variant_of(kernel, config)
        assert variant.name == f"sm80/{kernel}"
        assert limits.before_compile(variant, asked.specialization, config, gpu) is None
    for kernel in ("bwd_dq", "bwd_dkdv"):
        assert default_config(kernel, asked, gpu) == portable_default(kernel, asked, gpu.arch)


@pytest.mark.parametrize("name", ["orin-agx-64gb", "gb10"])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_gpus_without_wgmma_or_rows_take_the_fused_default(name: str, dim: int) -> None:
    chooser = choosing.Chooser(problem((dim, dim)), gpus.named(name))
    assert chooser.find_backward(deterministic=False)[0] is None
    strategy, choices = choosing.choose_backward(chooser, deterministic=False)
    assert strategy == FUSED and choices["bwd_fused"].variant.name == "sm80/bwd_fused"
    strategy, choices = choosing.choose_backward(chooser, deterministic=True)
    in_order = choices["bwd_fused"]
    assert strategy == FUSED and in_order.variant.name in ("sm80/bwd_fused", "sm80/bwd_ordered")
    assert in_order.config["IN_ORDER"] or "DQ_BUFFERS" in in_order.config


@pytest.mark.parametrize("dim", [136, 192, 256])
def test_rows_that_keep_dp_in_16_bits_serve_no_fp16(dim: int) -> None:
    """With a scaled loss dP exceeds 65504 where gradients do not."""
    variant, rows = (
        variant_named("sm80/bwd_fused"),
        (row for path in reader.shipped_paths() for row in reader.read(path)),
    )
    config = next(row.config for row in rows if row.config.get("SCORES_APART"))
    for dtype, refused in (("bf16", None), ("fp16", "dp_has_range")):
        spec = problem((dim, dim), dtype).specialization
        broken = variant.space.broken(config, spec, 80)
        assert (broken and broken.name) == refused
        assert variant.space.broken(variant.fitted(spec, config), spec, 80) is None


@pytest.mark.parametrize("asked", [problem((32, 32)), problem(dtype="fp32"), problem(tma=False)], ids=str)
def test_other_calls_without_rows_take_the_split_default(asked: Problem) -> None:
    strategy, choices = choosing.choose_backward(choosing.Chooser(asked, gpus.named("orin-agx-64gb")), False)
    assert strategy == SPLIT and all(choice.variant.name.startswith("portable/") for choice in choices.values())


@pytest.mark.parametrize("asked", [problem(dtype="fp32"), problem(tma=False), problem((32, 32))], ids=str)
def test_what_their_kernels_cannot_run_or_was_not_measured_takes_the_portable_default(asked: Problem) -> None:
    assert all(default_config(one, asked, A100) == portable_default(one, asked, 80) for one in KERNELS)


@pytest.mark.parametrize("asked", [problem(dtype="fp32"), problem(tma=False), problem((32, 32))], ids=str)
def test_what_warp_specialised_kernels_cannot_run_or_gain_takes_the_portable_default(asked: Problem) -> None:
    assert all(default_config(one, asked, H200) == portable_default(one, asked, 90) for one in KERNELS)


@pytest.mark.parametrize(("dim", "portable"), [(64, True), (128, False)])
def test_a_forward_with_a_soft_cap_takes_the_default_that_was_measured_to_be_faster(dim: int, portable: bool) -> None:
    asked = replace(problem((dim, dim)), score=Score("softcap", 50.0))
    assert (default_config("fwd", asked, H200) == portable_default("fwd", asked, 90)) == portable


def test_a_fused_backward_is_no_default() -> None:
    """It sums dQ in no fixed order: only a row, which a measurement made, asks for it."""
    assert implementation_of(default_config("bwd_fused", problem(), H200)) != WARP_SPECIALIZED


def test_by_pointer_where_no_descriptor_can_address() -> None:
    for dims in ((64, 64), (128, 128)):
        assert portable_default("fwd", problem(dims, tma=False), 90)["LOADS"] == "pointer"


@pytest.mark.parametrize("dims", [(128, 128), (256, 16), (64, 64)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_small_tiles_are_too_small_for_products_of_warpgroups(kernel: str, dims: tuple[int, int], dtype: str) -> None:
    config = small_tiles(kernel, problem(dims, dtype=dtype), 90)
    assert max(config["BLOCK_M"], config["BLOCK_N"]) <= 32


@pytest.mark.parametrize(
    ("asked", "gpu", "served"),
    [
        (problem(causal=True), H200, False),
        (problem(causal=True, tma=False), H200, True),
        (problem((32, 32), causal=True), H200, True),
        (problem(causal=True), B200, True),
        (problem(causal=True), A100, False),
    ],
    ids=["warp-specialised default", "not for TMA", "narrow heads", "other architecture", "sm80 default"],
)
def test_a_predicted_portable_row_never_stands_before_a_default_that_was_measured_to_be_faster(
    asked: Problem, gpu: gpus.Gpu, served: bool
) -> None:
    key = choosing.key_of(asked, "fwd", gpu)
    config = portable_default("fwd", asked, gpu.arch)
    predicted = replace(ROW, key=key, config=config, implementation=implementation_of(config), obtained=PREDICTED)
    among = [reader.Layer("user", Path("rows.sqlite"), (predicted,))]
    assert (choosing.choose(asked, "fwd", gpu, among=among).answer is not None) == served
    measured = replace(predicted, key=key.with_(bucket=512), obtained="measured")
    among = [reader.Layer("user", Path("rows.sqlite"), (predicted, measured))]
    answer = choosing.choose(asked, "fwd", gpu, among=among).answer
    assert answer is not None and answer.row is (predicted if served else measured)


def whole(asked: Problem, gpu: gpus.Gpu, obtained: str, strategy: str, named: str) -> Row:
    config = dict.fromkeys(STRATEGIES[strategy], named)
    key = choosing.key_of(asked, BACKWARD, gpu)
    implementation = backward_implementation(named == WARP_SPECIALIZED)
    return replace(ROW, key=key, config=config, implementation=implementation, obtained=obtained, strategy=strategy)


@pytest.mark.parametrize(
    ("name", "split", "fused"),
    [("a100", "pointer", "sm80"), ("l4", "pointer", "sm80"), ("h100", "pointer", WARP_SPECIALIZED),
     ("h100", WARP_SPECIALIZED, WARP_SPECIALIZED)],
)  # fmt: skip
@pytest.mark.parametrize("near", [{"dtype": "fp16"}, {"head_dim": 96, "head_dim_v": 96}, {"bucket": 512}], ids=str)
def test_a_predicted_split_backward_never_stands_before_a_fused_one_that_was_raced_for_a_near_problem(
    name: str, split: str, fused: str, near: dict[str, Any]
) -> None:
    """fp16 on an A100 had half of bf16's speed so, and `tune` without a GPU made calls slower."""
    asked, gpu = problem(causal=True), gpus.named(name)
    predicted = whole(asked, gpu, PREDICTED, SPLIT, split)
    raced = whole(asked, gpu, PORTED, FUSED, fused)
    raced = replace(raced, key=raced.key.with_(**near))

    def of(kernel: str, row: Row, implementation: str) -> Row:
        config = implementations(kernel)[implementation].space.default(asked.specialization, gpu.arch)
        return replace(row, key=row.key.with_(kernel=kernel), strategy="", implementation=implementation, config=config)

    kernels = (of("bwd_fused", raced, fused), *(of(kernel, predicted, split) for kernel in STRATEGIES[SPLIT]))
    chooser = choosing.Chooser(asked, gpu, [reader.Layer("user", Path("rows.sqlite"), (predicted, raced, *kernels))])
    answer, (refused,) = chooser.find_backward(deterministic=False)
    assert answer is not None and answer.row is raced
    assert refused.candidate.row is predicted and "kernel was measured to be faster" in refused.why
    assert chooser.strategy(False)[0] == FUSED
    asked_for, _ = chooser.find_backward(deterministic=True)
    assert asked_for is not None and asked_for.row is predicted
    alone = choosing.Chooser(asked, gpu, [reader.Layer("user", Path("rows.sqlite"), (predicted, *kernels[1:]))])
    answer, _ = alone.find_backward(deterministic=False)
    if fused == "sm80":  # the documented default was raced
        assert answer is None and alone.strategy(False) == (FUSED, {})
        assert choosing.choose_backward(alone, False)[1]["bwd_fused"].variant.name == "sm80/bwd_fused"
    else:
        assert answer is not None and answer.row is predicted and alone.strategy(False)[0] == SPLIT


def test_on_hopper_it_serves_where_no_fused_one_was_raced() -> None:
    asked = problem(causal=True)
    predicted = whole(asked, H200, PREDICTED, SPLIT, "pointer")
    chooser = choosing.Chooser(asked, H200, [reader.Layer("user", Path("rows.sqlite"), (predicted,))])
    answer, _ = chooser.find_backward(deterministic=False)
    assert answer is not None and answer.row is predicted
