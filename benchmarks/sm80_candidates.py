"""What benchmarks/sm80_rows.py races: configs of the portable kernels and of kernels/sm80, for two limits of shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fa2tune import gpus
from fa2tune.compiling import compiler, limits, registry
from fa2tune.rows.row import Row
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import Variant, implementation_of
from fa2tune.tuning.search.candidates import Point, point

#: Shared memory a block -> the GPU whose limits stand for it.
CLASSES = {"163 KiB": "a100", "99 KiB": "a10"}
SM80 = {"fwd": "sm80/fwd", "bwd_fused": "sm80/bwd_fused"}
NEIGHBOURS = 8  #: binaries of a kernel and specialization, besides defaults and EXTRA, at most


def _bwd(m: int, n: int, warps: int, through: str, buffers: int, *split: int) -> dict[str, Any]:
    score, key, query = split
    return {
        "BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "P_THROUGH": through, "BUFFERS": buffers, "SCORE_WARPS": score,
        "KEY_WARPS": key, "QUERY_WARPS": query,
    }  # fmt: skip


#: Kernel, padded head dim -> changes to the default: what earlier races had near the front (docs/experiments/mma-sync.md).
#: What is no point of a search space is left out.
EXTRA: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]] = {
    ("fwd", 64): (
        {"SCHEDULE": "double", "BLOCK_N": 32, "maxnreg": 168, "Q_IN_REGISTERS": True, "SUMS": "add"},
        {"SCHEDULE": "double", "Q_IN_REGISTERS": True, "SUMS": "mma"}, {"SCHEDULE": "double", "SUMS": "add"},
        {"SCHEDULE": "double", "BLOCK_N": 128, "SUMS": "add"}, {"SCHEDULE": "fa2", "BLOCK_N": 128, "SUMS": "add"},
        {"SCHEDULE": "fa2", "BLOCK_M": 64, "SUMS": "add"}, {"SCHEDULE": "fa2", "BLOCK_N": 128},
    ),
    ("fwd", 128): (
        {"SCHEDULE": "double", "SUMS": "add"}, {"SCHEDULE": "double", "BLOCK_N": 32, "SUMS": "mma"},
        {"SCHEDULE": "double", "BLOCK_N": 32, "SUMS": "add"}, {"SCHEDULE": "fa2", "SUMS": "add"}, {"SCHEDULE": "double"},
    ),
    ("fwd", 256): (
        {"BLOCK_M": 64, "num_warps": 4}, {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4}, {"BLOCK_N": 64, "num_warps": 8},
        {"SCHEDULE": "double", "SUMS": "add"}, {"SCHEDULE": "double", "SUMS": "mma"},
    ),
    ("bwd_fused", 64): (
        _bwd(64, 64, 4, "registers", 1, 1, 4, 2), _bwd(64, 128, 8, "registers", 1, 1, 8, 2),
        _bwd(64, 64, 4, "shared", 1, 2, 2, 2), _bwd(64, 128, 8, "shared", 1, 2, 4, 2),
    ),
    ("bwd_fused", 128): (
        _bwd(64, 64, 4, "shared", 1, 2, 2, 2), _bwd(64, 128, 8, "shared", 1, 2, 4, 2), _bwd(32, 64, 4, "shared", 2, 2, 2, 1),
        _bwd(32, 128, 8, "shared", 2, 2, 2, 2), _bwd(64, 128, 8, "shared", 2, 2, 4, 2),
    ),
    ("bwd_fused", 256): (_bwd(16, 64, 8, "shared", 1, 1, 4, 1), _bwd(32, 64, 8, "shared", 1, 2, 4, 1)),
}  # fmt: skip


def fits(variant: Variant, spec: Specialization, config: Config) -> tuple[str, ...]:
    """The classes whose limits a config keeps, before a compile."""
    return tuple(
        name for name, gpu in CLASSES.items() if limits.before_compile(variant, spec, config, gpus.named(gpu)) is None
    )


def _neighbours(variant: Variant, config: Config) -> Iterator[dict[str, Any]]:
    """What differs in one dimension."""
    for name, values in variant.space.dimensions.items():
        yield from ({**config, name: value} for value in values if value != config[name])


def candidates(kernel: str, spec: Specialization, known: Sequence[Row]) -> list[dict[str, Any]]:
    """What races for a kernel and specialization, at every length; the portable default first."""
    arch = gpus.named(CLASSES["163 KiB"]).arch
    portable = registry.portable_of(kernel)
    wanted = [dict(portable.space.default(spec, arch))]
    wanted += [
        portable.space.completed(row.config)
        for row in known
        if (row.key.kernel, row.key.specialization(), row.implementation) == (kernel, spec, "pointer")
    ]
    if kernel in SM80:
        variant = registry.variant_named(SM80[kernel])
        defaults = [dict(variant.space.default(spec, gpus.named(gpu).arch)) for gpu in CLASSES.values()]
        width = max(64, compiler.padded_head_dim(spec.head_dim))
        first = defaults + [{**default, **change} for default in defaults for change in EXTRA[kernel, width]]
        wanted += [config for config in first if _a_point(variant, config)]
        seen, beside = {binary_of(variant, config) for config in first}, 0
        for config in (near for default in defaults for near in _neighbours(variant, default)):
            new = binary_of(variant, config) not in seen
            if fits(variant, spec, config) and (not new or beside < NEIGHBOURS):
                seen.add(binary_of(variant, config))
                beside += new
                wanted.append(config)
    legal = (config for config in wanted if fits(registry.variant_of(kernel, config), spec, config))
    return [dict(where) for where in dict.fromkeys(map(point, legal))]


def _a_point(variant: Variant, config: Config) -> bool:
    return registry.misfit(variant.serves, implementation_of(config), config) is None


def binary_of(variant: Variant, config: Config) -> Point:
    return point(compiler.binary_config(variant, config))
