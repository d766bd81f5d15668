"""The documented default: the config of a kernel where no row serves.

A variant's search space names one config per architecture, head dim and mask, chosen by measurement. Where both the
portable and a warp-specialised variant can run a problem, the variant with the faster default serves: the warp-specialised one
from padded head dim 64 on, the portable one below, where tiles are padded to 64 columns.

Measured on an H200, bf16, as portable time over warp-specialised time. Head dim 128 and more: 1.16 to 1.45 forward, 1.32 to
1.89 backward (benchmarks/default_of_variants.py, 2026-11-21, lengths 512 to 8k). Head dim 64: 1.08 backward; forward 1.12 to
1.25 without a mask, 0.96 to 1.24 with one (the tuner's screening of 2026-11-22, lengths 512 to 16k).

On compute capability 8.x and 12.x the kernels of kernels/sm80 serve as defaults from padded head dim 64 on, as their rows of
evidence "ported" do. Under the limits of an A100 they were 1.1 to 1.8 times as fast forward, 1.6 to 4.2 backward; under those
of an L4 1.4 to 2.2 and 1.8 to 3.3 (docs/experiments/ported.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fa2tune.calling.schedules.forward_schedule import portable_is_faster
from fa2tune.compiling import limits, registry
from fa2tune.compiling.registry import implementations, variants_of
from fa2tune.compiling.support import supports
from fa2tune.gpus import Gpu
from fa2tune.spec.problem import Config, Problem, Specialization, padded_head_dim
from fa2tune.spec.variant import WARP_SPECIALIZED

#: Kernel -> the least padded head dim (the larger of both) from which the warp-specialised default serves
SPECIALIZED_FROM: Mapping[str, int] = {"fwd": 64, "bwd_dq": 64, "bwd_dkdv": 64}
#: The same of the kernels of kernels/sm80.
SM80, SM80_FROM = "sm80", {"fwd": 64, "bwd_fused": 64}
#: Compute capabilities of the limits that these defaults were raced under, as sm_80 code on an H200: an A100's and an L4's.
SM80_ARCHS = (80, 86, 87, 88, 89, 120, 121)

#: Rows and keys of the tiles that serve where nothing else does.
SMALL = 32


def portable_default(kernel: str, problem: Problem, arch: int) -> Config:
    """Of the portable variant, with pointer loads where its descriptors cannot address the tensors."""
    spec = problem.specialization
    return registry.portable_config(kernel, spec if problem.tma else replace(spec, aligned=False), arch)


def small_tiles(kernel: str, problem: Problem, arch: int) -> Config:
    """Of the portable variant where nothing else compiles: 32 rows are too few for the products of Hopper's warpgroups, whose
    operands ptxas may look for at wrong addresses. Slow."""
    config = portable_default(kernel, problem, arch)
    warps = config["num_warps"] if problem.dtype == "fp32" else 4
    tile = {name: min(config[name], SMALL) for name in ("BLOCK_M", "BLOCK_N")}
    return {**config, **tile, "num_warps": warps, "num_stages": 1}


def variant_default(kernel: str, spec: Specialization, gpu: Gpu, specialized: bool) -> Config | None:
    """The default of a kernel's portable variant, or of its warp-specialised one; None where that cannot run on this GPU."""
    for variant in variants_of(kernel):
        alike = WARP_SPECIALIZED in variant.implementations if specialized else variant.portable
        if alike and supports(variant, spec, gpu):
            config = variant.space.default(spec, gpu.arch)
            if limits.before_compile(variant, spec, config, gpu) is None:
                return config
    return None


def specialized_default(kernel: str, problem: Problem, gpu: Gpu) -> Config | None:
    """The warp-specialised default, where it is the documented one of this problem on this GPU; None: the portable one is."""
    spec = problem.specialization
    width = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v))
    if problem.tma and kernel in SPECIALIZED_FROM and width >= SPECIALIZED_FROM[kernel]:
        return variant_default(kernel, spec, gpu, specialized=True)
    return None


def sm80_default(kernel: str, problem: Problem, gpu: Gpu) -> Config | None:
    """The default of a kernel of kernels/sm80, where it is the documented one of this problem on this GPU; None: it is not."""
    spec = problem.specialization
    width = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v))
    variant = implementations(kernel).get(SM80)
    if variant is None or gpu.arch not in SM80_ARCHS or width < SM80_FROM.get(kernel, width + 1):
        return None
    config = variant.space.default(spec, gpu.arch)
    return None if limits.before_compile(variant, spec, config, gpu) else config


def better_default(kernel: str, problem: Problem, gpu: Gpu) -> Config | None:
    """The documented default, where it is of a kernel that was measured to be faster than the portable one."""
    if portable_is_faster(kernel, problem):
        return sm80_default(kernel, problem, gpu)
    return specialized_default(kernel, problem, gpu) or sm80_default(kernel, problem, gpu)


def default_config(kernel: str, problem: Problem, gpu: Gpu) -> Config:
    """The config of this problem on this GPU where no row serves."""
    return better_default(kernel, problem, gpu) or portable_default(kernel, problem, gpu.arch)
