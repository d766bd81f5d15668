"""The documented default: the config of a kernel where no row serves.

A variant's search space names one config per architecture, head dim and mask, chosen by measurement. Where both the
portable and a warp-specialised variant can run a problem, the one serves whose default is faster
(benchmarks/default_of_variants.py; H200, 2026-11-21, bf16, lengths 512 to 8k, portable time over the other's): from
padded head dim 128 on the warp-specialised one, by 1.16 to 1.45 times in the forward and 1.32 to 1.89 in the backward;
at 64, too (backward 1.08; forward 1.13 by the tuner's screening of 2026-11-22, lengths 512 to 16k: 1.12 to 1.25 without a
mask, 0.96, 1.00 and 1.12 to 1.24 with one); below 64, where tiles are padded to 64 columns, the portable one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fa2tune.compiling import limits
from fa2tune.compiling.compiler import variant_named, variants_of
from fa2tune.gpus import Gpu
from fa2tune.problem import Config, Problem, Specialization, padded_head_dim

#: Kernel -> the least padded head dim (the larger of both) from which the warp-specialised default serves
SPECIALIZED_FROM: Mapping[str, int] = {"fwd": 64, "bwd_dq": 64, "bwd_dkdv": 64}


def portable_default(kernel: str, problem: Problem, arch: int) -> Config:
    """Of the portable variant, with pointer loads where a descriptor cannot address the tensors."""
    spec = problem.specialization
    return variant_named(kernel).space.default(spec if problem.tma else replace(spec, aligned=False), arch)


def variant_default(kernel: str, spec: Specialization, gpu: Gpu, specialized: bool) -> Config | None:
    """The default of a kernel's portable variant, or of its warp-specialised one; None where that cannot run on this GPU."""
    for variant in variants_of(kernel):
        if bool(variant.serves) == specialized and variant.min_arch <= gpu.arch <= variant.max_arch:
            config = variant.space.default(spec, gpu.arch)
            if limits.before_compile(variant, spec, config, gpu) is None:
                return config
    return None


def default_config(kernel: str, problem: Problem, gpu: Gpu) -> Config:
    """What serves this problem on this GPU where no row does."""
    spec = problem.specialization
    width = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v))
    if problem.tma and kernel in SPECIALIZED_FROM and width >= SPECIALIZED_FROM[kernel]:
        config = variant_default(kernel, spec, gpu, specialized=True)
        if config is not None:
            return config
    return portable_default(kernel, problem, gpu.arch)
