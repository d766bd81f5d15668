"""What a request asked for, key by key, and which of its keys a run left open.

A key is settled by a row, made in this run or kept from an earlier one, or by a stated reason why it has none
(``Report.failed``). What is neither is missing, and ``fa2tune tune`` ends with exit status 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import BACKWARD, STRATEGIES

if TYPE_CHECKING:
    from fa2tune.tuning.request.plan import TuningPlan
    from fa2tune.tuning.select.report import Report

PARTS = {kernel for kernels in STRATEGIES.values() for kernel in kernels}  #: what a whole backward consists of


def requested(plan: TuningPlan) -> list[TuningKey]:
    """Every key that should have a row at the end: of each kernel, and of the whole backward where all its kernels are asked
    for."""
    kernels = [*plan.kernels, *([BACKWARD] if {*plan.kernels} >= PARTS else [])]
    return [key for spec in plan.specializations() for kernel in kernels for key in plan.keys(spec, kernel)]


def close(plan: TuningPlan, report: Report) -> None:
    """Fill in, at the end of a run, what became of the keys that have no row."""
    have = {row.key for row in report.rows}
    failed = {key: why for key, why in report.failed.items() if key not in have}
    missing = []
    for key in requested(plan):
        if key in have or key in failed:
            continue
        parts = [key.with_(kernel=kernel) for kernel in sorted(PARTS)] if key.kernel == BACKWARD else []
        lacking = [part.kernel for part in parts if part in failed]
        if lacking and all(part in have or part in failed for part in parts):
            failed[key] = f"no row of {', '.join(lacking)} to put it together from"
        else:
            missing.append(key)
    report.failed, report.missing = failed, missing


def described_keys(keys: Sequence[TuningKey]) -> Iterator[str]:
    """Keys in words, the lengths of one search together: "fwd fp16 64 causal 512, 1024"."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        dims = f"{key.head_dim}" + (f"/{key.head_dim_v}" if key.head_dim_v != key.head_dim else "")
        title = f"{key.kernel} {key.dtype} {dims} {key.kind}"
        groups.setdefault(title, []).append(str(key.bucket))
    for title, lengths in groups.items():
        yield f"{title} {', '.join(lengths)}"
