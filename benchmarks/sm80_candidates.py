"""What benchmarks/sm80_rows.py races: few configs of kernels/sm80, next to the portable default; and forms of them that are not
searched, which benchmarks/sm80_race.py races."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fa2tune.compiling import limits, registry
from fa2tune.gpus import Gpu
from fa2tune.spec.problem import Specialization, padded_head_dim
from fa2tune.spec.variant import implementation_of
from fa2tune.tuning.search.candidates import point

SM80 = {"fwd": "sm80/fwd", "bwd_fused": "sm80/bwd_fused"}


def _fwd(m: int, n: int, schedule: str, sums: str, held: bool, **more: Any) -> dict[str, Any]:
    return {
        "BLOCK_M": m,
        "BLOCK_N": n,
        "SCHEDULE": schedule,
        "SUMS": sums,
        "Q_IN_REGISTERS": held,
        "maxnreg": 0,
        **more,
    }


def _bwd(m: int, n: int, warps: int, through: str, *split: int, **more: Any) -> dict[str, Any]:
    score, key, query = split
    return {
        "BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "P_THROUGH": through, "SCORE_WARPS": score, "KEY_WARPS": key,
        "QUERY_WARPS": query, **more,
    }  # fmt: skip


#: Kernel, padded head dim -> changes to the default: what earlier races had near the front (docs/experiments/mma-sync.md).
#: What is no point of a search space, or breaks a limit, is left out.
EXTRA: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]] = {
    ("fwd", 64): (
        _fwd(128, 32, "double", "add", True, maxnreg=168), _fwd(128, 64, "double", "first", True),
        _fwd(128, 64, "double", "add", False), _fwd(128, 128, "fa2", "add", False), _fwd(64, 64, "fa2", "add", False),
    ),
    ("fwd", 128): (
        _fwd(128, 32, "double", "first", False), _fwd(128, 32, "double", "add", False), _fwd(128, 64, "fa2", "add", False),
        _fwd(128, 64, "fa2", "mma", False), _fwd(128, 64, "fa2", "first", False), _fwd(128, 64, "double", "add", False),
    ),
    ("fwd", 256): (
        _fwd(128, 32, "double", "mma", True), _fwd(128, 32, "fa2", "mma", True), _fwd(128, 64, "fa2", "mma", False),
        _fwd(64, 32, "fa2", "first", False, num_warps=4), _fwd(64, 64, "fa2", "first", False, num_warps=4),
        _fwd(64, 32, "double", "mma", True, num_warps=4),
    ),
    ("bwd_fused", 64): (_bwd(64, 64, 4, "registers", 1, 4, 2), {"HEADS_PER_WAVE": 4}),
    ("bwd_fused", 128): (
        _bwd(64, 64, 4, "shared", 2, 2, 2), _bwd(64, 128, 8, "shared", 2, 4, 2), _bwd(64, 128, 8, "shared", 2, 2, 2),
    ),
    ("bwd_fused", 256): (
        _bwd(64, 64, 8, "shared", 2, 2, 2), _bwd(16, 64, 8, "shared", 1, 4, 1), _bwd(32, 64, 8, "shared", 1, 4, 1),
        _bwd(16, 64, 8, "shared", 1, 2, 1),
    ),
}  # fmt: skip
HELD, KEYS = {"V_IN_REGISTERS": True}, {"KEYS_APART": True}
BOTH = {"SCORES_APART": True, **KEYS}
#: Kernel, head dim -> changes to the default that are newer than the shipped rows, and may have values that no search has. Rows
#: are raced with those that a search space has. Why these: docs/experiments/mma-sync.md.
FORMS: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]] = {
    ("fwd", 96): (
        _fwd(128, 32, "double", "first", False, Q_HELD=96),
        _fwd(128, 64, "fa2", "mma", False, Q_HELD=32), _fwd(128, 32, "fa2", "first", False, Q_HELD=96),
    ),
    ("fwd", 128): (
        _fwd(128, 32, "double", "first", False, Q_HELD=32), _fwd(128, 32, "double", "add", False, Q_HELD=32),
        _fwd(128, 32, "fa2", "first", False, Q_HELD=32),
    ),
    ("fwd", 256): (_fwd(64, 32, "fa2", "mma", True, num_warps=4),),
    ("bwd_fused", 96): (
        _bwd(64, 128, 8, "shared", 2, 4, 2, EARLY=True, **HELD, **KEYS),
        _bwd(64, 128, 8, "shared", 2, 4, 2, EARLY=False, **HELD),
        _bwd(64, 128, 8, "shared", 2, 4, 2, EARLY=True, **KEYS),
    ),
    ("bwd_fused", 128): (
        _bwd(64, 128, 8, "shared", 2, 4, 2, EARLY=True, **KEYS), _bwd(64, 64, 4, "shared", 2, 2, 2, EARLY=True, **KEYS),
        _bwd(64, 128, 8, "one", 2, 4, 2, EARLY=False, **HELD),
    ),
    ("bwd_fused", 256): (
        _bwd(64, 64, 8, "shared", 4, 2, 2, **BOTH), _bwd(64, 64, 8, "shared", 2, 2, 2, **KEYS),
        _bwd(32, 64, 8, "shared", 2, 2, 2, **HELD), _bwd(32, 64, 8, "shared", 2, 2, 2, **HELD, **KEYS),
        _bwd(16, 64, 8, "shared", 2, 2, 1, **BOTH),
    ),
}  # fmt: skip


def candidates(kernel: str, spec: Specialization, gpu: Gpu) -> list[dict[str, Any]]:
    """What races for a kernel of ``SM80`` and a specialization, at every length; the kernel's own default first."""
    variant = registry.variant_named(SM80[kernel])
    default = dict(variant.space.default(spec, gpu.arch))
    width = max(64, padded_head_dim(spec.head_dim))
    changes = (*EXTRA[kernel, width], *FORMS.get((kernel, spec.head_dim), ()))
    wanted = [default, *({**default, **change} for change in changes)]
    able = (
        config
        for config in wanted
        if registry.misfit(kernel, implementation_of(config), config) is None
        and limits.before_compile(variant, spec, config, gpu) is None
    )
    return [dict(where) for where in dict.fromkeys(map(point, able))]
