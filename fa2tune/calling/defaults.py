"""The documented default: the config of a kernel where no row serves.

A kernel's search space names one config per architecture, head dim and mask, chosen by measurement. The portable kernel's
serves, unless the space of another implementation says that its own does: ``default_from``, a padded head dim.

The warp-specialised kernels' serve from 64 on; below, their tiles are padded to 64 columns. Measured on an H200, bf16, as
portable time over warp-specialised time. Head dim 128 and more: 1.16 to 1.45 forward, 1.32 to 1.89 backward
(benchmarks/default_of_variants.py, 2026-11-21, lengths 512 to 8k). Head dim 64: 1.08 backward; forward 1.12 to
1.25 without a mask, 0.96 to 1.24 with one (the tuner's screening of 2026-11-22, lengths 512 to 16k).

On compute capability 8.x and 12.x those of kernels/sm80 serve from 64 on, as their rows of evidence "ported" do. Under the
limits of an A100 they were 1.1 to 1.8 times as fast forward, 1.6 to 4.2 backward; under those of an L4 1.4 to 2.2 and 1.8 to
3.3 (docs/experiments/ported.md).
"""

from __future__ import annotations

from dataclasses import replace

from fa2tune.calling.schedules.forward_schedule import portable_is_faster
from fa2tune.compiling import limits, registry
from fa2tune.compiling.compiler import uses_descriptors
from fa2tune.compiling.support import supports
from fa2tune.gpus import Gpu
from fa2tune.spec.problem import Config, Problem, padded_head_dim
from fa2tune.spec.variant import WARP_SPECIALIZED

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


def better_default(kernel: str, problem: Problem, gpu: Gpu) -> Config | None:
    """The documented default, where it is of a kernel that was measured to be faster than the portable one: the first, by
    ``registry.rank``, that says so for such a call on this GPU (``default_from``, ``default_on``)."""
    spec = problem.specialization
    width = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v))
    for variant in sorted(registry.variants_of(kernel), key=lambda one: registry.rank(one.name)):
        if not variant.space.is_default(width, gpu.arch) or not supports(variant, spec, gpu):
            continue
        if WARP_SPECIALIZED in variant.implementations and portable_is_faster(kernel, problem):
            continue
        config = variant.space.default(spec, gpu.arch)
        addressed = problem.tma or not uses_descriptors(variant, config)
        if addressed and limits.before_compile(variant, spec, config, gpu) is None:
            return config
    return None


def default_config(kernel: str, problem: Problem, gpu: Gpu) -> Config:
    """The config of this problem on this GPU where no row serves."""
    return better_default(kernel, problem, gpu) or portable_default(kernel, problem, gpu.arch)
