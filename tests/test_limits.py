"""What is refused, by which name, and that the arithmetic bounds are bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fa2tune import gpus
from fa2tune.compiling import compiler, limits
from fa2tune.compiling.compiler import Binary
from fa2tune.problem import Specialization

A100, H200 = gpus.named("a100"), gpus.named("h200")
SPEC = Specialization("bf16", 128, 128, causal=False)
FWD = {
    "BLOCK_M": 128, "BLOCK_N": 64, "LOADS": "pointer", "MASKED": "last", "HEADS_PER_WAVE": 4,
    "num_warps": 8, "num_stages": 3, "maxnreg": 0,
}  # fmt: skip


def binary(**changes: Any) -> Binary:
    whole = Binary("fwd", SPEC, FWD, 90, shared_bytes=65536, num_warps=8, registers=128, stack_bytes=0, cubin_path="")
    return replace(whole, **changes)


def refused(gpu: gpus.Gpu, kernel: str = "fwd", spec: Specialization = SPEC, **changes: Any) -> str | None:
    refusal = limits.before_compile(compiler.variant_named(kernel), spec, {**FWD, **changes}, gpu)
    if refusal is not None:
        assert refusal.why
    return refusal and refusal.name


def test_the_default_passes() -> None:
    assert refused(A100) is None
    assert refused(H200) is None


def test_space_constraints_come_first() -> None:
    assert refused(A100, LOADS="descriptor", num_warps=64) == "descriptor_needs_tma"


def test_hardware_before_compile() -> None:
    assert refused(A100, BLOCK_M=2048, num_warps=64) == "threads_per_block"
    assert refused(A100, BLOCK_N=8) == "mma_shape"
    # 3 copies of two tiles of 128 x 128 bf16: 192 KiB
    assert refused(A100, BLOCK_M=64, BLOCK_N=128, num_warps=4, num_stages=4) == "shared_memory_of_tiles"
    assert refused(H200, BLOCK_M=64, BLOCK_N=128, num_warps=4, num_stages=4) is None


def test_ieee_products_that_unroll_past_the_instruction_cache() -> None:
    ieee = Specialization("fp32", 128, 128, causal=False)
    big = {"BLOCK_M": 64, "BLOCK_N": 128, "num_stages": 1}
    assert refused(H200, "bwd_dkdv", ieee, **big) == "instruction_cache"
    assert refused(H200, "bwd_dkdv", replace(ieee, precision="tf32"), **big) is None
    assert refused(H200, "fwd", ieee, BLOCK_M=64, BLOCK_N=16, num_warps=4, num_stages=1) is None


@pytest.mark.parametrize("kernel", ["fwd", "bwd_dkdv", "bwd_dq", "bwd_fused"])
@pytest.mark.parametrize("arch", [80, 86, 90])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_default_config_passes(kernel: str, arch: int, dim: int) -> None:
    variant = compiler.variant_named(kernel)
    gpu = {80: A100, 86: gpus.named("a10"), 90: H200}[arch]
    for dtype in ("bf16", "fp32"):
        spec = Specialization(dtype, dim, dim, causal=True)
        assert limits.before_compile(variant, spec, variant.space.default(spec, arch), gpu) is None


def test_every_refusal_of_the_space_has_a_short_name() -> None:
    variant = compiler.variant_named("fwd")
    points = list(variant.space.points())
    refusals = [limits.before_compile(variant, SPEC, point, A100) for point in points]
    names = {refusal.name for refusal in refusals if refusal}
    assert None in refusals
    assert "shared_memory_of_tiles" in names
    assert all(name.isidentifier() for name in names)


def test_after_compile() -> None:
    def name(gpu: gpus.Gpu, **changes: Any) -> str | None:
        refusal = limits.after_compile(binary(**changes), gpu)
        return refusal and refusal.name

    assert name(A100) is None
    assert name(A100, shared_bytes=166_913) == "shared_memory"
    assert name(A100, shared_bytes=166_912) is None
    assert name(H200, shared_bytes=232_448) is None
    assert name(H200, num_warps=16, registers=255) == "registers"
    assert name(H200, registers=255, stack_bytes=8 * 4) is None  # the best plain forward on an H200 looked so
    assert name(H200, registers=32, stack_bytes=11_512) == "spills"


@pytest.mark.parametrize(
    ("changes", "gpu", "blocks"),
    [
        ({}, A100, 2),  # 64 KiB each, and 64 K registers / (8 warps x 4 K)
        ({"shared_bytes": 50_000, "registers": 64}, A100, 3),
        ({"registers": 255}, A100, 1),
        ({"registers": 168, "num_warps": 4}, H200, 3),  # 5376 registers a warp: 3 warps a quarter
        ({"registers": 32, "shared_bytes": 0, "num_warps": 1}, H200, 32),
        ({"registers": 32, "shared_bytes": 0}, gpus.named("a10"), 6),  # 48 warps
        ({"shared_bytes": 166_912}, A100, 1),
        ({"shared_bytes": 166_913}, A100, 0),
        ({"registers": 255, "num_warps": 16}, H200, 0),
    ],
)
def test_blocks_per_sm(changes: dict[str, Any], gpu: gpus.Gpu, blocks: int) -> None:
    assert limits.blocks_per_sm(binary(**changes), gpu) == blocks
