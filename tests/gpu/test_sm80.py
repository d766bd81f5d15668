"""The kernels for GPUs without wgmma, on any GPU that has mma.sync and cp.async: by the error rule, with NaN in what was not
written. Gluon has no interpreter, so these are their only tests of numerics. Configs are those of the GPU's own architecture,
and where that has better kernels, so that the search spaces refuse these, those of an A100."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hopper_cases import as_they_are, check, inside_a_wider_one, sequence_first

import fa2tune
from fa2tune import gpus
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.schedules import ordered
from fa2tune.compiling import compiler, registry
from fa2tune.compiling.choice import Choice
from fa2tune.launching import passes
from fa2tune.measuring import reference, verify
from fa2tune.rows import reader
from fa2tune.rows.describe import describe
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import FUSED, Config, Problem, Specialization
from fa2tune.spec.score import Score
from fa2tune.spec.variant import Variant, implementation_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="no GPU with mma.sync and cp.async",
)
ORDERED = registry.variant_named("sm80/bwd_ordered")
FORWARD, BACKWARD = registry.variant_named("sm80/fwd"), registry.variant_named("sm80/bwd_fused")
both = pytest.mark.parametrize("variant", [FORWARD, BACKWARD], ids=["fwd", "bwd_fused"])
masks = pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
windows = pytest.mark.parametrize("mask", [Mask("band", 100, 30), Mask("band", 0, 0), Mask("chunked", 96)], ids=str)
#: Odd, fewer and more keys than queries (under a causal mask: rows that see none), one query, whole tiles
LENGTHS = ((203, 333), (333, 203), (1, 77), (512, 512))


def posed(*lengths: int, dims: tuple[int, int] = (64, 64), mask: Mask = FULL, dtype: str = "bf16",
          heads: tuple[int, int] = (4, 2)) -> Problem:  # fmt: skip
    return Problem(dtype, 2, *heads, *lengths, *dims, mask)


def config_of(variant: Variant, problem: Problem, **changes: Any) -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    spec = problem.specialization
    if 90 <= arch < 120:
        arch = 80
    config = {**variant.space.default(spec, arch), **changes}
    broken = variant.space.broken(config, spec, arch)
    if broken is not None:
        pytest.skip(broken.why)
    return config


def checked(variant: Variant, problem: Problem, changes: dict[str, Any], **more: Any) -> None:
    check(variant, config_of(variant, problem, **changes), problem, **more)


@both
@masks
@pytest.mark.parametrize("dims", [(16, 16), (32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (72, 40), (64, 128),
                                  (192, 128), (16, 128)])  # fmt: skip
def test_head_dims_and_lengths(variant: Variant, mask: Mask, dims: tuple[int, int]) -> None:
    for lengths in LENGTHS:
        checked(variant, posed(*lengths, dims=dims, mask=mask), {})


@masks
@pytest.mark.parametrize("sums", ["add", "mma", "first"])
def test_sums_of_rows(sums: str, mask: Mask) -> None:
    for lengths in LENGTHS:
        checked(FORWARD, posed(*lengths, mask=mask), {"SUMS": sums})


@masks
@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("schedule", ["fa2", "double"])
def test_schedules_of_the_forward(schedule: str, in_registers: bool, mask: Mask) -> None:
    changes = {"SCHEDULE": schedule, "Q_IN_REGISTERS": in_registers, "BLOCK_N": 32}
    for lengths in (*LENGTHS, (577, 1001), (160, 96)):  # even and odd numbers of key blocks
        checked(FORWARD, posed(*lengths, mask=mask), changes)


@pytest.mark.parametrize("block_n", [32, 64, 128])
@pytest.mark.parametrize("block_m", [64, 128])
def test_tiles_that_see_no_key_of_a_block(block_m: int, block_n: int) -> None:
    """Key blocks narrower than a query block: under a causal mask rows see none of a block that others see."""
    for lengths in ((256, 256), (256, 320), (320, 256)):
        checked(FORWARD, posed(*lengths, mask=CAUSAL), {"BLOCK_M": block_m, "BLOCK_N": block_n})


@pytest.mark.parametrize("schedule", ["fa2", "double"])
@windows
def test_windows_and_chunks_forward(mask: Mask, schedule: str) -> None:
    for lengths in (*LENGTHS, (700, 700)):
        checked(FORWARD, posed(*lengths, mask=mask), {"SCHEDULE": schedule})


@pytest.mark.parametrize("dim", [64, 128])  # P through registers, and through shared memory
@windows
def test_windows_and_chunks_backward(mask: Mask, dim: int) -> None:
    for lengths in (*LENGTHS, (700, 700), (40, 2000), (2000, 40)):
        checked(BACKWARD, posed(*lengths, dims=(dim, dim), mask=mask), {})


@pytest.mark.parametrize("step", [0.5, 3.0, 40.0])  # powers of two by which each key's weight is above the one before
@pytest.mark.parametrize("falling", [False, True])
def test_weights_that_rise_along_the_keys(step: float, falling: bool) -> None:
    """The references of the exponentials are raised seldom, never, or with every block."""
    queries, keys, dim = 96, 640, 64
    q = torch.zeros(1, 2, queries, dim, device="cuda", dtype=torch.bfloat16)
    q[..., :2] = 1.0
    place = torch.arange(keys, device="cuda").flip(0) if not falling else torch.arange(keys, device="cuda")
    k = torch.zeros(1, 2, keys, dim, device="cuda", dtype=torch.bfloat16)
    k[..., 0] = (place // 8 * 8 * step * 0.125).to(torch.bfloat16)  # key blocks are taken from the last to the first
    k[..., 1] = (place % 8 * step * 0.125).to(torch.bfloat16)
    v = torch.randn(1, 2, keys, dim, device="cuda", dtype=torch.bfloat16)
    problem = Problem("bf16", 1, 2, 2, queries, keys, dim, dim, FULL)
    o, lse = passes.forward(q, k, v, mask=FULL, softmax_scale=math.log(2.0), config=config_of(FORWARD, problem))
    weights = q.double() @ k.double().mT * math.log(2.0)
    torch.testing.assert_close(o.double(), weights.softmax(-1) @ v.double(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(passes.lse_of(lse).double(), weights.logsumexp(-1), atol=1e-3, rtol=1e-3)


forms_of_the_backward = pytest.mark.parametrize(
    "form",
    [
        ("registers", 32, 128, 4, (1, 4, 2)), ("registers", 64, 64, 4, (1, 4, 4)),
        ("shared", 32, 64, 4, (2, 2, 1)), ("shared", 64, 128, 8, (4, 8, 4)), ("one", 64, 128, 4, (2, 4, 2)),
    ],
    ids=lambda form: f"{form[0]}{form[1]}",
)  # fmt: skip


def changes_of(form: tuple[Any, ...]) -> dict[str, Any]:
    """To the default config."""
    through, block_m, block_n, warps, split = form
    changes = {"P_THROUGH": through, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps}
    changes |= dict(zip(("SCORE_WARPS", "KEY_WARPS", "QUERY_WARPS"), split, strict=True))
    return changes


@masks
@forms_of_the_backward
def test_forms_of_the_backward(form: tuple[Any, ...], mask: Mask) -> None:
    changes = changes_of(form)
    for lengths in LENGTHS:
        checked(BACKWARD, posed(*lengths, mask=mask), changes)


def named_by_rows() -> list[tuple[Variant, Specialization, Config]]:
    """What shipped rows of GPUs without wgmma name, each machine code once."""
    found = {}
    for row in (row for path in reader.shipped_paths() for row in reader.read(path)):
        variant = {"fwd": FORWARD, "bwd_fused": BACKWARD}.get(row.key.kernel)
        if variant is not None and implementation_of(row.config) in variant.implementations:
            key = row.key
            spec = Specialization(key.dtype, key.head_dim, key.head_dim_v, key.mask)
            asked = variant.name, spec, json.dumps(compiler.binary_config(variant, row.config), sort_keys=True)
            found[asked] = variant, spec, row.config
    return list(found.values())


@pytest.mark.parametrize(
    ("variant", "spec", "config"), named_by_rows(),
    ids=lambda part: part.short_name if isinstance(part, Variant) else describe(part) if isinstance(part, dict) else
    f"{part.dtype}-{part.head_dim}-{part.mask}",
)  # fmt: skip
def test_what_shipped_rows_name(variant: Variant, spec: Specialization, config: Config) -> None:
    """Two products at a time, V or a part of Q in registers among them."""
    for lengths in LENGTHS:
        checked(
            variant, posed(*lengths, dims=(spec.head_dim,) * 2, mask=Mask(spec.mask), dtype=spec.dtype), dict(config)
        )


@masks
@pytest.mark.parametrize("gpu", ["a100", "l4"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_gradients_of_a_scaled_loss_are_finite(dim: int, gpu: str, mask: Mask) -> None:
    """In fp16, with dP beyond 65504 and gradients below it."""
    problem = posed(70, 140, dims=(dim, dim), mask=mask, dtype="fp16")
    _, choices = choosing.choose_backward(choosing.Chooser(problem, gpus.named(gpu)), False)
    made, options = reference.make_inputs(problem, "cuda"), {"mask": mask, "softmax_scale": dim**-0.5}
    v, do = made.v * 8, made.do * 600
    o, lse = passes.forward(made.q, made.k, v, config=config_of(FORWARD, problem), **options)
    found = passes.backward(do, None, made.q, made.k, v, o, lse, strategy=FUSED, configs=choices, **options)
    leaves = [tensor.double().requires_grad_() for tensor in (made.q, made.k, v)]
    out, _ = reference.attention(*leaves, **options)
    for name, ours, right in zip(("dq", "dk", "dv"), found, torch.autograd.grad(out, leaves, do.double()), strict=True):
        assert right.abs().max() < 60000 and ours.isfinite().all(), name
        torch.testing.assert_close(ours.double(), right, atol=0.01 * float(right.abs().max()), rtol=0.02)


@both
@pytest.mark.parametrize("heads", [(8, 1), (6, 3), (3, 3)])
def test_grouped_heads(variant: Variant, heads: tuple[int, int]) -> None:
    checked(variant, posed(203, 333, mask=CAUSAL, heads=heads), {"HEADS_PER_WAVE": 4})


@both
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("inputs", [{}, {"scale": 10.0}, {"outlier": True}, {"softmax_scale": -0.2}, {"softmax_scale": 3.0}],
                         ids=str)  # fmt: skip
def test_inputs_of_every_kind(variant: Variant, dtype: str, inputs: dict[str, Any]) -> None:
    checked(variant, posed(203, 333, mask=CAUSAL, dtype=dtype), {}, **inputs)


@both
@pytest.mark.parametrize("view", [as_they_are, sequence_first, inside_a_wider_one])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_strides(variant: Variant, dim: int, view: Any) -> None:
    checked(variant, posed(203, 333, dims=(dim, dim)), {}, view=view)


@both
def test_lse_has_a_gradient_or_none(variant: Variant) -> None:
    for with_dlse in (False, True):
        checked(variant, posed(333, 203, mask=CAUSAL), {}, with_dlse=with_dlse)


capped = pytest.mark.parametrize("cap", [1.5, 30.0])


@both
@masks
@capped
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_a_score_term(variant: Variant, mask: Mask, cap: float, dim: int) -> None:
    for lengths in LENGTHS:
        problem = posed(*lengths, dims=(dim, dim), mask=mask)
        checked(variant, replace(problem, score=Score("softcap", cap)), {})


@both
@capped
@pytest.mark.parametrize("mask", [Mask("band", 100, 30), Mask("chunked", 96)], ids=str)
def test_a_score_term_under_windows(variant: Variant, mask: Mask, cap: float) -> None:
    problem = replace(posed(333, 203, dims=(128, 64), mask=mask, dtype="fp16"), score=Score("softcap", cap))
    for inputs in ({}, {"softmax_scale": -0.2}, {"scale": 10.0}):
        checked(variant, problem, {}, **inputs)


@capped
@forms_of_the_backward
def test_a_score_term_in_forms_of_the_backward(form: tuple[Any, ...], cap: float) -> None:
    problem = replace(posed(333, 203, mask=CAUSAL), score=Score("softcap", cap))
    checked(BACKWARD, problem, changes_of(form))
    if form[0] != "one":
        check(BACKWARD, in_order(problem, 2, **changes_of(form)), problem)  # type: ignore[arg-type]


# ---- dQ in a fixed order


def in_order(problem: Problem, buffers: int, **changes: Any) -> Choice:
    """By so many sums a head; 0: by one, in turns."""
    if buffers == 0:
        return Choice(BACKWARD, {**config_of(BACKWARD, problem, **changes), "IN_ORDER": True})
    return Choice(ORDERED, {**config_of(BACKWARD, problem, **changes), "DQ_BUFFERS": buffers})


def bits(problem: Problem, choice: Choice, runs: int = 3) -> list[tuple[torch.Tensor, ...]]:
    """Gradients of so many equal calls."""
    made = reference.make_inputs(problem, "cuda", with_dlse=True)
    scale = problem.head_dim**-0.5
    forward = registry.portable_of("fwd").space.default(problem.specialization, 80)
    q, k, v, options = made.q, made.k, made.v, {"mask": problem.mask, "softmax_scale": scale}
    o, lse = passes.forward(q, k, v, config=forward, **options)
    found = []
    for _ in range(runs):
        with verify._strict("ieee"):  # memory holds NaN
            configs = {"bwd_fused": choice}
            found.append(
                passes.backward(made.do, made.dlse, q, k, v, o, lse, strategy=FUSED, configs=configs, **options)
            )
    return found


def same(problem: Problem, choice: Choice) -> None:
    first, *others = bits(problem, choice)
    for other in others:
        for name, one, another in zip(("dq", "dk", "dv"), first, other, strict=True):
            assert torch.equal(one, another), f"{name} of {problem}, {dict(choice.config)}"


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Mask("band", 100, 30), Mask("chunked", 96)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (256, 256), (72, 40)])
def test_in_order_head_dims_and_lengths(dims: tuple[int, int], mask: Mask) -> None:
    """Programs of one tile and of several, an even and an odd number of turns, the last one whole or not."""
    for lengths in (*LENGTHS, (700, 1100), (1100, 700), (40, 2000)):
        problem = posed(*lengths, dims=dims, mask=mask)
        tiles = -(-lengths[1] // config_of(BACKWARD, problem)["BLOCK_N"])
        for buffers in sorted({0, 1, min(2, tiles), min(3, tiles), tiles}):
            check(BACKWARD, in_order(problem, buffers), problem)  # type: ignore[arg-type]


@masks
@forms_of_the_backward
def test_in_order_forms(form: tuple[Any, ...], mask: Mask) -> None:
    changes = changes_of(form)
    for lengths in ((203, 333), (700, 1100)):
        problem = posed(*lengths, mask=mask)
        for buffers in (0, 2):
            check(BACKWARD, in_order(problem, buffers, **changes), problem)  # type: ignore[arg-type]


@pytest.mark.parametrize("heads", [(8, 1), (6, 3)])
@pytest.mark.parametrize("wave", [1, 16])
def test_in_order_grouped_heads(wave: int, heads: tuple[int, int]) -> None:
    problem = posed(203, 700, mask=CAUSAL, heads=heads)
    for buffers in (0, 2, 3):
        check(BACKWARD, in_order(problem, buffers, HEADS_PER_WAVE=wave), problem)  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Mask("band", 500, 0)], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_in_order_calls_have_equal_bits(dim: int, mask: Mask) -> None:
    for lengths, heads in (((2048, 2048), (8, 8)), ((1500, 2222), (8, 2)), ((4096, 4096), (2, 1))):
        problem = posed(*lengths, dims=(dim, dim), mask=mask, heads=heads)
        for buffers in (0, 1, 3, 8):
            same(problem, in_order(problem, buffers))


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Mask("band", 500, 0)], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("wave", [1, 16, 64])
def test_many_tiles_in_turns(dim: int, mask: Mask, wave: int) -> None:
    """More programs than the GPU runs at once, in many runs, next to kernels of another stream."""
    problem = replace(posed(2048, 2048, dims=(dim, dim), mask=mask, heads=(16, 8)), batch=4)
    other, beside = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    with torch.cuda.stream(other):
        for _ in range(50):
            beside = (beside @ beside).clamp(-1, 1)
    first, *others = bits(problem, in_order(problem, 0, HEADS_PER_WAVE=wave), runs=20)
    for found in others:
        assert all(torch.equal(one, another) for one, another in zip(first, found, strict=True))
    torch.cuda.synchronize()


def test_in_order_through_the_public_call() -> None:
    """On a GPU whose rows name the fused kernel."""
    problem, gpu = posed(1024, 1024, dims=(128, 128), mask=CAUSAL, heads=(16, 16)), dispatch.gpu_of(0)
    chooser = choosing.Chooser(problem, gpu)
    strategy, choices = choosing.choose_backward(chooser, True)
    if strategy != FUSED:
        pytest.skip(f"deterministic calls of {gpu.name} are split")
    assert choices[ordered.KERNEL].variant is ORDERED or choices[ordered.KERNEL].config["IN_ORDER"]
    dispatch.reload()
    q, k, v = (torch.randn(2, 16, 1024, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    first, second = (
        torch.autograd.grad(fa2tune.attention(q, k, v, causal=True, deterministic=True).sum(), (q, k, v)) for _ in "12"
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    dispatch.reload()
