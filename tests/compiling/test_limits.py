"""What is refused, by which name, and that the arithmetic bounds are bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fa2tune import gpus
from fa2tune.compiling import limits, registry, support
from fa2tune.compiling.compiler import Binary
from fa2tune.spec.problem import Specialization

A100, H200 = gpus.named("a100"), gpus.named("h200")
SPEC = Specialization("bf16", 128, 128, mask="full")
FWD = {
    "BLOCK_M": 128, "BLOCK_N": 64, "LOADS": "pointer", "MASKED": "last", "HEADS_PER_WAVE": 4,
    "num_warps": 8, "num_stages": 3, "maxnreg": 0,
}  # fmt: skip


def binary(**changes: Any) -> Binary:
    whole = Binary(
        "portable/fwd", SPEC, FWD, 90, shared_bytes=65536, num_warps=8, registers=128, stack_bytes=0, cubin_path=""
    )
    return replace(whole, **changes)


def refused(gpu: gpus.Gpu, kernel: str = "fwd", spec: Specialization = SPEC, **changes: Any) -> str | None:
    refusal = limits.before_compile(registry.portable_of(kernel), spec, {**FWD, **changes}, gpu)
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


def why(gpu: gpus.Gpu, kernel: str = "portable/fwd", **changes: Any) -> str:
    refusal = limits.before_compile(registry.variant_named(kernel), SPEC, {**FWD, **changes}, gpu)
    assert refusal is not None
    return refusal.why


def test_reasons_say_what_is_needed_and_what_there_is() -> None:
    assert why(A100, BLOCK_M=2048, num_warps=64) == "2048 threads per block; the limit is 1024"
    assert why(A100, BLOCK_N=8) == "BLOCK_N = 8; a matrix product needs sides of at least 16"
    assert why(A100, BLOCK_M=64, BLOCK_N=128, num_warps=4, num_stages=4) == (
        "the streamed tiles take at least 196608 bytes of shared memory; the limit per block on a100-sxm-80gb is 166912"
    )
    assert why(A100, "sm90/fwd") == "sm90/fwd needs compute capability exactly 9.0; a100-sxm-80gb has 8.0"
    turing = gpus.identify("Tesla T4", 75, 40)
    assert why(turing) == "fwd needs compute capability 8.0 or newer; Tesla T4 has 7.5"
    after = {
        limits.after_compile(binary(**changes), A100).why  # type: ignore[union-attr]
        for changes in (
            {"shared_bytes": 170_000},
            {"registers": 255, "num_warps": 16},
            {"registers": 32, "stack_bytes": 400},
        )
    }
    assert after == {
        "170000 bytes of shared memory; the limit per block on a100-sxm-80gb is 166912",
        "16 warps with 255 registers per thread; an SM has 65536",
        "100 spilled words per thread with 32 registers",
    }


@pytest.mark.parametrize(
    ("kernel", "gpu", "changes", "name"),
    [
        ("sm90/fwd", A100, {}, "architecture"),
        ("sm90/bwd_dq", H200, {"score": "softcap"}, None),
        ("sm90/fwd", H200, {}, None),
        ("portable/fwd", A100, {"score": "softcap"}, None),
        ("sm90/bwd_dq_split", A100, {}, "architecture"),
        ("sm90/bwd_dq_split", H200, {"dtype": "fp32"}, "call"),
        ("sm90/bwd_dq_split", H200, {}, None),
    ],
)
def test_what_no_config_of_a_kernel_computes(kernel: str, gpu: gpus.Gpu, changes: dict[str, str], name: str) -> None:
    """It is refused before any config is looked at, by the same name and sentence as each of them."""
    variant, spec = registry.variant_named(kernel), replace(SPEC, **changes)
    refusal = support.unsupported(variant, spec, gpu)
    assert (refusal and refusal.name) == name and support.supports(variant, spec, gpu) == (name is None)
    config = variant.space.default(spec, max(gpu.arch, variant.min_arch))
    assert limits.before_compile(variant, spec, config, gpu) == refusal


def test_a_kernel_without_the_hooks_computes_no_score_term(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = replace(registry.variant_named("sm90/bwd_dq"))
    spec = replace(SPEC, score="softcap")
    assert limits.unsupported(variant, spec, H200) is None
    monkeypatch.setitem(vars(variant), "constexpr_names", variant.constexpr_names - {"GRAD"})
    refusal = limits.unsupported(variant, spec, H200)
    assert refusal is not None and refusal.name == "score" and "the call has softcap" in refusal.why


def test_limits_differ_between_8_6_and_8_7() -> None:
    orin, a10 = gpus.named("orin-agx-64gb"), gpus.named("a10")
    tiles = {
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "num_warps": 4,
        "num_stages": 5,
    }  # 4 copies of two 64 x 128 bf16 tiles: 128 KiB
    assert refused(orin, **tiles) is None
    assert refused(a10, **tiles) == "shared_memory_of_tiles"
    small = binary(shared_bytes=0, registers=32, num_warps=1)
    assert (limits.blocks_per_sm(small, orin), limits.blocks_per_sm(small, gpus.named("gb10"))) == (16, 24)
    assert limits.blocks_per_sm(small, gpus.named("b300")) == 32


def test_ieee_products_that_unroll_past_the_instruction_cache() -> None:
    ieee = Specialization("fp32", 128, 128, mask="full")
    big = {"BLOCK_M": 64, "BLOCK_N": 128, "num_stages": 1}
    assert refused(H200, "bwd_dkdv", ieee, **big) == "instruction_cache"
    assert refused(H200, "bwd_dkdv", replace(ieee, precision="tf32"), **big) is None
    assert refused(H200, "fwd", ieee, BLOCK_M=64, BLOCK_N=16, num_warps=4, num_stages=1) is None


@pytest.mark.parametrize("kernel", ["fwd", "bwd_dkdv", "bwd_dq", "bwd_fused"])
@pytest.mark.parametrize("arch", [80, 86, 90])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_default_config_passes(kernel: str, arch: int, dim: int) -> None:
    variant = registry.portable_of(kernel)
    gpu = {80: A100, 86: gpus.named("a10"), 90: H200}[arch]
    for dtype in ("bf16", "fp32"):
        spec = Specialization(dtype, dim, dim, mask="causal")
        assert limits.before_compile(variant, spec, variant.space.default(spec, arch), gpu) is None


def test_every_refusal_of_the_space_has_a_short_name() -> None:
    variant = registry.portable_of("fwd")
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
